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

    Engine's thread: some tens of microseconds, whose calls grow with the number of metrics that have changed.
    """

    def __init__(self, stack: Watched) -> None:
        self._stack = stack
        self._core: dict[str, int | dict[str, int]] = {}
        self._tiers: Mapping[str, Mapping[str, int]] = {}
        self._gauges: dict[str, dict[str, float]] = {}
        self._rows: dict[tuple[str, tuple[str, ...]], tuple[float, ...]] = {}

    def take(self) -> Delta | None:
        """Return the changes since the last call, or None. The first one includes zeros: series begin at zero."""
        tiers = self._stack.tiers.stats()
        core = self._stack.metrics.counters.exported(tiers)
        counters, self._core = _core_grown(self._core, core), core
        if tiers != self._tiers:
            _add_tiers_grown(counters, self._tiers, tiers)
            self._tiers = tiers
        gauges, histograms = self._changed_gauges(), self._grown_histograms()
        if not (counters or gauges or histograms):
            return None
        return {"counters": counters, "gauges": gauges, "histograms": histograms}

    def _changed_gauges(self) -> dict[str, dict[str, float]]:
        before = self._gauges
        now = self._gauges = {metric.name: values for metric, values in gauges(self._stack)}
        changed = {}
        for name, values in now.items():
            if name not in before or values != before[name]:
                known = before.get(name, {})
                changed[name] = {label: v for label, v in values.items() if label not in known or known[label] != v}
        return changed

    def _grown_histograms(self) -> dict[str, dict[str, list[float]]]:
        rows, grown = self._rows, dict[str, dict[str, list[float]]]()
        for metric, labels, histogram in self._stack.metrics.series():
            key, row = (metric.name, labels), histogram.row()
            if key in rows and rows[key] == row:
                continue
            (label,) = labels or ("",)
            grown.setdefault(metric.name, {})[label] = _row_grown(rows.get(key), row)
            rows[key] = row
        return grown


def _core_grown(
    before: Mapping[str, int | dict[str, int]], now: Mapping[str, int | dict[str, int]]
) -> dict[str, dict[str, float]]:
    """Return the increments of scheduler and manager by name; with nothing before, also those of zero."""
    grown: dict[str, dict[str, float]] = {}
    for field, value in now.items():
        if before and value == before[field]:
            continue
        if by_label := _grown(_by_label(before.get(field)), _by_label(value)):
            grown[f"tierkv_{field}"] = by_label
    return grown


def _by_label(value: int | Mapping[str, int] | None) -> Mapping[str, int]:
    if value is None:
        return {}
    return {"": value} if isinstance(value, int) else value


def _add_tiers_grown(
    counters: dict[str, dict[str, float]],
    before: Mapping[str, Mapping[str, int]],
    now: Mapping[str, Mapping[str, int]],
) -> None:
    """Add the increments of dispatch to those of scheduler and manager."""
    for tier, stats in now.items():
        for field, count in _grown(before.get(tier, {}), stats).items():
            name = f"tierkv_tier_{field}"
            if name in counters:
                counters[name][tier] = count
            else:
                counters[name] = {tier: count}


def _grown(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, float]:
    """Return the increments above zero. A tier attached under the name of a detached one begins at zero again."""
    if now == before:
        return {}
    return {
        name: count - before[name] if name in before and count >= before[name] else count
        for name, count in now.items()
        if name not in before or count != before[name]
    }


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
