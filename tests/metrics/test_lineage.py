"""Metrics under the names that dashboards of vLLM use."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from tierkv.metrics.definitions import LINEAGE, SIZE_BUCKETS, WAIT_BUCKETS
from tierkv.metrics.histogram import Histogram as PlainHistogram
from tierkv.metrics.lineage import LineageMetrics
from tierkv.metrics.stack_stats import ConnectorStats
from tierkv.metrics.transfer_stats import LOAD, STORE, TransferStats


def stats_of(*operations: tuple[str, int, float], **fields: Any) -> ConnectorStats:
    """Samples as a stack reports them."""
    transfers = TransferStats()
    for operation in operations:
        transfers.record(*operation)
    return ConnectorStats(transfers, **fields)


def scrape(registry: CollectorRegistry) -> str:
    """Return the text of a scrape."""
    return generate_latest(registry).decode()


def test_s107_two_engines_and_two_types_are_four_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup of a child by its labels takes a lock and builds strings; a busy server would do it for each copy."""
    made: list[tuple[str, ...]] = []
    for metric_class in (Counter, Histogram):
        original = metric_class.labels

        def labels(self: Any, *values: str, _original: Any = original) -> Any:
            if self._name == "vllm:kv_offload_size":
                made.append(values)
            return _original(self, *values)

        monkeypatch.setattr(metric_class, "labels", labels)
    registry = CollectorRegistry()
    metrics = LineageMetrics(registry, ["model_name", "engine"], {0: ("m", "0"), 1: ("m", "1")})
    for _ in range(3):
        for engine in (0, 1):
            metrics.observe(stats_of((LOAD, 2_000_000, 0.5), (STORE, 3_000_000, 0.25)), engine)
    assert sorted(made) == [
        ("m", "0", LOAD), ("m", "0", STORE), ("m", "1", LOAD), ("m", "1", STORE)
    ]  # fmt: skip
    text = scrape(registry)
    where = 'model_name="m"'
    assert f'vllm:kv_offload_total_bytes_total{{engine="1",{where},transfer_type="CPU_to_GPU"}} 6e+06' in text
    assert f'vllm:kv_offload_total_time_total{{engine="0",{where},transfer_type="GPU_to_CPU"}} 0.75' in text
    assert f'vllm:kv_offload_size_count{{engine="0",{where},transfer_type="GPU_to_CPU"}} 3.0' in text
    assert f'vllm:kv_offload_store_bytes_total{{engine="0",{where}}} 9e+06' in text
    assert f'vllm:kv_offload_load_time_total{{engine="1",{where}}} 1.5' in text
    assert f'vllm:kv_offload_load_size_count{{engine="1",{where}}} 3.0' in text


def test_s108_edges_of_buckets() -> None:
    """The documented edges, each inclusive: the quantiles of a dashboard depend on both."""
    assert SIZE_BUCKETS == (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
    registry = CollectorRegistry()
    metrics = LineageMetrics(registry, [], {0: ()})
    metrics.observe(stats_of(*((LOAD, int(edge), 0.1) for edge in SIZE_BUCKETS), (LOAD, 200_000_001, 0.1)))
    text = scrape(registry)
    for i, edge in enumerate(
        ("1e+06", "5e+06", "1e+07", "2e+07", "4e+07", "6e+07", "8e+07", "1e+08", "1.5e+08", "2e+08")
    ):
        assert f'vllm:kv_offload_size_bucket{{le="{edge}",transfer_type="CPU_to_GPU"}} {i + 1}.0' in text
    assert 'vllm:kv_offload_size_bucket{le="+Inf",transfer_type="CPU_to_GPU"} 11.0' in text


def test_s108_our_own_histograms_have_inclusive_edges_too() -> None:
    """One rule for both exports."""
    histogram = PlainHistogram(SIZE_BUCKETS)
    for edge in SIZE_BUCKETS:
        histogram.observe(edge)
    histogram.observe(2e8 + 1)
    assert [count for _, count in histogram.cumulative()] == list(range(1, 12))
    assert histogram.count == 11
    assert histogram.total == sum(SIZE_BUCKETS) + 2e8 + 1


def test_delays_and_refusals_reach_the_flat_names() -> None:
    """They arrive as a dict from another process."""
    registry = CollectorRegistry()
    metrics = LineageMetrics(registry, ["engine"], {0: ("0",)})
    sent = stats_of(lookup_sync_s=[2e-5, 3e-5], lookup_async_s=[2.0], allocation_failures=4).as_dict()
    metrics.observe(json.loads(json.dumps(sent)))
    text = scrape(registry)
    assert 'vllm:kv_offload_lookup_sync_delay_seconds_count{engine="0"} 2.0' in text
    assert 'vllm:kv_offload_lookup_async_delay_seconds_bucket{engine="0",le="5.0"} 1.0' in text
    assert 'vllm:kv_offload_lookup_async_delay_seconds_bucket{engine="0",le="1.0"} 0.0' in text
    assert 'vllm:kv_offload_allocation_failure_total{engine="0"} 4.0' in text


def test_every_documented_name_is_exported() -> None:
    """A name that is documented but not exported is a gap in a dashboard."""
    registry = CollectorRegistry()
    LineageMetrics(registry, [], {0: ()}).observe(stats_of((LOAD, 1, 1.0), (STORE, 1, 1.0)))
    text = scrape(registry)
    for metric in LINEAGE:
        ending = "_total" if metric.kind == "counter" else "_count"
        assert f"{metric.name}{ending}" in text
    assert WAIT_BUCKETS[-1] == 10.0


def test_an_unknown_engine_is_an_error() -> None:
    """Its samples must not be counted under another engine's labels."""
    with pytest.raises(KeyError):
        LineageMetrics(CollectorRegistry(), [], {0: ()}).observe(stats_of((LOAD, 1, 1.0)), engine=3)
