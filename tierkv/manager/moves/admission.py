"""Who comes into the host tier, and who leaves for it."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.manager.contract import HOST
from tierkv.manager.event_log import EventLog
from tierkv.manager.host.chunk import Evicted
from tierkv.manager.host.chunk_state import ChunkState
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier, WritePolicy
from tierkv.manager.moves.dirty_pins import DirtyPins
from tierkv.manager.moves.write_mask import WriteMask
from tierkv.metrics.counters import CoreCounters
from tierkv.types.cache_events import CacheEventKind
from tierkv.types.hints import RequestHints
from tierkv.types.keys import Key


class Admissions:
    """Makes room and takes it: by the policy, the terms of one-shot chunks and the routes of hints. Sans-IO."""

    def __init__(
        self, host: HostTier, dirty_pins: DirtyPins, write_mask: WriteMask, events: EventLog, counters: CoreCounters
    ) -> None:
        self._host = host
        self.dirty_pins = dirty_pins
        self.write_mask = write_mask
        self._retention = write_mask.retention
        self._events = events
        self._counters = counters

    @property
    def room(self) -> int:
        """Slots that can be had now, also those whose chunks would give way. Looks at all of these."""
        return self._host.room + self.dirty_pins.spare()

    def let_in(self, keys: list[Key]) -> list[Key]:
        """Those of ``keys`` that the host tier's policy lets in."""
        refused = self._host.refused(keys)
        if not refused:
            return keys
        kept = [key for i, key in enumerate(keys) if i not in refused]
        self._counters.admissions_refused[HOST] += len(keys) - len(kept)
        return kept

    def make_room(self, count: int, now: float) -> list[Key] | None:
        """Evict until ``count`` slots are free.

        One-shot chunks leave before all others, and what waits to be written below only when there are no others.
        """
        if count > self._host.free:
            self.dirty_pins.pin()
        if count > self._host.room:
            if count > self.room:
                return None
            self.dirty_pins.give_way(count)
        one_shots = self.drop_one_shots(count - self._host.free)
        chosen = self._host.evict_for(count)
        if chosen is None:
            return None
        self._count_lost(chosen, now)
        self.evicted(chosen.keys)
        return one_shots + chosen.keys

    def trim(self, now: float) -> None:
        """Let go of chunks of tenants that are over their quotas."""
        chosen = self._host.evict_over_quota()
        self._count_lost(chosen, now)
        self.evicted(chosen.keys)

    def evicted(self, keys: Sequence[Key]) -> None:
        """These have left the host tier for want of room: count them and say so."""
        if keys:
            self._counters.evictions[HOST] += len(keys)
            self._events.extend(CacheEventKind.REMOVED, HOST, keys)

    def _count_lost(self, evicted: Evicted, now: float) -> None:
        """Nobody waits for a tier below: what should have been written there when it is evicted is lost for it now."""
        for tier in self.write_mask.tiers if evicted.keys else ():
            if tier.limits.write is WritePolicy.BACK:
                unwritten = [chunk for chunk in zip(*evicted, strict=True) if tier.wants(chunk[1], now)]
                if lost := len(self.write_mask.allowed(tier, unwritten, now)):
                    self._counters.demotions_dropped[tier.name] += lost

    def drop_one_shots(self, count: int) -> list[Key]:
        """Free the slots of up to so many one-shot chunks, as far as they are to be had."""
        if not self._retention.any:
            return []

        def is_free(key: Key) -> bool | None:
            slot = self._host.slots.find(key)
            return None if slot is None else self._host.slots.is_idle(slot)

        dropped: list[Key] = []
        while len(dropped) < count and (key := self._retention.take_one_shot(is_free)) is not None:
            dropped.append(key)
            self._host.drop([slot for slot in [self._host.slots.find(key)] if slot is not None])
        self.evicted(dropped)
        return dropped

    def reset(self) -> None:
        """Everything in the host tier is of before, and waits for nobody."""
        self.dirty_pins.empty()
        self._host.reset()

    def admit(self, keys: Sequence[Key], hints: RequestHints, source: LowerTier | None = None) -> list[int]:
        """Slots for ``keys``, held once; see :meth:`HostTier.admit`.

        hints: of the request that brings the chunks. source: the tier that they are read from; None: they are stored.
        """
        if source is None:
            slots = self._host.admit(keys, ChunkState.STORING)
        else:
            slots = self._host.admit(keys, ChunkState.PROMOTING, source.name)
        self.write_mask.admitted(slots, hints, source)
        return slots
