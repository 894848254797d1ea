"""Cache events until they are taken. Runs of one kind in one tier are joined; the number of keys is bounded.

An engine that never takes events must not pay for them. Beyond the bound all pending events are dropped, and each of
their tiers has one event CLEARED in their place. A consumer then knows less than is there, never more: what it learns
afterwards is right, and a later removal of a chunk that it forgot does no harm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tierkv.metrics.counters import CoreCounters
from tierkv.types.cache_events import CacheEvent, CacheEventKind
from tierkv.types.keys import Key

EVENT_KEYS_MAX = 65_536
"""Keys kept for an engine that does not take its events: about 8 MiB, and the events of some hundred steps."""

RUN_KEYS_MIN = 4
"""Keys whose events together cost as much as the event of one: for a short run, most of the cost is the event."""

FREED_PER_KEY = 4
"""Dropped keys that are freed with each logged key, so that no call frees all of them."""

_Runs = deque[tuple[CacheEventKind, str, list[Key]]]


class EventLog:
    """Collects events until they are taken. Single-threaded."""

    def __init__(self, counters: CoreCounters, keys_max: int = EVENT_KEYS_MAX) -> None:
        self._counters = counters
        self._keys_max = keys_max
        self._runs: _Runs = deque()
        self._tiers: dict[str, None] = {}  # those of the runs; also of some that were taken
        self._dropped: _Runs = deque()
        self._size = 0

    @property
    def kept_keys(self) -> int:
        """Number of keys in memory, dropped ones that are not freed yet among them."""
        return self._size + sum(len(keys) for _, _, keys in self._dropped)

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
            self._tiers[tier] = None
        self._grown(len(keys))

    def cleared(self, tier: str) -> None:
        """Log that every chunk was removed from ``tier`` at once."""
        self._runs.append((CacheEventKind.CLEARED, tier, []))
        self._tiers[tier] = None
        self._grown(1)

    def _grown(self, count: int) -> None:
        self._size += count
        if self._dropped:
            self._free_some(FREED_PER_KEY * count)
        if self._size > self._keys_max:
            self._counters.events_dropped += self._size
            self._dropped.extend(self._runs)
            self._runs = deque((CacheEventKind.CLEARED, tier, []) for tier in self._tiers)
            self._size = len(self._runs)

    def _free_some(self, count: int) -> None:
        """Free about ``count`` dropped keys."""
        while count > 0 and self._dropped:
            keys = self._dropped[-1][2]
            if len(keys) > count:
                del keys[-count:]
                return
            count -= max(1, len(keys))
            self._dropped.pop()

    def take(self, keys_max: int | None = None) -> list[CacheEvent]:
        """Take the oldest events, in order; all of them, or those of about ``keys_max`` keys.

        The rest of a long run is a later event. A run of fewer than RUN_KEYS_MIN keys counts as that many.
        """
        events: list[CacheEvent] = []
        if not self._runs:  # most steps
            return events
        if keys_max is None or self._size + RUN_KEYS_MIN * len(self._runs) <= keys_max:
            events = [CacheEvent(kind, tier, tuple(keys)) for kind, tier, keys in self._runs]
            self._runs.clear()
            self._tiers.clear()
            self._size = 0
            return events
        while self._runs and keys_max > 0:
            kind, tier, keys = self._runs[0]
            taken = tuple(keys[:keys_max])
            if len(taken) < len(keys):
                del keys[: len(taken)]
            else:
                self._runs.popleft()
            events.append(CacheEvent(kind, tier, taken))
            self._size -= max(1, len(taken))
            keys_max -= max(RUN_KEYS_MIN, len(taken))
        return events
