"""Metrics of tierkv through vLLM's ``/metrics``, for both adapters.

vLLM's scheduler asks for statistics once per step, in the engine's process. Its exporter is in the front end, usually
another process. The transferred value is a :class:`~tierkv.metrics.deltas.Delta`: increments, with a size that does not
depend on the number of events. The series have the names of docs/reference/metrics.md, with vLLM's labels
``model_name`` and ``engine`` before tierkv's own.

With the connector, :class:`TierKVStats` is transferred and :class:`TierKVPromMetrics` exports it. It also exports the
names of vLLM's own offloading, so that dashboards keep working. With the spec, vLLM exports. It gets the series from
:func:`metric_definitions` and the values from :func:`offloading_stats`, and exports its own names by itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats, PromMetric
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from tierkv.metrics import definitions as names
from tierkv.metrics.definitions import Metric
from tierkv.metrics.deltas import Delta, Deltas, empty_delta, merge, observations
from tierkv.metrics.transfer_stats import LOAD, STORE
from tierkv.metrics.watched import Watched

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

PREFIX = "tierkv_"

METRICS: dict[str, Metric] = {metric.name: metric for metric in (*names.counters(), *names.GAUGES, *names.HISTOGRAMS)}
"""All metrics of tierkv by name."""

LINEAGE = tuple(metric for metric in names.LINEAGE if "transfer_type" not in metric.labels)
"""Metrics of vLLM's own offloading, without those that are deprecated and only filled for its own CPU tier."""

STORES_REFUSED = "tierkv_stores_refused"

_VLLM_NAMES: dict[tuple[str, str], tuple[Metric | None, Metric | None]] = {
    (names.TRANSFER_BYTES.name, LOAD): (names.LOAD_SIZES, names.LOAD_BYTES),
    (names.TRANSFER_BYTES.name, STORE): (names.STORE_SIZES, names.STORE_BYTES),
    (names.TRANSFER_SECONDS.name, LOAD): (None, names.LOAD_TIME),
    (names.TRANSFER_SECONDS.name, STORE): (None, names.STORE_TIME),
    (names.LOOKUP_SECONDS.name, ""): (names.SYNC_DELAY, None),
    (names.DEFERRED_SECONDS.name, ""): (names.ASYNC_DELAY, None),
}
"""Histogram and label of tierkv -> vLLM's histogram with the same buckets, and vLLM's counter of the sum."""

_LOGGED = (
    *("lookups", "tokens_loaded", "tokens_stored", "tier_bytes_read", "tier_bytes_written", "evictions"),
    *("stores_refused", "stores_failed", "loads_failed", "chunks_corrupt", "tier_failed", "tier_timed_out"),
)
"""Counters in vLLM's log line, shown where they changed."""


# -- transferred statistics of the connector ---------------------------------------------------------------------------


@dataclass
class TierKVStats(KVConnectorStats):  # type: ignore[misc]  # vLLM has no types here
    """Statistics of one engine's stack over an interval."""

    data: Delta = field(default_factory=empty_delta)

    def reset(self) -> None:
        """Set all values to zero."""
        self.data = empty_delta()

    def aggregate(self, other: KVConnectorStats) -> TierKVStats:
        """Add later statistics, which are not changed, and return this object."""
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the changed counters for vLLM's log line, every ten seconds."""
        counters = self.data["counters"]
        return {
            f"{name} {label}".rstrip(): count
            for name in _LOGGED
            for label, count in counters.get(PREFIX + name, {}).items()
            if count
        }

    def is_empty(self) -> bool:
        """Whether there are no statistics."""
        return not any(self.data.values())


INTERVAL_S = 1.0
"""Seconds between reports of a busy engine. Collecting all series takes as long as scheduling a short step."""


