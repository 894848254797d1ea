"""Measurements of an open stack that served: a scrape and a report agree with the work done."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from stack_bed import opened, prompts_of, serve, stack_config

from tierkv.metrics.deltas import Deltas, empty_delta, merge
from tierkv.metrics.prometheus import StackCollector
from tierkv.metrics.transfer_stats import LOAD, STORE

pytest.importorskip("torch")


def test_a_scrape_counts_the_moved_bytes(tmp_path: Path) -> None:
    """Histograms, counters and samples count the same bytes; every read of a tier is timed."""
    prompts = prompts_of(9, 4)
    with opened(stack_config(tmp_path)) as stack:
        serve(stack, prompts)
        stack.flush()
    with opened(stack_config(tmp_path)) as stack:
        serve(stack, prompts)
        stack.flush()
        samples = stack.metrics.take_samples()
        assert samples is not None
        assert stack.metrics.take_samples() is None
        found = {(series.metric.name, *series.label_values): series.histogram for series in stack.metrics.series()}
        registry = CollectorRegistry()
        registry.register(StackCollector(stack, {"engine": "0"}))
        text = generate_latest(registry).decode()
        counters, worker = stack.metrics.counters, stack.worker
        ops = stack.tiers.stats()["disk"]["ops"]
    sums = samples.transfers.reduce()
    assert sums[f"{LOAD}_total_bytes"] == worker.bytes_loaded == found["tierkv_transfer_bytes", LOAD].total
    assert sums.get(f"{STORE}_total_bytes", 0) == worker.bytes_stored
    assert worker.bytes_loaded
    assert found["tierkv_lookup_seconds",].count == counters.lookups == len(samples.lookup_sync_s)
    assert bool(counters.deferrals) == bool(samples.lookup_async_s)
    assert counters.chunks_hit.total() == counters.chunks_loaded
    reads, writes = found["tierkv_tier_read_seconds", "disk"], found["tierkv_tier_write_seconds", "disk"]
    assert 0 < reads.count <= ops - writes.count
    assert f'tierkv_tier_read_seconds_count{{engine="0",tier="disk"}} {reads.count}.0' in text
    assert f'tierkv_chunks_hit_total{{engine="0",tier="disk"}} {counters.chunks_hit["disk"]}.0' in text


def test_increments_of_a_serving_stack_add_up(tmp_path: Path) -> None:
    """The sum of all increments reported to an exporter equals the counters of the stack."""
    prompts, whole, messages = prompts_of(10, 4), empty_delta(), 0
    with opened(stack_config(tmp_path)) as stack:
        deltas = Deltas(stack)
        for _ in range(2):
            for prompt in prompts:
                serve(stack, [prompt])
                delta = deltas.take()
                assert delta is not None
                merge(whole, delta)
                messages += 1
        stack.flush()
        merge(whole, deltas.take() or empty_delta())
        assert deltas.take() is None
        reported = whole["counters"]
        assert reported["tierkv_lookups"][""] == stack.metrics.counters.lookups > 0
        hits = {tier: count for tier, count in reported["tierkv_chunks_hit"].items() if count}
        assert hits == dict(stack.metrics.counters.chunks_hit) != {}
        assert reported["tierkv_tier_bytes_written"]["disk"] == stack.tiers.stats()["disk"]["bytes_written"] > 0
        for series in stack.metrics.series():
            row = whole["histograms"][series.metric.name][series.label_values[0] if series.label_values else ""]
            assert tuple(row[:-1]) == series.histogram.counts
    assert messages == 8
