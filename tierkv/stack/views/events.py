"""Cache events of a stack: passed to observers and to the record in every step, kept until the engine takes them."""

from __future__ import annotations

from tierkv.manager.event_log import RUN_KEYS_MIN
from tierkv.manager.manager import OffloadManager
from tierkv.manager.step_budget import STEP_KEYS_MAX
from tierkv.scheduler.events.event_queue import EventQueue
from tierkv.stack.journal import StepJournal
from tierkv.stack.observers import Observers
from tierkv.types.block_events import BlockEvent
from tierkv.types.cache_events import CacheEvent


class StackEvents:
    """Cache events of one stack, as ``stack.events``. Engine's scheduler thread.

    Each event is taken once: what one of the two calls returns, the other does not. A call returns a bounded number of
    events; an engine that takes them rarely repeats it until it returns none. If too many wait, all are dropped:
    ``events_dropped`` counts them, and each of their tiers has one event CLEARED in their place.
    """

    def __init__(self, manager: OffloadManager, queue: EventQueue, observers: Observers, journal: StepJournal) -> None:
        self._manager = manager
        self._queue = queue
        self._observers = observers
        self._journal = journal
        self._is_kept = journal.is_kept
        self.needs_every_step = observers.any or queue.needs_every_step or journal.is_kept
        """Whether events must be forwarded at the end of each step, not only when the engine takes them."""
        # More than a step makes, so that an engine that takes events in each step has all of them.
        self._keys_max = None if self.needs_every_step else RUN_KEYS_MIN * max(STEP_KEYS_MAX, manager.budget.keys_max)

    def take(self) -> list[CacheEvent]:
        """Chunks that became available or were removed, by tier, since the last call; empty where events are off."""
        self.forward()
        return self._queue.take_events()

    def take_block_events(self) -> list[BlockEvent]:
        """The events of :meth:`take`, described by hash blocks and tokens."""
        self.forward()
        return self._queue.take_described_events()

    @property
    def has_announcements(self) -> bool:
        """Whether chunks that tiers have held since an earlier process are still to be announced, by further steps."""
        return self._queue.has_announcements

    def forward(self) -> None:
        """Pass new events to the record and the observers, and keep them for the engine."""
        events = self._manager.take_events(self._keys_max)
        if self._is_kept:
            self._journal.chunks(events)
        self._queue.put_events(events)
        self._observers.notify(events)
