"""Admission of chunks into the host tier, and the evictions that make room for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierkv.manager.contract import RequestContext
from tierkv.manager.event_log import EventLog
from tierkv.manager.host.chunk import Evicted
from tierkv.manager.host.chunk_state import ChunkState
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier, WritePolicy
from tierkv.manager.moves.dirty_pins import DirtyPins
from tierkv.manager.moves.write_mask import WriteMask
from tierkv.metrics.counters import CoreCounters
from tierkv.policies.prefix_order import NO_CHUNK
from tierkv.structures.ranks import ranks_of
from tierkv.types.cache_events import HOST, CacheEventKind
from tierkv.types.hints import RequestHints
from tierkv.types.keys import Key


class Admissions:
    """Makes room and admits chunks, by the policy, by retention hints and by dirty pins. Sans-IO."""

    def __init__(
        self, host: HostTier, dirty_pins: DirtyPins, write_mask: WriteMask, events: EventLog, counters: CoreCounters
    ) -> None:
        self._host = host
        self.dirty_pins = dirty_pins
        self.write_mask = write_mask
        self._retention = write_mask.retention
        self._events = events
        self._counters = counters
        self.num_admitted = 0
        """Number of chunks admitted so far."""

    @property
    def room(self) -> int:
        """Number of slots available now, including those whose dirty pins may be removed. O(pins)."""
        return self._host.room + self.dirty_pins.spare()

    def admitted_by_policy(self, keys: list[Key]) -> list[Key]:
        """Those of ``keys`` that the host tier's policy admits."""
        refused = self._host.refused(keys)
        if not refused:
            return keys
        kept = [key for i, key in enumerate(keys) if i not in refused]
        self._counters.admissions_refused[HOST] += len(keys) - len(kept)
        return kept

    def make_room(self, count: int, now: float) -> list[Key] | None:
        """Evict until ``count`` slots are free.

        One-shot chunks are evicted before all others, and dirty chunks only when there are no others.

        Returns:
            The evicted keys; None if there is not enough room: then nothing has changed but dirty pins.
        """
        if count <= self._host.free:
            return []
        self.dirty_pins.pin()
        if count > self._host.room:
            if count > self.room:
                return None
            self.dirty_pins.unpin_oldest(count)
        one_shots = self.drop_one_shots(count - self._host.free)
        chosen = self._host.evict_for(count)
        if chosen is None:
            return None
        self._count_lost(chosen, now)
        self.report_evicted(chosen.keys)
        return one_shots + chosen.keys

    def choose(
        self, keys: list[Key], end_tokens: Mapping[Key, int], ctx: RequestContext, now: float
    ) -> tuple[list[Key], list[int], list[Key]] | None:
        """Choose those of ``keys`` that are admitted for a request, and make room for them.

        Returns:
            The admitted keys, their ranks, and the evicted keys; None if there is not enough room.
        """
        wanted = self.admitted_by_policy(keys)
        ranks = ranks_of(ctx.request_id, map(end_tokens.__getitem__, wanted), ctx.number)
        left: list[Key] = []
        if any(ranks) and not self.write_mask.tiers.takes_writes:
            count, left = self._room_for_tail(len(wanted), min(ranks), now)
            if count < len(wanted):
                self._counters.admissions_refused[HOST] += len(wanted) - count
                head = sorted(sorted(range(len(wanted)), key=ranks.__getitem__)[:count])
                wanted, ranks = [wanted[i] for i in head], [ranks[i] for i in head]
        evicted = self.make_room(len(wanted), now)
        return None if evicted is None else (wanted, ranks, left + evicted)

    def _room_for_tail(self, count: int, rank: int, now: float) -> tuple[int, list[Key]]:
        """Make room for chunks of a rank and deeper ones, in a host tier without lower tiers that take writes.

        The prefix that they continue is not evicted for them. With lower tiers it is: they get every chunk through the
        host tier.

        Returns:
            Number of chunks to admit, and the evicted keys. All are to be admitted where pins are what keeps them out:
            a later step may have room.
        """
        host, order = self._host, self._host.listed.order
        if order.is_cut(rank):
            return 0, []
        if count <= host.free or count > host.room or order.stop_of(rank) == NO_CHUNK:
            return count, []
        one_shots = self.drop_one_shots(count - host.free)
        evicted = host.evict_for_tail(count, rank)
        self._count_lost(evicted, now)
        self.report_evicted(evicted.keys)
        if host.free < count:
            order.refuse(rank)
        return min(count, host.free), one_shots + evicted.keys

    def evict_over_quota(self, now: float) -> None:
        """Evict some chunks of tenants that are over their quotas."""
        chosen = self._host.evict_over_quota()
        self._count_lost(chosen, now)
        self.report_evicted(chosen.keys)

    def report_evicted(self, keys: Sequence[Key]) -> None:
        """Count and report chunks that were evicted from the host tier."""
        if keys:
            self._counters.evictions[HOST] += len(keys)
            self._events.extend(CacheEventKind.REMOVED, HOST, keys)

    def _count_lost(self, evicted: Evicted, now: float) -> None:
        """Count chunks that write-back tiers should have been given: an eviction without a demotion loses them."""
        for tier in self.write_mask.tiers if evicted.keys else ():
            if tier.limits.write is WritePolicy.BACK:
                unwritten = [chunk for chunk in zip(*evicted, strict=True) if tier.wants(chunk[1], now)]
                if lost := len(self.write_mask.allowed(tier, unwritten, now)):
                    self._counters.demotions_dropped[tier.name] += lost

    def drop_one_shots(self, count: int) -> list[Key]:
        """Drop up to ``count`` idle one-shot chunks. Returns their keys."""
        if not self._retention.any:
            return []

        def is_idle(key: Key) -> bool | None:
            slot = self._host.slots.find(key)
            return None if slot is None else self._host.slots.is_idle(slot)

        dropped: list[Key] = []
        while len(dropped) < count and (key := self._retention.take_one_shot(is_idle)) is not None:
            dropped.append(key)
            self._host.drop([slot for slot in [self._host.slots.find(key)] if slot is not None])
        self.report_evicted(dropped)
        return dropped

    def reset(self) -> None:
        """Make every chunk of the host tier invisible, and remove all dirty pins."""
        self.dirty_pins.unpin_all()
        self._host.reset()

    def admit(
        self, keys: Sequence[Key], hints: RequestHints, source: LowerTier | None = None, ranks: Sequence[int] = ()
    ) -> list[int]:
        """Admit ``keys`` for a request with these hints, as :meth:`HostTier.admit`, and set their write masks.

        source: the tier that they are read from; None if they are stored.

        Returns:
            Their slots, held once by the caller.
        """
        if source is None:
            slots = self._host.admit(keys, ChunkState.STORING, ranks=ranks)
        else:
            slots = self._host.admit(keys, ChunkState.PROMOTING, source.name, ranks)
        self.write_mask.admitted(slots, hints, source)
        self.num_admitted += len(slots)
        return slots
