"""Counters reach a scrape under stable names."""

from __future__ import annotations

from dataclasses import fields

from prometheus_client import CollectorRegistry, generate_latest
from watched_stack import WatchedStack

from tierkv.dispatch.stats import TierStats
from tierkv.metrics.counters import CoreCounters
from tierkv.metrics.definitions import COUNTERS, READ_SECONDS, TIER_COUNTERS
from tierkv.metrics.histogram import Histogram
from tierkv.metrics.prometheus import StackCollector
from tierkv.metrics.stack_stats import Series
from tierkv.metrics.watched import TierCondition


def scrape(stack: WatchedStack) -> str:
    """Return the text of a scrape."""
    registry = CollectorRegistry()
    registry.register(StackCollector(stack, {"engine": "3"}))
    return generate_latest(registry).decode()


def test_every_counter_is_exported_with_a_help_text() -> None:
    """A new counter must not be missing from /metrics."""
    text = scrape(WatchedStack())
    for field in fields(CoreCounters):
        assert f"# HELP tierkv_{field.name}_total" in text


def test_counters_by_tier_carry_the_tier() -> None:
    """Dashboards of one tier filter by its label; every sample has the constant labels."""
    stack = WatchedStack()
    stack.metrics.counters.deferrals = 2
    stack.metrics.counters.tokens_loaded["disk"] += 512
    text = scrape(stack)
    assert 'tierkv_tokens_loaded_total{engine="3",tier="disk"} 512.0' in text
    assert 'tierkv_deferrals_total{engine="3"} 2.0' in text


def test_dispatch_counters_are_one_family_per_field() -> None:
    """Two tiers, one family: a second family of one name would break the scrape."""
    stack = WatchedStack()
    stack.tiers.counts = {"disk": {"bytes_read": 7}, "s3": {"bytes_read": 9}}
    text = scrape(stack)
    assert text.count("# TYPE tierkv_tier_bytes_read_total counter") == 1
    assert 'tierkv_tier_bytes_read_total{engine="3",tier="s3"} 9.0' in text


def test_histograms_carry_their_labels() -> None:
    """Two tiers are two series of one family; a scrape with two families of one name is refused."""
    slow = Histogram(READ_SECONDS.buckets)
    slow.observe(0.2)
    stack = WatchedStack()
    stack.metrics.more = [Series(READ_SECONDS, ("s3",), slow)]
    text = scrape(stack)
    assert text.count("# TYPE tierkv_tier_read_seconds histogram") == 1
    assert 'tierkv_tier_read_seconds_bucket{engine="3",le="0.1",tier="s3"} 0.0' in text
    assert 'tierkv_tier_read_seconds_bucket{engine="3",le="0.5",tier="s3"} 1.0' in text
    assert 'tierkv_tier_read_seconds_sum{engine="3",tier="s3"} 0.2' in text


def test_every_counter_has_its_meaning() -> None:
    """A counter without a meaning would fail a scrape; a meaning without a counter is stale."""
    for of, meanings in ((CoreCounters, COUNTERS), (TierStats, TIER_COUNTERS)):
        counted = {field.name for field in fields(of)}
        assert counted == set(meanings), (
            f"not in both {of.__name__} and tierkv/metrics/definitions.py: {sorted(counted ^ set(meanings))}"
        )


def test_a_tier_that_cannot_be_written_is_exported() -> None:
    """An alert can tell a tier that is lost from one that is only read."""
    stack = WatchedStack()
    stack.tiers.conditions = {"disk": TierCondition(usable=True, writable=False)}
    text = scrape(stack)
    assert 'tierkv_tier_usable{engine="3",tier="disk"} 1.0' in text
    assert 'tierkv_tier_writable{engine="3",tier="disk"} 0.0' in text


def test_a_tier_that_is_slower_than_computing_is_exported() -> None:
    """A bucket with fewer hits than before is slow, and not broken: a query can tell."""
    stack = WatchedStack()
    stack.tiers.conditions = {"s3": TierCondition(usable=True, writable=True, slow=True)}
    assert 'tierkv_tier_slow{engine="3",tier="s3"} 1.0' in scrape(stack)


def test_the_room_of_a_tier_is_exported() -> None:
    """A disk that is smaller than the tier's capacity is seen beside it, without a look at the log."""
    stack = WatchedStack()
    assert "tierkv_tier_room_bytes" not in scrape(stack)
    stack.tiers.rooms = {"disk": 4096}
    assert 'tierkv_tier_room_bytes{engine="3",tier="disk"} 4096.0' in scrape(stack)


def test_gauges_are_exported_once_known() -> None:
    """A tier that was never read has no speed; a zero would trigger false alerts."""
    stack = WatchedStack()
    assert "tierkv_tier_read_latency_seconds" not in scrape(stack)
    stack.tiers.measured = {"disk": {"latency_s": 0.25}, "s3": {"latency_s": 0.5}}
    text = scrape(stack)
    assert text.count("# TYPE tierkv_tier_read_latency_seconds gauge") == 1
    assert 'tierkv_tier_read_latency_seconds{engine="3",tier="s3"} 0.5' in text
