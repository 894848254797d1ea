"""The last samples of one stack, and the growth of counters between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from tierkv.cli.top.sources import Values

WINDOW_S = 15.0
"""Rates are taken over this time, or over the last two samples if they are further apart."""


class Window:
    """Samples of one stack."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Values]] = deque()

    def add(self, at_s: float, values: Values) -> bool:
        """Add a sample. Returns False if the stack is another one than before: counters have fallen."""
        is_same = not self._samples or not _has_fallen(self._samples[-1][1], values)
        if not is_same:
            self._samples.clear()
        self._samples.append((at_s, values))
        while len(self._samples) > 2 and self._samples[0][0] < at_s - WINDOW_S:  # noqa: PLR2004 - a rate needs two
            self._samples.popleft()
        return is_same

    @property
    def latest(self) -> Values:
        """Values of the last sample; empty before the first one."""
        return self._samples[-1][1] if self._samples else {}

    @property
    def at_s(self) -> float:
        """Time of the last sample; 0 before the first one."""
        return self._samples[-1][0] if self._samples else 0.0

    @property
    def seconds(self) -> float:
        """Seconds between the first and the last sample."""
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0

    def level(self, name: str, label: str = "") -> float | None:
        """Latest value of a series; None if there is none."""
        return self.latest.get(name, {}).get(label)

    def grown(self, name: str, label: str | None = "") -> float:
        """Growth of a counter within the window. Label None: the sum over all labels."""
        if len(self._samples) < 2:  # noqa: PLR2004 - (the same)
            return 0.0
        first, last = (_sum(values.get(name, {}), label) for values in (self._samples[0][1], self._samples[-1][1]))
        return max(0.0, last - first)

    def rate(self, name: str, label: str | None = "") -> float:
        """Growth of a counter per second."""
        return self.grown(name, label) / self.seconds if self.seconds else 0.0

    def share(self, part: str, of: str, label: str | None = None) -> float | None:
        """Growth of one counter as a share of that of another one; None while the latter does not grow."""
        whole = self.grown(of, None)
        return self.grown(part, label) / whole if whole else None

    def mean(self, histogram: str, label: str = "") -> float | None:
        """Mean of the observations within the window; None if there are none."""
        count = self.grown(f"{histogram}_count", label)
        return self.grown(f"{histogram}_sum", label) / count if count else None


def _sum(row: Mapping[str, float], label: str | None) -> float:
    return sum(row.values()) if label is None else row.get(label, 0.0)


def _has_fallen(before: Values, now: Values) -> bool:
    """Whether a counter that every stack has is less than before: the process has begun anew."""
    names = ("tierkv_lookups_total", "tierkv_chunks_stored_total")
    return any(_sum(now.get(name, {}), None) < _sum(before.get(name, {}), None) for name in names)
