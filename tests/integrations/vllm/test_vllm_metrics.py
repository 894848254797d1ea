"""Our figures through vLLM's own machinery: its message codec, its exporters, its registry, its log."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from stack_bed import opened, prompts_of, serve, stack_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats, OffloadPromMetrics
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tierkv.integrations.vllm.metrics import (
    INTERVAL_S,
    StatsFeed,
    TierKVPromMetrics,
    TierKVStats,
    build_kv_connector_stats,
    build_prom_metrics,
    metric_definitions,
    unregister_series,
)
from tierkv.metrics.transfer_stats import LOAD, STORE

LABELS = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["tiny", "0"], 1: ["tiny", "1"]}
TYPES = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}

Samples = dict[tuple[str, str, str], float]
"""Sample's name, engine and the value of the last own label ("le" left out) -> value."""


class MetricsSpec(OffloadingSpec):
    """Seam A's spec, as far as the front end knows it."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Ours."""
        return metric_definitions()


def config_of(**extra: Any) -> Any:
    """The part of vLLM's configuration that exporters read."""
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))


def scraped() -> Samples:
    """Scrape of vLLM's registry, read by Prometheus' own parser."""
    found: Samples = {}
    for family in text_string_to_metric_families(generate_latest(REGISTRY).decode()):
        for sample in family.samples:
            own = [value for label, value in sample.labels.items() if label not in (*LABELS, "le")]
            if sample.labels.get("le", "+Inf") == "+Inf" and "engine" in sample.labels:
                found[sample.name, sample.labels["engine"], own[0] if own else ""] = sample.value
    return found


def sent(stats: Any) -> dict[str, Any]:
    """Statistics as they come out in the front end's process: encoded and decoded as vLLM does it."""
    outputs = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats=stats.to_dict()))
    decoded = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))
    arrived = decoded.scheduler_stats.kv_connector_stats
    assert isinstance(arrived, dict)
    return arrived


@pytest.fixture(autouse=True)
def _clean_registry() -> Iterator[None]:
    """Families of one test are not the next one's."""
    yield
    unregister_series()
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith("vllm:"):
            REGISTRY.unregister(collector)


@pytest.fixture(params=["connector", "spec"])
def seam(request: pytest.FixtureRequest) -> str:
    """Both ways through vLLM."""
    return str(request.param)


def exporter(seam: str) -> Any:
    """Exporter of the front end."""
    if seam == "connector":
        return build_prom_metrics(config_of(), TYPES, LABELS, ENGINES)
    spec = config_of(spec_name="MetricsSpec", spec_module_path=__name__)
    return OffloadPromMetrics(spec, TYPES, LABELS, ENGINES)


def take(feed: StatsFeed, seam: str) -> Any:
    """One step's statistics."""
    return feed.connector_stats() if seam == "connector" else feed.offloading_stats()


@pytest.mark.parametrize("every", [1, 3])
def test_a_scrape_says_what_the_stack_counted(tmp_path: Path, seam: str, every: int) -> None:
    """Through vLLM's codec, step by step or aggregated, no value is lost or counted twice."""
    exported = exporter(seam)
    prompts = prompts_of(11, 6)
    with opened(stack_config(tmp_path)) as stack:
        feed, pending = StatsFeed(stack), None
        for i, prompt in enumerate([*prompts, *prompts]):
            serve(stack, [prompt])
            stats = take(feed, seam)
            assert stats is not None
            pending = pending.aggregate(stats) if pending is not None else stats
            if i % every == every - 1:
                exported.observe(sent(pending), engine_idx=1)
                pending = None
        stack.flush()
        last = take(feed, seam)
        if last is not None:
            exported.observe(sent(last), engine_idx=1)
        assert take(feed, seam) is None
        found, counters, tiers = scraped(), stack.metrics.counters, stack.tiers.stats()
        for field, value in counters.as_dict().items():
            for tier, count in value.items() if isinstance(value, dict) else [("", value)]:
                assert found[f"tierkv_{field}_total", "1", tier] == count
        assert found["tierkv_lookups_total", "1", ""] > 0
        assert found["tierkv_chunks_hit_total", "1", "disk"] > 0
        for tier, fields in tiers.items():
            for field, count in fields.items():
                assert found[f"tierkv_tier_{field}_total", "1", tier] == count
        assert found["tierkv_tier_bytes_written_total", "1", "objects"] > 0
        for series in stack.metrics.series():
            label = series.label_values[0] if series.label_values else ""
            name, histogram = series.metric.name, series.histogram  # vLLM exports no empty ones of its offloading
            assert found.get((f"{name}_count", "1", label), 0) == histogram.count
            assert found.get((f"{name}_sum", "1", label), 0) == pytest.approx(histogram.total, rel=1e-3)
        for tier, speeds in stack.tiers.speeds().items():
            assert found["tierkv_tier_read_latency_seconds", "1", tier] == speeds["latency_s"]
    assert found.get(("tierkv_lookups_total", "0", ""), 0) == 0


