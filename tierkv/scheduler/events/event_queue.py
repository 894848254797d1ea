"""Queue of events for the engine: taken once, raw or described, and bounded if the engine never takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from tierkv.manager.event_log import EVENT_KEYS_MAX
from tierkv.manager.step_budget import BudgetShare
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.events.announcements import Announcements
from tierkv.scheduler.events.block_events import BlockEvents
from tierkv.scheduler.events.snapshots import Snapshot
from tierkv.types.block_events import BlockEvent
from tierkv.types.cache_events import CacheEvent, CacheEventKind
from tierkv.types.keys import Key

DESCRIBED_KEYS_MAX = 4096
"""Keys in events kept, beside those of the latest step, for an engine that does not take them, where events are
described: about 10 KiB per chunk of 256 tokens. Other events are kept up to ``EVENT_KEYS_MAX`` keys."""

FREED_PER_STEP = 64
"""Dropped events that are freed in one step, so that no step frees all of them."""

_Events = deque[tuple[CacheEvent, Sequence[BlockEvent]]]


class EventQueue:
    """Events until the engine takes them. Single-threaded.

    Beyond the bound, all events of earlier steps are dropped. Each of their tiers has one event CLEARED in their place,
    as in :mod:`tierkv.manager.event_log`.

    Args:
        block_events: describes events. If active, it describes each event when it is put, so that its snapshots do not
            depend on when the engine takes events.
        counters: for metrics.
        share: key operations of a step in which described events forget what they do not need any more.
        kept: whether the engine wants events at all.
        keys_max: keys in events of earlier steps that are kept. None: the default.
        announcements: chunks of an earlier process that are still to be announced; None: there are none.
    """

    def __init__(  # noqa: PLR0913 - all but three have defaults
        self,
        block_events: BlockEvents,
        counters: CoreCounters,
        share: BudgetShare,
        *,
        kept: bool = True,
        keys_max: int | None = None,
        announcements: Announcements | None = None,
    ) -> None:
        self._block_events = block_events
        self._counters = counters
        self._share = share
        self._kept = kept
        self._announcements = announcements
        self._keys_max = keys_max or (DESCRIBED_KEYS_MAX if block_events.active else EVENT_KEYS_MAX)
        self._pending: _Events = deque()
        self._size = 0
        self._dropped: _Events = deque()

    @property
    def needs_every_step(self) -> bool:
        """Whether events must be put in each step, not only before the engine takes them."""
        return self._block_events.active or not self._kept

    @property
    def has_announcements(self) -> bool:
        """Whether chunks of an earlier process are still to be announced."""
        return self._announcements is not None and self._announcements.is_pending

    def put_events(self, events: Sequence[CacheEvent]) -> None:
        """Append events, and drop the oldest beyond the bound."""
        if not self._kept:
            return
        block_events = self._block_events
        for _ in range(min(len(self._dropped), FREED_PER_STEP)):
            self._dropped.popleft()
        if self._size > self._keys_max:
            self._drop_all()
        for event in events:
            self._append(event)
        block_events.finish_ended_stores()
        if self._announcements is not None:
            for event in self._announcements.next_events():
                self._append(event)
        if block_events.keeper.is_kept:
            block_events.keeper.hand_over()
        if block_events.has_cleared:
            block_events.forget_some(self._share)

    def _append(self, event: CacheEvent) -> None:
        described = self._block_events.describe((event,)) if self._block_events.active else ()
        self._pending.append((event, described))
        self._size += max(1, len(event.keys))

    def _drop_all(self) -> None:
        """Put one event CLEARED per tier in the place of all pending events."""
        self._counters.events_dropped += self._size
        tiers = dict.fromkeys(event.tier for event, _ in self._pending)
        self._dropped.extend(self._pending)
        self._pending.clear()
        # Not described by block_events: the tiers are not empty, and later removals are described as before.
        self._pending.extend(
            (CacheEvent(CacheEventKind.CLEARED, tier, ()), (self._block_events.cleared_event(tier),)) for tier in tiers
        )
        self._size = len(self._pending)

    def take_events(self) -> list[CacheEvent]:
        """All pending events, raw."""
        events = [event for event, _ in self._pending]
        self._pending.clear()
        self._size = 0
        return events

    def take_described_events(self) -> list[BlockEvent]:
        """All pending events, described."""
        taken: list[BlockEvent] = []
        for event, described in self._pending:
            taken += described if self._block_events.active else self._block_events.describe((event,))
        self._pending.clear()
        self._size = 0
        return taken

    def announce(self, snapshots: Mapping[Key, Snapshot]) -> None:
        """Announce the chunks of restored snapshots in the coming steps."""
        if self._announcements is not None:
            self._announcements.begin(snapshots)

    def close(self, timeout_s: float) -> None:
        """Write kept tokens that are pending, within ``timeout_s``. Idempotent."""
        self._block_events.keeper.close(timeout_s)
