"""Queue of events for the engine: taken once, raw or described, and bounded if the engine never takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.events.block_events import BlockEvents
from tierkv.types.block_events import BlockEvent
from tierkv.types.cache_events import CacheEvent

EVENTS_MAX = 4096
"""Events kept, beside those of the latest step, for an engine that does not take them.

Older events are dropped and counted.
"""


class EventQueue:
    """Events until the engine takes them. Single-threaded.

    Args:
        block_events: describes events. If active, it describes each event when it is put, so that its snapshots do not
            depend on when the engine takes events.
        counters: for metrics.
        kept: whether the engine wants events at all.
        events_max: events of earlier steps kept.
    """

    def __init__(
        self, block_events: BlockEvents, counters: CoreCounters, *, kept: bool = True, events_max: int = EVENTS_MAX
    ) -> None:
        self._block_events = block_events
        self._counters = counters
        self._kept = kept
        self._events_max = events_max
        self._pending: deque[tuple[CacheEvent, Sequence[BlockEvent]]] = deque()

    @property
    def needs_every_step(self) -> bool:
        """Whether events must be put in each step, not only before the engine takes them."""
        return self._block_events.active or not self._kept

    def put_events(self, events: Sequence[CacheEvent]) -> None:
        """Append events, and drop the oldest beyond the bound."""
        if not self._kept:
            return
        block_events, pending = self._block_events, self._pending
        while len(pending) > self._events_max:
            pending.popleft()
            self._counters.events_dropped += 1
        for event in events:
            pending.append((event, block_events.describe((event,)) if block_events.active else ()))
        block_events.finish_ended_stores()

    def take_events(self) -> list[CacheEvent]:
        """All pending events, raw."""
        events = [event for event, _ in self._pending]
        self._pending.clear()
        return events

    def take_described_events(self) -> list[BlockEvent]:
        """All pending events, described."""
        taken: list[BlockEvent] = []
        for event, described in self._pending:
            taken += described if self._block_events.active else self._block_events.describe((event,))
        self._pending.clear()
        return taken