def test_dashboards_of_vllm_go_on_working(tmp_path: Path) -> None:
    """With the connector, tierkv exports the names of vLLM's offloading; they count the same bytes."""
    exported = exporter("connector")
    with opened(stack_config(tmp_path)) as stack:
        feed = StatsFeed(stack)
        for prompt in prompts_of(12, 3) * 2:
            serve(stack, [prompt])
        stats = feed.connector_stats()
        assert stats is not None
        exported.observe(sent(stats), engine_idx=0)
        histograms = {(series.metric.name, *series.label_values): series.histogram for series in stack.metrics.series()}
    found = scraped()
    loads, stores = histograms["tierkv_transfer_bytes", LOAD], histograms["tierkv_transfer_bytes", STORE]
    assert loads.total > 0
    assert found["vllm:kv_offload_load_bytes_total", "0", ""] == loads.total
    assert found["vllm:kv_offload_store_bytes_total", "0", ""] == stores.total
    assert found["vllm:kv_offload_load_size_count", "0", ""] == loads.count
    assert found["vllm:kv_offload_load_time_total", "0", ""] == histograms["tierkv_transfer_seconds", LOAD].total
    assert (
        found["vllm:kv_offload_lookup_sync_delay_seconds_count", "0", ""] == histograms["tierkv_lookup_seconds",].count
    )
    assert found["vllm:kv_offload_allocation_failure_total", "0", ""] == stack.metrics.counters.stores_refused


def test_a_busy_engine_is_told_now_and_then_an_idle_one_at_once(tmp_path: Path, seam: str) -> None:
    """Each step of a busy engine would pay for looking through all series; the last word must not wait for a step."""
    now_s = [5.0]
    with opened(stack_config(tmp_path)) as stack:
        feed = StatsFeed(stack, lambda: now_s[0])
        ask = feed.connector_stats if seam == "connector" else feed.offloading_stats
        assert ask(idle=False) is not None
        serve(stack, prompts_of(13, 1))
        now_s[0] += 0.9 * INTERVAL_S
        assert ask(idle=False) is None
        assert ask(idle=True) is not None
        serve(stack, prompts_of(14, 1))
        assert ask(idle=False) is None
        now_s[0] += INTERVAL_S
        assert ask(idle=False) is not None


def test_series_begin_at_zero(seam: str) -> None:
    """A rate over a counter that appears with its first increment misses it: what needs no tier is there at once."""
    exported = exporter(seam)
    with opened({"host": {"capacity": "1MiB"}}) as stack:
        exported.observe(sent(take(StatsFeed(stack), seam)), engine_idx=0)
    found = scraped()
    assert found["tierkv_lookups_total", "0", ""] == 0
    assert found["tierkv_loads_failed_total", "0", ""] == 0


def test_a_second_engine_in_one_process(seam: str) -> None:
    """VLLM unregisters its own series before it builds an exporter; a second one would fail at the first one's ours."""
    exporter(seam)
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith("vllm:"):  # as unregister_vllm_metrics does
            REGISTRY.unregister(collector)
    exporter(seam)


