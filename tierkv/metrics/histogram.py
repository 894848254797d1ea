"""A histogram of plain numbers: fixed buckets, so that its memory does not grow."""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """Written on one thread; read by anybody, each bucket right, the sum perhaps one observation apart.

    Args:
        buckets: upper edges, rising; an observation that equals an edge belongs to it.
    """

    __slots__ = ("_counts", "buckets", "total")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets = buckets
        self.total = 0.0
        """Sum of what was observed."""
        self._counts = [0] * (len(buckets) + 1)

    def observe(self, value: float) -> None:
        """Take in one observation."""
        self._counts[bisect_left(self.buckets, value)] += 1
        self.total += value

    @property
    def counts(self) -> tuple[int, ...]:
        """Observations of each bucket by itself, those above the last edge last."""
        return tuple(self._counts)

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """Per upper edge, as text, the observations up to it; "+Inf" last."""
        running, rows = 0, []
        edges = [*(f"{edge:g}" for edge in self.buckets), "+Inf"]
        for edge, count in zip(edges, tuple(self._counts), strict=True):
            running += count
            rows.append((edge, running))
        return rows
