"""Cache events of the current step. Runs of one kind in one tier are joined; the number of keys is bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tierkv.metrics.counters import CoreCounters
from tierkv.types.cache_events import CacheEvent, CacheEventKind
from tierkv.types.keys import Key

EVENT_KEYS_MAX = 1_000_000
"""Keys kept for an engine that never takes its events; over it the oldest are dropped and counted."""


class EventLog:
    """Collects events until they are taken. Single-threaded."""

    def __init__(self, counters: CoreCounters, keys_max: int = EVENT_KEYS_MAX) -> None:
        self._counters = counters
        self._keys_max = keys_max
        self._runs: deque[tuple[CacheEventKind, str, list[Key]]] = deque()
        self._size = 0

    def add(self, kind: CacheEventKind, tier: str, key: Key) -> None:
        """Log an event for one key in ``tier``."""
        self.extend(kind, tier, (key,))

    def extend(self, kind: CacheEventKind, tier: str, keys: Sequence[Key]) -> None:
        """Log an event of one kind for each of ``keys``, in this order."""
        if not keys:
            return
        runs = self._runs
        if runs and runs[-1][0] is kind and runs[-1][1] == tier:
            runs[-1][2].extend(keys)
        else:
            runs.append((kind, tier, list(keys)))
        self._grown(len(keys))

    def cleared(self, tier: str) -> None:
        """Log that every chunk was removed from ``tier`` at once."""
        self._runs.append((CacheEventKind.CLEARED, tier, []))
        self._grown(1)

    def _grown(self, count: int) -> None:
        self._size += count
        while self._size > self._keys_max:
            lost = max(1, len(self._runs.popleft()[2]))
            self._size -= lost
            self._counters.events_dropped += lost

    def take(self) -> list[CacheEvent]:
        """Take all events since the last call, in order."""
        events = [CacheEvent(kind, tier, tuple(keys)) for kind, tier, keys in self._runs]
        self._runs.clear()
        self._size = 0
        return events