def test_beside_a_connector_that_has_the_names_of_vllm(caplog: pytest.LogCaptureFixture) -> None:
    """In a MultiConnector the other one may be vLLM's offloading: its names stay its own, ours are exported."""
    taken = Counter("vllm:kv_offload_load_bytes", "theirs", LABELS)
    with caplog.at_level(logging.WARNING):
        exported = exporter("connector")
    exported.observe({"counters": {"tierkv_lookups": {"": 2}, "tierkv_stores_refused": {"": 1}}}, engine_idx=0)
    assert scraped()["tierkv_lookups_total", "0", ""] == 2
    assert scraped()["vllm:kv_offload_allocation_failure_total", "0", ""] == 1
    assert taken in REGISTRY._collector_to_names


def test_a_connector_that_comes_later_may_have_the_names_of_vllm() -> None:
    """VLLM builds their exporters in the order of the settings, and a name that is taken ends the front end."""
    exported = exporter("connector")
    taken = Counter("vllm:kv_offload_load_bytes", "theirs", LABELS)
    exported.observe({"counters": {"tierkv_stores_refused": {"": 1}}}, engine_idx=0)
    assert scraped()["vllm:kv_offload_allocation_failure_total", "0", ""] == 1
    assert taken in REGISTRY._collector_to_names


def test_inside_a_multi_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's log looks the connectors of a MultiConnector up by name; one it does not know would end the front end."""
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    exporter("connector")
    data = {"TierKVConnector": {"counters": {"tierkv_lookups": {"": 2}}}}
    stats = MultiConnector.build_kv_connector_stats(data)
    assert stats.aggregate(MultiConnector.build_kv_connector_stats(data)).reduce() == {
        "TierKVConnector": {"lookups": 4}
    }


def test_what_the_front_end_does_not_know_is_left_out() -> None:
    """An exception in the front end's output loop ends the server; engine and front end may be of two versions."""
    exported = exporter("connector")
    exported.observe({"counters": {"tierkv_of_tomorrow": {"x": 1}}, "histograms": {"tierkv_unheard_of": {"": [1, 2]}}})
    exported.observe({"counters": {"tierkv_lookups": {"": 1}}}, engine_idx=7)
    exported.observe({})
    assert scraped()["tierkv_lookups_total", "0", ""] == 0


def test_the_log_line_is_short_and_says_how_it_goes() -> None:
    """VLLM prints what ``reduce`` gives every ten seconds: what did not move is not there."""
    first = build_kv_connector_stats({"counters": {"tierkv_lookups": {"": 2}, "tierkv_tokens_loaded": {"disk": 64}}})
    second = TierKVStats(data={"counters": {"tierkv_lookups": {"": 3}}, "gauges": {}, "histograms": {}})
    assert first.aggregate(second).reduce() == {"lookups": 5, "tokens_loaded disk": 64}
    assert second.reduce() == {"lookups": 3}
    first.reset()
    assert first.is_empty()
    assert build_kv_connector_stats().is_empty()


def test_statistics_pickle() -> None:
    """Between the processes of one engine vLLM pickles them."""
    stats = build_kv_connector_stats({"counters": {"tierkv_lookups": {"": 2}}})
    again = pickle.loads(pickle.dumps(stats))
    assert (type(again), again.data) == (TierKVStats, stats.data)


def test_a_copy_is_aggregated_not_the_message() -> None:
    """VLLM hands one message to its log and to its exporter: the log's sums must not turn up in the exporter's."""
    message = {"counters": {"tierkv_lookups": {"": 2}}, "gauges": {}, "histograms": {"h": {"": [1, 0.5]}}}
    build_kv_connector_stats(message).aggregate(build_kv_connector_stats(message))
    assert message == {"counters": {"tierkv_lookups": {"": 2}}, "gauges": {}, "histograms": {"h": {"": [1, 0.5]}}}


def test_the_exporters_are_what_vllm_asks_for() -> None:
    """Their types are checked by vLLM's aggregation."""
    assert isinstance(exporter("connector"), TierKVPromMetrics)
    with opened({"host": {"capacity": "1MiB"}}) as stack:
        assert isinstance(StatsFeed(stack).offloading_stats(), OffloadingConnectorStats)