class StatsFeed:
    """Source of statistics for the scheduler's side. Engine's thread.

    vLLM asks in every step. A busy engine gets statistics every :data:`INTERVAL_S` seconds. An idle engine gets them at
    once, because its next step may be late.

    Args:
        stack: an open stack.
        clock: seconds.
    """

    def __init__(self, stack: Watched, clock: Callable[[], float] = time.monotonic) -> None:
        self._deltas = Deltas(stack)
        self._clock = clock
        self._next_s = -math.inf

    def connector_stats(self, *, idle: bool = True) -> TierKVStats | None:
        """Statistics for ``get_kv_connector_stats`` of the scheduler's side; None between reports."""
        if not idle and self._clock() < self._next_s:
            return None
        delta = self._take()
        return None if delta is None else TierKVStats(data=delta)

    def offloading_stats(self, *, idle: bool = True) -> OffloadingConnectorStats | None:
        """Statistics for ``OffloadingManager.get_stats``; None between reports."""
        if not idle and self._clock() < self._next_s:
            return None
        delta = self._take()
        return None if delta is None else offloading_stats(delta)

    def _take(self) -> Delta | None:
        self._next_s = self._clock() + INTERVAL_S
        return self._deltas.take()


def build_kv_connector_stats(data: Mapping[str, Any] | None = None) -> TierKVStats:
    """Build statistics from a copy of the output of :meth:`TierKVStats.to_dict`."""
    stats = TierKVStats()
    if data:
        merge(stats.data, _delta_of(data))
    return stats


def _delta_of(data: Mapping[str, Any]) -> Delta:
    return {
        "counters": data.get("counters", {}),
        "gauges": data.get("gauges", {}),
        "histograms": data.get("histograms", {}),
    }


# -- exporter of the connector -----------------------------------------------------------------------------------------


class TierKVPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # (the same)
    """Metrics of tierkv and of vLLM's own offloading in the front end's registry. Arguments come from vLLM."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type[PromMetric], type[PromMetric]],
        labelnames: Sequence[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        unregister_series()
        self._families: dict[str, PromMetric] = {}
        self._children: dict[tuple[int, str, str], PromMetric] = {}
        self._add(METRICS.values())
        self._has_lineage = False

    def _add(self, metrics: Iterable[Metric]) -> None:
        for metric in metrics:
            family = self._create(metric)
            if family is None:
                continue
            self._families[metric.name] = family
            if not metric.labels and metric.kind != "gauge":  # a series begins at zero
                for engine in self.per_engine_labelvalues:
                    self._child(engine, metric.name, "")

    def _create(self, metric: Metric) -> PromMetric | None:
        """Create a family; None where another connector of this process registered the name."""
        keywords: dict[str, Any] = {
            "name": metric.name,
            "documentation": metric.meaning,
            "labelnames": [*self._labelnames, *metric.labels],
        }
        try:
            if metric.kind == "counter":
                return self._counter_cls(**keywords)
            if metric.kind == "gauge":
                return self._gauge_cls(**keywords, multiprocess_mode="mostrecent")
            return self._histogram_cls(**keywords, buckets=metric.buckets)
        except ValueError as error:
            logger.warning("tierkv does not export %s: %s", metric.name, error)
            return None

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add the report of one engine's scheduler. Unknown names are ignored, because versions may differ."""
        if engine_idx not in self.per_engine_labelvalues:
            return
        if not self._has_lineage:  # only now has each connector beside this one registered its names: vLLM's are theirs
            self._has_lineage = True
            self._add(LINEAGE)
        delta = _delta_of(transfer_stats_data)
        for name, label, count in _flat(delta["counters"]):
            self._count(engine_idx, name, label, count)
            if name == STORES_REFUSED:
                self._count(engine_idx, names.ALLOCATION_FAILURE.name, "", count)
        for name, label, value in _flat(delta["gauges"]):
            if (child := self._child(engine_idx, name, label)) is not None:
                child.set(value)
        for name, label, row in _flat(delta["histograms"]):
            if name in METRICS:
                self._observe_row(engine_idx, METRICS[name], label, row)

    def _count(self, engine: int, name: str, label: str, count: float) -> None:
        if (child := self._child(engine, name, label)) is not None:
            child.inc(count)

    def _observe_row(self, engine: int, metric: Metric, label: str, row: Sequence[float]) -> None:
        histogram, total = _VLLM_NAMES.get((metric.name, label), (None, None))
        families = [(metric.name, label), *([(histogram.name, "")] if histogram else [])]
        children = [child for family in families if (child := self._child(engine, *family)) is not None]
        for value, count in observations(metric.buckets, row):
            for child in children:
                for _ in range(count):
                    child.observe(value)
        if total:
            self._count(engine, total.name, "", max(row[-1], 0.0))

    def _child(self, engine: int, name: str, label: str) -> PromMetric | None:
        """Series of an engine, created on first use; None if its family is not exported."""
        key = engine, name, label
        if key not in self._children:
            family = self._families.get(name)
            if family is None:
                return None
            self._children[key] = family.labels(*self.per_engine_labelvalues[engine], *_label_values(label))
        return self._children[key]


