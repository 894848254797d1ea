"""Cascades: writes of host-tier chunks to lower tiers, when they become readable or are reused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tierkv.manager.contract import HOST
from tierkv.manager.event_log import EventLog
from tierkv.manager.host.chunk import Filled
from tierkv.manager.host.chunk_state import ChunkState
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.chunk_sizes import ChunkSizes
from tierkv.manager.lower.lower_tier import LowerTier, WritePolicy
from tierkv.manager.moves.admission import Admissions
from tierkv.metrics.counters import CoreCounters
from tierkv.structures.seen_filter import SeenFilter
from tierkv.types.cache_events import CacheEventKind
from tierkv.types.hints import RequestHints
from tierkv.types.keys import Key

CASCADES_PER_STEP_MAX = 512
"""Waiting chunks processed per tier and step, whether written or dropped: a step stays short after a long outage."""


class Cascades:
    """Queues chunks for lower tiers and chooses the ones to write now. Sans-IO.

    :class:`~tierkv.manager.moves.tier_io.TierIO` turns the choice into instructions.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - its collaborators
        self,
        host: HostTier,
        tiers: Iterable[LowerTier],
        admissions: Admissions,
        sizes: ChunkSizes,
        events: EventLog,
        counters: CoreCounters,
    ) -> None:
        self.write_mask = admissions.write_mask
        self.sizes = sizes
        self._host = host
        self._tiers = tiers
        self._dirty_pins = admissions.dirty_pins
        self._events = events
        self.counters = counters

    def became_ready(self, filled: Filled, now: float, *, promoted: bool) -> None:
        """Report chunks that became readable in the host tier, and queue them for every tier that takes them now.

        promoted: they were read from a tier below for a request, which counts as a reuse of what was stored before.
        """
        self._events.extend(CacheEventKind.STORED, HOST, filled.keys)
        chunks = list(zip(*filled, strict=True))
        for tier in self._tiers if chunks else ():
            if tier.limits.write is WritePolicy.THROUGH:
                self.queue(tier, chunks, now)
            elif tier.seen is not None:
                again = [chunk for chunk in chunks if tier.seen.note(chunk[1]) or promoted]
                self.queue(tier, again, now)

    def used(self, slots: Sequence[int], hints: RequestHints, now: float) -> None:
        """Queue chunks that a request uses, for tiers that write on reuse. The slots may still be filling."""
        kept = [] if hints.one_shot else self.write_mask.end_one_shot(slots)
        for tier in self._tiers:
            if tier.seen is not None:
                self.queue(tier, self._reused(tier.seen, slots), now)
            elif kept and tier.limits.write is WritePolicy.THROUGH:
                self.queue(tier, self._readable(kept), now)

    def _readable(self, slots: Sequence[int]) -> list[tuple[int, Key]]:
        slot_table = self._host.slots
        return [(slot, slot_table.key(slot)) for slot in slots if slot_table.state(slot) is ChunkState.READY]

    def _reused(self, seen: SeenFilter, slots: Sequence[int]) -> list[tuple[int, Key]]:
        """Those of ``slots`` that can be written now. The use of the others is noted for when they become readable."""
        ready = self._readable(slots)
        if len(ready) < len(slots):
            for slot in slots:
                if self._host.slots.state(slot) is ChunkState.STORING:
                    seen.note(self._host.slots.key(slot))
        return ready

    # -- write queues ------------------------------------------------------------------------------------------------

    def due(self, tier: LowerTier, chunks: Sequence[tuple[int, Key]], now: float) -> list[tuple[int, Key]]:
        """Those of ``chunks``, each a slot and its key, that are missing in a tier, allowed there, and admitted."""
        wanted = self.write_mask.allowed(tier, tier.missing(chunks, now), now)
        if not wanted:
            return wanted
        keys = [key for _, key in wanted]
        refused = tier.refused(keys, self.sizes.frame_bound(keys[0]))
        if refused:
            wanted = [chunk for i, chunk in enumerate(wanted) if i not in refused]
            self.counters.admissions_refused[tier.name] += len(keys) - len(wanted)
        return wanted

    def queue(self, tier: LowerTier, chunks: Sequence[tuple[int, Key]], now: float) -> None:
        """Append those of ``chunks`` that are due to the write queue of a tier."""
        generation, waiting = self._host.slots.generation, len(tier.write_queue)
        for slot, key in tier.residency.being_deleted(chunks) if tier.phase.usable else ():
            tier.write_after_deletion(key, (slot, generation(slot)))  # the deletion could undo a write
        due = self.due(tier, chunks, now)
        if not due:
            return
        tier.write_queue.extend((slot, generation(slot)) for slot, _ in due)
        # Not every waiting chunk is held, so the queue itself needs a bound while a tier is slower than stores.
        over = len(tier.write_queue) - (self._host.num_slots if tier.phase.usable else waiting)
        if over > 0:
            self._shorten(tier, over)

    def _shorten(self, tier: LowerTier, count: int) -> None:
        """Drop the oldest ``count`` chunks of a queue; those without a dirty pin are dropped first."""
        queue, left = tier.write_queue, count
        while left and len(queue) > queue.num_behind and not self._dirty_pins.has(tier, *queue.front()):
            queue.drop_front()
            left -= 1
        behind = min(left, queue.num_behind)
        queue.drop_behind(behind)
        self._dirty_pins.unpin(tier, queue.first(left - behind))
        queue.drop_front(left - behind)
        self.count_dropped(tier, count)

    def out_of_service(self, tier: LowerTier) -> None:
        """Remove the dirty pins of chunks that wait for a tier, because it takes nothing for an unknown time."""
        self._dirty_pins.unpin_tier(tier)

    def deletion_ended(self, tier: LowerTier, keys: Sequence[Key], now: float) -> None:
        """Queue chunks that became due while their old frames were deleted, if the host tier still has them."""
        for key, (slot, generation) in tier.take_deferred_writes(keys):
            if not self._host.slots.is_ready(slot, generation):
                continue
            if tier.residency.being_deleted([(slot, key)]):  # the deletion failed, and will be retried
                self.count_dropped(tier, 1)
            else:
                self.queue(tier, [(slot, key)], now)

    def count_written(self, tier: LowerTier, count: int) -> None:
        """Count chunks that were written to a tier."""
        counts = self.counters.demotions if tier.limits.write is WritePolicy.BACK else self.counters.cascades
        counts[tier.name] += count

    def count_dropped(self, tier: LowerTier, count: int) -> None:
        """Count chunks that were due for a tier and will not be written."""
        if count:
            back = tier.limits.write is WritePolicy.BACK
            (self.counters.demotions_dropped if back else self.counters.cascades_dropped)[tier.name] += count

    def take_writable(self, tier: LowerTier, now: float, written: int) -> list[int]:
        """Take the chunks that a tier can be given now from its write queue, and begin to make room for the rest.

        Waiting chunks have at most a dirty pin: a store that finds no other slots gets theirs, and they are dropped and
        counted. Only chunks being written keep their slots in any case, under the bound of the tier.

        written: chunks that the tier is given in this step anyway.

        Returns:
            The slots to write, held for the write.
        """
        batch: dict[int, Key] = {}
        batch_bytes = 0
        slots, residency = self._host.slots, tier.residency
        for _ in range(min(len(tier.write_queue), CASCADES_PER_STEP_MAX - written)):
            if residency.num_writing + len(batch) >= tier.queue_chunks_max or tier.phase.emptying:
                break
            slot, generation = lease = tier.write_queue.front()
            is_ready = slots.is_ready(slot, generation)
            if not (is_ready and tier.phase.usable):
                self._drop_front(tier, lease, is_ready=is_ready)
                continue
            key = slots.key(slot)
            size = self.sizes.frame_bound(key)
            if slot in batch or not tier.wants(key, now):
                tier.write_queue.drop_front()
                self._dirty_pins.unpin(tier, (lease,))
                continue
            if not batch:  # once, for all that wait
                self.make_room(tier, size, len(tier.write_queue))
            if residency.has_room(batch_bytes + size):
                batch[slot] = key
                batch_bytes += size
                tier.write_queue.pop_front()
            elif batch or residency.may_get_room(size):
                break
            else:
                self._drop_front(tier, lease, is_ready=is_ready)
        if batch:
            residency.begin_write(list(batch.values()), batch_bytes)
            self._dirty_pins.begin_writes(tier, batch)
        return list(batch)

    def _drop_front(self, tier: LowerTier, lease: tuple[int, int], *, is_ready: bool) -> None:
        tier.write_queue.drop_front()
        self._dirty_pins.unpin(tier, (lease,))
        # A chunk evicted from above a write-back tier was written, or counted, then.
        if is_ready or tier.limits.write is not WritePolicy.BACK:
            self.count_dropped(tier, 1)

    # -- room in lower tiers -----------------------------------------------------------------------------------------

    def has_room(self, tier: LowerTier, frame_bytes: int, waiting: int) -> bool:
        """Make room in a tier for ``waiting`` frames of that size. Returns whether one of them fits now."""
        self.make_room(tier, frame_bytes, waiting)
        return tier.residency.has_room(frame_bytes)

    def make_room(self, tier: LowerTier, frame_bytes: int, waiting: int) -> None:
        """Begin to make room in a tier for ``waiting`` frames of that size; see :meth:`Residency.evict_for`."""
        self._count_evicted(tier, tier.residency.evict_for(frame_bytes, waiting))

    def evict_one(self, tier: LowerTier) -> None:
        """Evict one chunk from a tier whose backend reported that it is full."""
        self._count_evicted(tier, tier.residency.evict(1))

    def trim(self) -> None:
        """Evict chunks of tenants that are over their quotas in lower tiers, and continue resets."""
        for tier in self._tiers:
            if victims := tier.residency.evict_over_quota():
                self._count_evicted(tier, victims)
            if tier.phase.emptying:
                tier.continue_reset()

    def _count_evicted(self, tier: LowerTier, victims: Sequence[Key]) -> None:
        if victims:
            self.counters.evictions[tier.name] += len(victims)
