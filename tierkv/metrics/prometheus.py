"""Counters as Prometheus metrics: a collector that reads them when it is scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from tierkv.metrics.counters import CoreCounters

_HELP = {
    "lookups": "Answers given to the engine, deferrals among them",
    "deferrals": "Lookups answered: ask again next step",
    "deadlines_expired": "Lookups ended by their deadline",
    "tokens_loaded": "Tokens loaded, by the tier whose bytes were used",
    "chunks_stored": "Chunks copied from the GPU to the host tier",
    "chunks_loaded": "Chunks copied from the host tier to the GPU",
    "stores_refused": "Batches that the host tier had no room for",
    "stores_failed": "Chunks whose copy from the GPU failed",
    "loads_failed": "Chunks whose copy to the GPU failed or was refused",
    "promotions": "Chunks read from a tier into the host tier",
    "cascades": "Chunks written from the host tier to a tier",
    "cascades_dropped": "Chunks a tier did not get because its queue was full or it was out of service",
    "policies_failed": "Eviction policies that failed and are asked no more",
    "admissions_refused": "Chunks that a tier's eviction policy did not let in",
    "chunks_corrupt": "Frames that failed their check",
    "evictions": "Chunks evicted",
    "reads_failed": "Reads that failed for another reason than corruption",
    "writes_failed": "Writes that failed",
    "events_dropped": "Cache events dropped because the engine did not take them",
    "events_undescribed": "Chunks in events that should carry their tokens and could not",
    "payloads_forgotten": "Payloads of chunks forgotten because too many were remembered",
    "probes": "Existence questions put to a tier",
    "hints_ignored": "Hints of requests that could not be used",
    "tokens_local": "Tokens that the engine found in its own cache, once per request",
    "tokens_stored": "Tokens copied from the GPU to the host tier",
    "deferred_ms": "Milliseconds that lookups were deferred for",
    "sightings_failed": "Policies that raised when told of a request, and are told no more",
}


class StackCollector(Collector):
    """Register it with a ``CollectorRegistry``: ``registry.register(StackCollector(lambda: stack.counters))``.

    Args:
        counters: gives the counters; called at each scrape, on the scraper's thread.
        tier_stats: gives dispatch's counters per tier, or None.
        labels: constant labels, such as ``{"engine": "0"}``.
    """

    def __init__(
        self,
        counters: Callable[[], CoreCounters],
        tier_stats: Callable[[], Mapping[str, Mapping[str, int]]] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._counters = counters
        self._tier_stats = tier_stats
        self._labels = dict(labels or {})

    def collect(self) -> Iterable[Metric]:
        """One counter family per field, ``tierkv_<field>_total``; those kept by tier carry the label ``tier``."""
        names, values = list(self._labels), list(self._labels.values())
        for field, value in self._counters().as_dict().items():
            by_tier = isinstance(value, dict)
            metric = CounterMetricFamily(f"tierkv_{field}", _HELP[field], labels=[*names, "tier"] if by_tier else names)
            for tier, count in value.items() if isinstance(value, dict) else (("", value),):
                metric.add_metric([*values, tier] if by_tier else values, count)
            yield metric
        families: dict[str, CounterMetricFamily] = {}
        for tier, stats in (self._tier_stats() if self._tier_stats else {}).items():
            for field, count in stats.items():
                if field not in families:
                    text = f"Dispatch: {field.replace('_', ' ')}"
                    families[field] = CounterMetricFamily(f"tierkv_tier_{field}", text, labels=[*names, "tier"])
                families[field].add_metric([*values, tier], count)
        yield from families.values()
