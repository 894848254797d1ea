"""Prometheus collector of a stack. It reads counters, histograms and gauges when it is scraped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from tierkv.metrics.definitions import COUNTERS, TIER_COUNTERS
from tierkv.metrics.gauges import gauges
from tierkv.metrics.watched import Watched


class StackCollector(Collector):
    """Collector of everything that a stack counts and measures.

    Register it with a ``CollectorRegistry``::

        registry.register(StackCollector(stack, {"engine": "0"}))

    Args:
        stack: an open stack; read at each scrape, on the scraper's thread.
        labels: constant labels of every series.
    """

    def __init__(self, stack: Watched, labels: Mapping[str, str] | None = None) -> None:
        self._stack = stack
        self._labels = dict(labels or {})

    def collect(self) -> Iterable[Family]:
        """Yield all families: ``tierkv_<field>_total`` per counter, then counters per tier, histograms and gauges."""
        names, values = list(self._labels), list(self._labels.values())
        for field, value in self._stack.metrics.counters.exported(self._stack.tiers.stats()).items():
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
        for tier, stats in self._stack.tiers.stats().items():
            for field, count in stats.items():
                if field not in families:
                    families[field] = CounterMetricFamily(
                        f"tierkv_tier_{field}", TIER_COUNTERS[field], labels=[*names, "tier"]
                    )
                families[field].add_metric([*values, tier], count)
        yield from families.values()

    def _histograms(self, names: list[str], values: list[str]) -> Iterator[Family]:
        families: dict[str, HistogramMetricFamily] = {}
        for metric, label_values, histogram in self._stack.metrics.series():
            if metric.name not in families:
                families[metric.name] = HistogramMetricFamily(
                    metric.name, metric.meaning, labels=[*names, *metric.labels]
                )
            families[metric.name].add_metric([*values, *label_values], histogram.cumulative(), histogram.total)
        yield from families.values()

    def _gauge_families(self, names: list[str], values: list[str]) -> Iterator[Family]:
        for metric, by_label in gauges(self._stack):
            family = GaugeMetricFamily(metric.name, metric.meaning, labels=[*names, *metric.labels])
            for label, value in by_label.items():
                family.add_metric([*values, label] if label else values, value)
            yield family
