"""Histogram of plain numbers. Its buckets are fixed, so that its memory does not grow."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable


class Histogram:
    """Histogram that one thread writes and any thread may read.

    A reader sees exact buckets; the sum may be one observation apart from them.

    Args:
        buckets: upper edges, rising; an observation that equals an edge counts below it.
    """

    __slots__ = ("_counts", "buckets", "total")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets = buckets
        self.total = 0.0
        """Sum of all observations."""
        self._counts = [0] * (len(buckets) + 1)

    def observe(self, value: float) -> None:
        """Add one observation."""
        self._counts[bisect_left(self.buckets, value)] += 1
        self.total += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Add observations."""
        counts, buckets = self._counts, self.buckets
        for value in values:
            counts[bisect_left(buckets, value)] += 1
            self.total += value

    @property
    def counts(self) -> tuple[int, ...]:
        """Observations per bucket, not cumulative; those above the last edge are last."""
        return tuple(self._counts)

    def row(self) -> tuple[float, ...]:
        """Return the counts, and the sum as the last value."""
        return (*self._counts, self.total)

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """Return the cumulative count per upper edge, as text; "+Inf" is last."""
        running, rows = 0, []
        edges = [*(f"{edge:g}" for edge in self.buckets), "+Inf"]
        for edge, count in zip(edges, tuple(self._counts), strict=True):
            running += count
            rows.append((edge, running))
        return rows
