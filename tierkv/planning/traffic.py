"""Bytes that a tier reads or writes, by time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tierkv.replay.stack_player import MINUTE_S

DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes read or written."""

    total_bytes: int
    """All bytes."""
    bytes_per_s: float
    """Average over the trace."""
    peak_bytes_per_s: float
    """Average of the busiest minute."""
    peak_minute: int | None
    """Number of the busiest minute since the first request; None: nothing was moved."""
    by_minute: Mapping[int, int]
    """Bytes in each minute that has any."""

    @property
    def bytes_per_day(self) -> float:
        """Bytes of a day like the trace."""
        return self.bytes_per_s * DAY_S


def moved_of(chunks: Mapping[int, int], chunk_bytes: int, span_s: float) -> Moved:
    """Bytes of chunks that were moved in each minute of a trace of ``span_s`` seconds."""
    by_minute = {minute: count * chunk_bytes for minute, count in chunks.items()}
    total = sum(by_minute.values())
    peak = max(by_minute, key=lambda minute: by_minute[minute], default=None)
    peak_bytes = 0 if peak is None else by_minute[peak]
    return Moved(total, total / span_s, peak_bytes / min(MINUTE_S, span_s), peak, by_minute)
