"""Increments of a stack's metrics since the previous report: small plain dicts for an exporter in another process.

A serving engine often exports metrics in another process than the one whose scheduler runs the stack. Cumulative
values would have to be turned into increments there, across restarts and for several engines. Increments are therefore
made here. The size of a message depends only on the number of tiers: a histogram travels as its buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import lt, sub
from typing import TypedDict

from tierkv.metrics.gauges import gauges
from tierkv.metrics.watched import Watched

_PART_MIN = 1e-6
"""A value that equals an edge belongs to the bucket below it."""


class Delta(TypedDict):
    """Changes of metrics: metric name -> value of its label -> change. JSON, MessagePack and pickle carry it unchanged.

    The label is ``""`` for a metric without one; no metric has two.
    """

    counters: dict[str, dict[str, float]]
    """Increments."""
    gauges: dict[str, dict[str, float]]
    """Latest values."""
    histograms: dict[str, dict[str, list[float]]]
    """Increments: the count of each bucket, the count above the last edge, and the sum of the observations."""


def empty_delta() -> Delta:
    """Return a delta without changes."""
    return {"counters": {}, "gauges": {}, "histograms": {}}


def merge(into: Delta, other: Delta) -> None:
    """Add a later delta to ``into``; ``other`` is unchanged."""
    for name, counts in other["counters"].items():
        sums = into["counters"].setdefault(name, {})
        for label, count in counts.items():
            sums[label] = sums.get(label, 0) + count
    for name, values in other["gauges"].items():
        into["gauges"].setdefault(name, {}).update(values)
    for name, rows in other["histograms"].items():
        merged = into["histograms"].setdefault(name, {})
        for label, row in rows.items():
            merged[label] = [a + b for a, b in zip(merged[label], row, strict=True)] if label in merged else list(row)


class Deltas:
    """Differ between the current metrics of a stack and those of the previous report.

    Engine's thread, once per step: some tens of microseconds.
    """

    def __init__(self, stack: Watched) -> None:
        self._stack = stack
        self._core: dict[str, int | dict[str, int]] = {}
        self._tiers: Mapping[str, Mapping[str, int]] = {}
        self._gauges: dict[tuple[str, str], float] = {}
        self._rows: dict[tuple[str, str], tuple[float, ...]] = {}

    def take(self) -> Delta | None:
        """Return the changes since the last call, or None. The first one includes zeros: series begin at zero."""
        delta = empty_delta()
        counters = delta["counters"]
        tiers = self._stack.tiers.stats()
        core = self._stack.metrics.counters.exported(tiers)
        reported = self._core
        changed = core.items() if not reported else [item for item in core.items() if item[1] != reported[item[0]]]
        for field, value in changed:
            if grown := _grown(_by_label(reported.get(field)), _by_label(value)):
                counters[f"tierkv_{field}"] = grown
        for tier, stats in tiers.items():
            for field, grown_by in _grown(self._tiers.get(tier, {}), stats).items():
                counters.setdefault(f"tierkv_tier_{field}", {})[tier] = grown_by
        self._core, self._tiers = core, tiers
        for gauge in gauges(self._stack):
            name, (label,) = gauge.metric.name, gauge.label_values or ("",)
            if self._gauges.get((name, label)) != gauge.value:
                self._gauges[name, label] = gauge.value
                delta["gauges"].setdefault(name, {})[label] = gauge.value
        for series in self._stack.metrics.series():
            metric, (label,) = series.metric, series.label_values or ("",)
            row = (*series.histogram.counts, series.histogram.total)
            before = self._rows.get((metric.name, label))
            if row != before:
                self._rows[metric.name, label] = row
                delta["histograms"].setdefault(metric.name, {})[label] = _row_grown(before, row)
        return delta if delta["counters"] or delta["gauges"] or delta["histograms"] else None


def _by_label(value: int | Mapping[str, int] | None) -> Mapping[str, int]:
    if value is None:
        return {}
    return {"": value} if isinstance(value, int) else value


def _grown(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, float]:
    """Return the increments above zero. A tier attached under the name of a detached one begins at zero again."""
    if now == before:
        return {}
    then = [(name, count, before.get(name)) for name, count in now.items()]
    return {name: count - (old or 0) if count >= (old or 0) else count for name, count, old in then if count != old}


def _row_grown(before: Sequence[float] | None, row: Sequence[float]) -> list[float]:
    if before is None or any(map(lt, row[:-1], before)):
        return list(row)
    return list(map(sub, row, before))


def observations(buckets: Sequence[float], row: Sequence[float]) -> Iterator[tuple[float, int]]:
    """Yield values with their frequencies that fill a histogram of these edges as the observations of ``row`` did.

    For exporters that can only observe. Bucket counts and the sum are exact. All values within a bucket are equal, at
    the same share of the way from its lower to its upper edge.
    """
    *counts, total = row
    lows = (0.0, *buckets)
    filled = [(low, high, int(count)) for low, high, count in zip(lows, buckets, counts, strict=False) if count]
    above = int(counts[-1])
    room = sum((high - low) * count for low, high, count in filled)
    rest = total - above * lows[-1] - sum(low * count for low, _, count in filled)
    # The last bucket has no upper edge: any share is right that keeps its observations above the last edge.
    part = min(0.5, rest / room / 2) if above and room else rest / room if room else 0.0
    part = min(max(part, _PART_MIN), 1.0)
    for low, high, count in filled:
        value = min(low + part * (high - low), high)
        total -= value * count
        yield value, count
    if above:
        yield max(total / above, lows[-1] * (1 + _PART_MIN)), above
