"""Export of a stack's samples under the metric names of vLLM's dashboards, for one or several engines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from tierkv.metrics import definitions as names
from tierkv.metrics.definitions import Metric
from tierkv.metrics.stack_stats import ConnectorStats
from tierkv.metrics.transfer_stats import LOAD, SIZE, STORE, TIME


@dataclass(frozen=True, slots=True)
class _Transfers:
    """Series of one engine and one kind of transfer."""

    total_bytes: tuple[Counter, ...]
    total_time: tuple[Counter, ...]
    sizes: tuple[Histogram, ...]

    def observe(self, operations: Iterable[Mapping[str, float]]) -> None:
        for operation in operations:
            for histogram in self.sizes:
                histogram.observe(operation[SIZE])
            for counter in self.total_bytes:
                counter.inc(operation[SIZE])
            for counter in self.total_time:
                counter.inc(operation[TIME])


class LineageMetrics:
    """Exports :class:`~tierkv.metrics.stack_stats.ConnectorStats` under the names of :data:`definitions.LINEAGE`.

    Args:
        registry: registry for all metrics; a second instance needs another one.
        label_names: names of an engine's labels.
        engines: engine index -> values of those labels.
    """

    def __init__(
        self, registry: CollectorRegistry, label_names: Sequence[str], engines: Mapping[int, Sequence[str]]
    ) -> None:
        self._engines = {index: tuple(values) for index, values in engines.items()}
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._children: dict[tuple[int, str], _Transfers] = {}
        for metric in names.LINEAGE:
            labels = [*label_names, *metric.labels]
            if metric.kind == "counter":
                self._counters[metric.name] = Counter(metric.name, metric.meaning, labels, registry=registry)
            else:
                self._histograms[metric.name] = Histogram(
                    metric.name, metric.meaning, labels, registry=registry, buckets=metric.buckets
                )

    def observe(self, stats: ConnectorStats | Mapping[str, Any], engine: int = 0) -> None:
        """Add the samples of a stack, as an object or as the dict that another process sent.

        Raises:
            KeyError: ``engine`` is not an index in ``engines``.
        """
        if not isinstance(stats, ConnectorStats):
            stats = ConnectorStats.from_dict(stats)
        for transfer_type, operations in stats.transfers.data.items():
            self._transfers(engine, transfer_type).observe(operations)
        for metric, delays in ((names.SYNC_DELAY, stats.lookup_sync_s), (names.ASYNC_DELAY, stats.lookup_async_s)):
            histogram = self._histogram(metric, engine)
            for delay_s in delays:
                histogram.observe(delay_s)
        self._counter(names.ALLOCATION_FAILURE, engine).inc(stats.allocation_failures)

    def _transfers(self, engine: int, transfer_type: str) -> _Transfers:
        """Return the series of an engine and a kind of transfer; created on first use (S107)."""
        children = self._children.get((engine, transfer_type))
        if children is None:
            flat = {
                LOAD: (names.LOAD_BYTES, names.LOAD_TIME, names.LOAD_SIZES),
                STORE: (names.STORE_BYTES, names.STORE_TIME, names.STORE_SIZES),
            }.get(transfer_type)
            children = _Transfers(
                (self._counter(names.TOTAL_BYTES, engine, transfer_type),),
                (self._counter(names.TOTAL_TIME, engine, transfer_type),),
                (self._histogram(names.SIZES, engine, transfer_type),),
            )
            if flat is not None:
                children = _Transfers(
                    (*children.total_bytes, self._counter(flat[0], engine)),
                    (*children.total_time, self._counter(flat[1], engine)),
                    (*children.sizes, self._histogram(flat[2], engine)),
                )
            self._children[engine, transfer_type] = children
        return children

    def _counter(self, metric: Metric, engine: int, *label_values: str) -> Counter:
        counter = self._counters[metric.name]
        values = (*self._engines[engine], *label_values)
        return counter.labels(*values) if values else counter

    def _histogram(self, metric: Metric, engine: int, *label_values: str) -> Histogram:
        histogram = self._histograms[metric.name]
        values = (*self._engines[engine], *label_values)
        return histogram.labels(*values) if values else histogram