def build_prom_metrics(
    vllm_config: VllmConfig,
    metric_types: Mapping[type[PromMetric], type[PromMetric]],
    labelnames: Sequence[str],
    per_engine_labelvalues: dict[int, list[object]],
) -> TierKVPromMetrics:
    """Build the exporter for the connector's class method of the same name."""
    # Inside a MultiConnector, vLLM's log looks up connectors by name, which only works for registered ones.
    with suppress(ValueError):  # it is registered already
        KVConnectorFactory.register_connector("TierKVConnector", "tierkv.integrations.vllm", "TierKVConnector")
    return TierKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def unregister_series() -> None:
    """Remove the series of an earlier engine in this process from the registry.

    vLLM does so with names that begin with ``vllm:``. Without it, a second engine in one process would fail.
    """
    for collector in list(REGISTRY._collector_to_names):  # noqa: SLF001 # the registry cannot be listed in another way
        if str(getattr(collector, "_name", "")).startswith(PREFIX):  # a family, not a collector such as StackCollector
            REGISTRY.unregister(collector)


def _label_values(label: str) -> tuple[str, ...]:
    return (label,) if label else ()


def _flat(by_name: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    for name, by_label in by_name.items():
        for label, item in by_label.items():
            yield name, label, item


# -- spec --------------------------------------------------------------------------------------------------------------


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Definitions for ``OffloadingSpec.build_metric_definitions``. vLLM calls it before it creates the series."""
    unregister_series()
    return {name: _metadata(metric) for name, metric in METRICS.items()}


def _metadata(metric: Metric) -> OffloadingMetricMetadata:
    if metric.kind == "counter":
        return OffloadingCounterMetadata(metric.meaning, metric.labels)
    if metric.kind == "gauge":
        return OffloadingGaugeMetadata(metric.meaning, metric.labels)
    return OffloadingHistogramMetadata(metric.meaning, metric.labels, buckets=metric.buckets)


def offloading_stats(delta: Delta) -> OffloadingConnectorStats:
    """Convert statistics to the class that vLLM's offloading connector aggregates and exports.

    They are put into its data metric by metric: its methods take one value each, and a busy second has a hundred.
    """
    stats = OffloadingConnectorStats()
    types, data = stats.data["types"], stats.data["data"]
    for kind, by_name in (("counter", delta["counters"]), ("gauge", delta["gauges"])):
        for name, by_label in by_name.items():
            types[name] = kind
            data[name] = {((label,) if label else ()): value for label, value in by_label.items()}
    for name, rows in delta["histograms"].items():
        types[name], buckets = "histogram", METRICS[name].buckets
        data[name] = {((label,) if label else ()): _values(buckets, row) for label, row in rows.items()}
    return stats


def _values(buckets: Sequence[float], row: Sequence[float]) -> list[float]:
    """Observations that fill a histogram as those of a row did, each by itself."""
    return [value for value, count in observations(buckets, row) for _ in range(count)]
