"""What a stack counted and measured since it was last asked: small plain dicts for an exporter in another process.

A serving engine often exports metrics in another process than the one whose scheduler runs the stack. Cumulative
values would have to be turned into increments there, across restarts and for several engines; so increments are made
here. Whatever happened in between, the size of a message depends only on how many tiers there are: a histogram travels
as its buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Protocol, TypedDict

from tierkv.metrics.counters import CoreCounters
from tierkv.metrics.gauges import Speeds, gauges
from tierkv.metrics.stack_stats import Series

_PART_MIN = 1e-6
"""A value that equals an edge belongs to the bucket below it."""
_FIELDS = tuple((field.name, f"tierkv_{field.name}") for field in fields(CoreCounters))


class Delta(TypedDict):
    """Increments of counters and histograms, newest values of gauges: metric name -> value of its label -> what.

    The label is ``""`` for a metric without one; none has two. A histogram is its buckets' counts, those above the last
    edge too, and then the sum of what was observed. JSON, MessagePack and pickle carry it as it is.
    """

    counters: dict[str, dict[str, float]]
    gauges: dict[str, dict[str, float]]
    histograms: dict[str, dict[str, list[float]]]


def empty_delta() -> Delta:
    """Nothing happened."""
    return {"counters": {}, "gauges": {}, "histograms": {}}


def merge(into: Delta, other: Delta) -> None:
    """Add what happened later; ``other`` stays as it is."""
    for name, counts in other["counters"].items():
        sums = into["counters"].setdefault(name, {})
        for label, count in counts.items():
            sums[label] = sums.get(label, 0) + count
    for name, values in other["gauges"].items():
        into["gauges"].setdefault(name, {}).update(values)
    for name, rows in other["histograms"].items():
        mine = into["histograms"].setdefault(name, {})
        for label, row in rows.items():
            mine[label] = [a + b for a, b in zip(mine[label], row, strict=True)] if label in mine else list(row)


class Watched(Speeds, Protocol):
    """The part of :class:`~tierkv.stack.Stack` that is read."""

    @property
    def counters(self) -> CoreCounters:
        """Counters of scheduler and manager."""

    def tier_stats(self) -> Mapping[str, Mapping[str, int]]:
        """Counters of dispatch, per lower tier."""

    def series(self) -> Iterable[Series]:
        """Histograms."""


class Deltas:
    """Remembers what was told last. On the engine's thread, once per step: some tens of microseconds.

    Args:
        stack: what is watched.
    """

    def __init__(self, stack: Watched) -> None:
        self._stack = stack
        self._counts: dict[tuple[str, str], float] = {}
        self._gauges: dict[tuple[str, str], float] = {}
        self._rows: dict[tuple[str, str], tuple[float, ...]] = {}

    def take(self) -> Delta | None:
        """What changed since the last call, or None. The first call tells zeros too: a series should begin at zero."""
        delta = empty_delta()
        for name, label, count in _counts(self._stack):
            grown = self._grown(name, label, count)
            if grown is not None:
                delta["counters"].setdefault(name, {})[label] = grown
        for gauge in gauges(self._stack):
            name, (label,) = gauge.metric.name, gauge.label_values or ("",)
            if self._gauges.get((name, label)) != gauge.value:
                self._gauges[name, label] = gauge.value
                delta["gauges"].setdefault(name, {})[label] = gauge.value
        for series in self._stack.series():
            metric, (label,) = series.metric, series.label_values or ("",)
            row = (*series.histogram.counts, series.histogram.total)
            before = self._rows.get((metric.name, label))
            if row != before:
                self._rows[metric.name, label] = row
                delta["histograms"].setdefault(metric.name, {})[label] = _row_grown(before, row)
        return delta if delta["counters"] or delta["gauges"] or delta["histograms"] else None

    def _grown(self, name: str, label: str, count: float) -> float | None:
        """By how much, or None if not at all. A tier that came under the name of one that left begins at zero again."""
        before = self._counts.get((name, label))
        if before == count:
            return None
        self._counts[name, label] = count
        return count if before is None or count < before else count - before


def _counts(stack: Watched) -> Iterator[tuple[str, str, float]]:
    """Counter, value of its label, count."""
    counters = stack.counters
    for field, name in _FIELDS:
        value = getattr(counters, field)
        if isinstance(value, int):
            yield name, "", value
        else:
            for tier, count in value.items():
                yield name, tier, count
    for tier, stats in stack.tier_stats().items():
        for field, count in stats.items():
            yield f"tierkv_tier_{field}", tier, count


def _row_grown(before: Sequence[float] | None, row: Sequence[float]) -> list[float]:
    if before is None or any(now < then for now, then in zip(row[:-1], before, strict=False)):
        return list(row)
    return [now - then for now, then in zip(row, before, strict=True)]


def observations(buckets: Sequence[float], row: Sequence[float]) -> Iterator[tuple[float, int]]:
    """Values, each with how often, that fill a histogram of these edges exactly as the observations behind ``row`` did.

    For exporters that can only observe: the counts of the buckets and the sum come out right. Within a bucket all
    values are equal, at the same part of the way from its lower to its upper edge.
    """
    *counts, total = row
    lows = (0.0, *buckets)
    filled = [(low, high, int(count)) for low, high, count in zip(lows, buckets, counts, strict=False) if count]
    above = int(counts[-1])
    room = sum((high - low) * count for low, high, count in filled)
    rest = total - above * lows[-1] - sum(low * count for low, _, count in filled)
    # With observations above the last edge, which has no upper end, any part will do that leaves them above it.
    part = min(0.5, rest / room / 2) if above and room else rest / room if room else 0.0
    part = min(max(part, _PART_MIN), 1.0)
    for low, high, count in filled:
        value = min(low + part * (high - low), high)
        total -= value * count
        yield value, count
    if above:
        yield max(total / above, lows[-1] * (1 + _PART_MIN)), above
