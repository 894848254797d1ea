"""Counters and histograms as Prometheus metrics: a collector that reads them when it is scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from tierkv.metrics.counters import CoreCounters
from tierkv.metrics.definitions import COUNTERS, TIER_COUNTERS
from tierkv.metrics.gauges import Gauge
from tierkv.metrics.stack_stats import Series


class StackCollector(Collector):
    """Everything that a stack counts and measures.

    Register it with a ``CollectorRegistry``::

        metrics = stack.metrics
        registry.register(StackCollector(lambda: metrics.counters, stack.tiers.stats, {"engine": "0"}, metrics.series))

    Args:
        counters: gives the counters; called at each scrape, on the scraper's thread.
        tier_stats: gives dispatch's counters per tier, or None.
        labels: constant labels, such as ``{"engine": "0"}``.
        series: gives the histograms, or None.
        gauges: gives the gauges (see :func:`tierkv.metrics.gauges.gauges`), or None.
    """

    def __init__(
        self,
        counters: Callable[[], CoreCounters],
        tier_stats: Callable[[], Mapping[str, Mapping[str, int]]] | None = None,
        labels: Mapping[str, str] | None = None,
        series: Callable[[], Iterable[Series]] | None = None,
        gauges: Callable[[], Iterable[Gauge]] | None = None,
    ) -> None:
        self._counters = counters
        self._tier_stats = tier_stats
        self._labels = dict(labels or {})
        self._series = series
        self._gauges = gauges

    def collect(self) -> Iterable[Family]:
        """One counter family per field, ``tierkv_<field>_total``; those kept by tier carry the label ``tier``."""
        names, values = list(self._labels), list(self._labels.values())
        for field, value in self._counters().as_dict().items():
            by_tier = isinstance(value, dict)
            family = CounterMetricFamily(
                f"tierkv_{field}", COUNTERS[field], labels=[*names, "tier"] if by_tier else names
            )
            for tier, count in value.items() if isinstance(value, dict) else (("", value),):
                family.add_metric([*values, tier] if by_tier else values, count)
            yield family
        yield from self._of_tiers(names, values)
        yield from self._histograms(names, values)
        yield from self._gauge_families(names, values)

    def _of_tiers(self, names: list[str], values: list[str]) -> Iterator[Family]:
        families: dict[str, CounterMetricFamily] = {}
        for tier, stats in (self._tier_stats() if self._tier_stats else {}).items():
            for field, count in stats.items():
                if field not in families:
                    families[field] = CounterMetricFamily(
                        f"tierkv_tier_{field}", TIER_COUNTERS[field], labels=[*names, "tier"]
                    )
                families[field].add_metric([*values, tier], count)
        yield from families.values()

    def _histograms(self, names: list[str], values: list[str]) -> Iterator[Family]:
        families: dict[str, HistogramMetricFamily] = {}
        for metric, label_values, histogram in self._series() if self._series else ():
            if metric.name not in families:
                families[metric.name] = HistogramMetricFamily(
                    metric.name, metric.meaning, labels=[*names, *metric.labels]
                )
            families[metric.name].add_metric([*values, *label_values], histogram.cumulative(), histogram.total)
        yield from families.values()

    def _gauge_families(self, names: list[str], values: list[str]) -> Iterator[Family]:
        families: dict[str, GaugeMetricFamily] = {}
        for metric, label_values, value in self._gauges() if self._gauges else ():
            if metric.name not in families:
                families[metric.name] = GaugeMetricFamily(metric.name, metric.meaning, labels=[*names, *metric.labels])
            families[metric.name].add_metric([*values, *label_values], value)
        yield from families.values()
