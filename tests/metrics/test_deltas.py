"""Increments for an exporter in another process: none is lost, none is reported twice."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import fields

import pytest
from calls import calls_of
from hypothesis import example, given
from hypothesis import strategies as st
from watched_stack import WatchedStack

from tierkv.metrics.counters import CoreCounters
from tierkv.metrics.definitions import CALL_BUCKETS, GAUGES, HISTOGRAMS, WAIT_BUCKETS, counters
from tierkv.metrics.deltas import Delta, Deltas, empty_delta, merge, observations
from tierkv.metrics.histogram import Histogram
from tierkv.metrics.watched import TierCondition, TierContent, TierLoad


def taken(deltas: Deltas) -> Delta:
    """Take the changes, of which there must be some."""
    delta = deltas.take()
    assert delta is not None
    return delta


def test_the_first_message_begins_every_series_at_zero() -> None:
    """A counter that appears with its first increment hides that increment from every rate over it."""
    first = taken(Deltas(WatchedStack()))
    assert first["counters"]["tierkv_lookups"] == {"": 0}
    assert first["counters"]["tierkv_tier_corrupt"] == {"disk": 0}
    assert first["histograms"] == {"tierkv_tier_read_seconds": {"disk": [0] * (len(WAIT_BUCKETS) + 1) + [0.0]}}


def test_increments_and_then_nothing() -> None:
    """An idle step costs the front end no message, and no increment is reported twice."""
    watched = WatchedStack()
    deltas = Deltas(watched)
    taken(deltas)
    assert deltas.take() is None
    watched.metrics.counters.lookups += 3
    watched.metrics.counters.chunks_hit["disk"] += 2
    watched.tiers.counts["disk"]["bytes_read"] += 4096
    watched.metrics.reads.observe(0.2)
    delta = taken(deltas)
    assert delta["counters"] == {
        "tierkv_lookups": {"": 3},
        "tierkv_chunks_hit": {"disk": 2},
        "tierkv_tier_bytes_read": {"disk": 4096},
    }
    assert sum(delta["histograms"]["tierkv_tier_read_seconds"]["disk"][:-1]) == 1
    assert deltas.take() is None


def test_a_gauge_is_reported_when_it_changes() -> None:
    """A speed that was not measured yet has no value, and is not zero."""
    watched = WatchedStack()
    deltas = Deltas(watched)
    none_waits = {"tierkv_waiting_requests": {"slots": 0.0, "first_reads": 0.0}}
    assert taken(deltas)["gauges"] == {**none_waits, "tierkv_waiting_requests_age_seconds": {"": 0.0}}
    watched.tiers.measured["disk"] = {"latency_s": 0.01, "bytes_per_s": 2e9}
    watched.metrics.prefill_tokens_per_s = 1000.0
    assert taken(deltas)["gauges"] == {
        "tierkv_tier_read_latency_seconds": {"disk": 0.01},
        "tierkv_tier_read_bytes_per_second": {"disk": 2e9},
        "tierkv_prefill_tokens_per_second": {"": 1000.0},
    }
    assert deltas.take() is None
    watched.metrics.prefill_tokens_per_s = 900.0
    assert taken(deltas)["gauges"] == {"tierkv_prefill_tokens_per_second": {"": 900.0}}


def test_a_merged_report_leaves_the_next_one_alone() -> None:
    """The front end adds later gauges to the first message it got, which must not be what the stack compares with."""
    watched = WatchedStack()
    watched.metrics.prefill_tokens_per_s = 1000.0
    deltas = Deltas(watched)
    later = {"tierkv_prefill_tokens_per_second": {"": 900.0}}
    merge(taken(deltas), {"counters": {}, "gauges": later, "histograms": {}})
    assert deltas.take() is None


def test_a_tier_that_came_again_counts_from_zero() -> None:
    """After detaching and attaching again its counters are smaller than before; decreasing a counter is an error."""
    watched = WatchedStack()
    watched.tiers.counts["disk"]["bytes_read"] = 100
    watched.metrics.reads.observe(0.2)
    deltas = Deltas(watched)
    taken(deltas)
    watched.tiers.counts = {"disk": {"bytes_read": 7, "corrupt": 0}}
    watched.metrics.reads = Histogram(WAIT_BUCKETS)
    watched.metrics.reads.observe(5.0)
    delta = taken(deltas)
    assert delta["counters"] == {"tierkv_tier_bytes_read": {"disk": 7}}
    assert delta["histograms"]["tierkv_tier_read_seconds"]["disk"][-1] == 5.0


def test_a_report_takes_calls_for_what_has_changed() -> None:
    """The engine's thread looks at all metrics once a second: a call per value of each was a tenth of a busy step."""
    watched = WatchedStack()
    watched.tiers.contents = {name: TierContent(4, 4096, 8192, 1) for name in ("host", "disk")}
    watched.tiers.loads = {"disk": TierLoad(1, 0.5, 1, 0, 0)}
    watched.tiers.conditions = {"disk": TierCondition(usable=True, writable=True)}
    deltas = Deltas(watched)
    taken(deltas)
    unchanged = calls_of(deltas.take)
    assert unchanged <= 75
    watched.metrics.counters.lookups += 1
    watched.tiers.contents["disk"] = TierContent(5, 5120, 8192, 0)
    assert calls_of(deltas.take) <= unchanged + 20


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.floats(0, 20), max_size=3)), max_size=8))
def test_merged_intervals_are_the_whole(intervals: list[tuple[int, list[float]]]) -> None:
    """Merging deltas, before or after their transport, gives the totals; a source is unchanged."""
    watched = WatchedStack()
    deltas = Deltas(watched)
    whole, messages = empty_delta(), []
    for lookups, seconds in intervals:
        watched.metrics.counters.lookups += lookups
        watched.metrics.counters.evictions["host"] += lookups
        for value in seconds:
            watched.metrics.reads.observe(value)
        delta = deltas.take()
        if delta is not None:
            text = json.dumps(delta)
            messages.append((delta, text))
            merge(whole, json.loads(text))
    assert all(json.dumps(delta) == text for delta, text in messages)
    if intervals:
        assert whole["counters"]["tierkv_lookups"][""] == watched.metrics.counters.lookups
        assert whole["counters"]["tierkv_evictions"]["host"] == watched.metrics.counters.evictions["host"]
        row = whole["histograms"]["tierkv_tier_read_seconds"]["disk"]
        assert tuple(row[:-1]) == watched.metrics.reads.counts
        assert row[-1] == pytest.approx(watched.metrics.reads.total)


