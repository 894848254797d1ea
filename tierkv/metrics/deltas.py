"""What a stack counted and measured since it was last asked: small plain dicts for an exporter in another process.

A serving engine often exports metrics in another process than the one whose scheduler runs the stack. Cumulative
values would have to be turned into increments there, across restarts and for several engines; so increments are made
here. Whatever happened in between, the size of a message depends only on how many tiers there are: a histogram travels
as its buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypedDict

from tierkv.metrics.counters import CoreCounters
from tierkv.metrics.gauges import PrefillSpeed, TierSpeeds, gauges
from tierkv.metrics.stack_stats import Series

_PART_MIN = 1e-6
"""A value that equals an edge belongs to the bucket below it."""


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


class WatchedTiers(TierSpeeds, Protocol):
    """The part of ``stack.tiers`` that is read."""

    def stats(self) -> Mapping[str, Mapping[str, int]]:
        """Counters of dispatch, per lower tier."""


class WatchedMetrics(PrefillSpeed, Protocol):
    """The part of ``stack.metrics`` that is read."""

    counters: CoreCounters
    """Counters of scheduler and manager."""

    def series(self) -> Iterable[Series]:
        """Histograms."""


class Watched(Protocol):
    """The part of :class:`tierkv.Stack` that is read."""

    @property
    def tiers(self) -> WatchedTiers:
        """The lower tiers."""

    @property
    def metrics(self) -> WatchedMetrics:
        """The measurements."""


class Deltas:
    """Remembers what was told last. On the engine's thread, once per step: some tens of microseconds.

    Args:
        stack: what is watched.
    """

    def __init__(self, stack: Watched) -> None:
        self._stack = stack
        self._core: dict[str, int | dict[str, int]] = {}
        self._tiers: Mapping[str, Mapping[str, int]] = {}
        self._gauges: dict[tuple[str, str], float] = {}
        self._rows: dict[tuple[str, str], tuple[float, ...]] = {}

    def take(self) -> Delta | None:
        """What changed since the last call, or None. The first call tells zeros too: a series should begin at zero."""
        delta = empty_delta()
        counters = delta["counters"]
        core, tiers = self._stack.metrics.counters.as_dict(), self._stack.tiers.stats()
        for field, value in core.items():
            told = self._core.get(field)
            if value != told and (grown := _grown(_by_label(told), _by_label(value))):
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
    """Increments, without those of nothing. A tier that came under the name of one that left begins at zero again."""
    if now == before:
        return {}
    then = ((name, count, before.get(name)) for name, count in now.items())
    return {name: count - (old or 0) if count >= (old or 0) else count for name, count, old in then if count != old}


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