@given(
    st.lists(st.one_of(st.floats(0, 30), st.sampled_from(WAIT_BUCKETS), st.floats(0, 1e-3)), max_size=40),
    st.sampled_from((WAIT_BUCKETS, CALL_BUCKETS)),
)
@example([5.01, 10.01], WAIT_BUCKETS)  # little room above the edges for observations beyond the last one
def test_replayed_observations_fill_the_same_buckets(values: list[float], buckets: tuple[float, ...]) -> None:
    """An exporter that can only observe has the exact count of every bucket, and the sum."""
    seen, replayed = Histogram(buckets), Histogram(buckets)
    for value in values:
        seen.observe(value)
    for value, count in observations(buckets, [*seen.counts, seen.total]):
        for _ in range(count):
            replayed.observe(value)
    assert replayed.counts == seen.counts
    assert replayed.total == pytest.approx(seen.total, rel=1e-4, abs=1e-4)


def test_a_label_is_where_the_definition_says() -> None:
    """An exporter makes families from the definitions: a counter by tier that is defined without a label would fail."""
    defined = {metric.name: metric for metric in (*counters(), *GAUGES, *HISTOGRAMS)}
    assert all(len(metric.labels) <= 1 for metric in defined.values())
    for field in fields(CoreCounters):
        by_tier = isinstance(getattr(CoreCounters(), field.name), Counter)
        assert defined[f"tierkv_{field.name}"].labels == (("tier",) if by_tier else ())
