"""Cascades: writes of host-tier chunks to lower tiers, when they become readable or are reused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from tierkv.manager.contract import RequestContext
from tierkv.manager.event_log import EventLog
from tierkv.manager.host.chunk import Filled
from tierkv.manager.host.chunk_state import ChunkState
from tierkv.manager.host.dropping import SLOTS_PER_KEY
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.chunk_sizes import ChunkSizes
from tierkv.manager.lower.lower_tier import LowerTier, WritePolicy
from tierkv.manager.lower.tier_list import TierList
from tierkv.manager.moves.admission import Admissions
from tierkv.manager.moves.lower_room import LowerRoom
from tierkv.manager.step_budget import KEYS_PER_LOOK, StepBudget
from tierkv.metrics.counters import CoreCounters
from tierkv.structures.ranks import by_request, ranks_of
from tierkv.structures.seen_filter import SeenFilter
from tierkv.types.cache_events import HOST, CacheEventKind
from tierkv.types.geometry import cdiv
from tierkv.types.hints import RequestHints
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult
from tierkv.types.transfers import SlotRef

STORED = -1
"""Source of chunks that were stored, beside the numbers of the tiers that chunks are read from."""

FEW_CHUNKS = 2
"""Chunks that are looked up one by one in fewer calls than together."""


class Cascades:
    """Queues chunks for lower tiers and chooses the ones to write now. Sans-IO.

    :class:`~tierkv.manager.moves.tier_io.TierIO` turns the choice into instructions.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - its collaborators
        self,
        host: HostTier,
        tiers: TierList,
        admissions: Admissions,
        room: LowerRoom,
        sizes: ChunkSizes,
        events: EventLog,
        counters: CoreCounters,
        budget: StepBudget,
    ) -> None:
        self.write_mask = admissions.write_mask
        self.sizes = sizes
        self._host = host
        self._tiers = tiers
        self._dirty_pins = admissions.dirty_pins
        self._room = room
        self._events = events
        self.counters = counters
        self.ready: dict[int, list[SlotRef]] = {}
        """Chunks to be offered, by number of the tier that they were read from; or STORED."""
        self._offered = budget.share()
        self._taken = budget.share()

    def became_ready(self, filled: Filled, now: float, source: LowerTier | None = None) -> None:
        """Report chunks that became readable in the host tier, and offer them to every tier that takes them now.

        source: the tier that they were read from for a request, which counts as a reuse; None: they were stored. Chunks
        that were read, and those beyond the step's budget, are offered at the end of a step: see :meth:`offer_ready`.
        """
        self._events.extend(CacheEventKind.STORED, HOST, filled.keys)
        slots, count, number = filled.slots, 0, STORED if source is None else source.index
        tiers = self._takers(number)
        if not tiers:
            return
        if source is None:
            slots = slots[::-1]  # the head is written first: the tail may find no room
            if number not in self.ready:
                count = self._affordable(len(slots), len(tiers), SLOTS_PER_KEY)
                self._offer(tiers, list(zip(slots, filled.keys[::-1], strict=True))[:count], now, stored=True)
        if count < len(slots):
            self.ready.setdefault(number, []).extend(self._host.slots.refs(slots[count:]))

    def offer_ready(self, now: float) -> None:
        """Queue chunks that became readable for the tiers that take them, as far as the step's budget allows.

        Those that were read from one tier are offered to the others. At most as many chunks wait as the host tier has
        slots.
        """
        slots = self._host.slots
        for source, leases in list(self.ready.items()):
            tiers, is_stored = self._takers(source), source == STORED
            over = max(0, len(leases) - self._host.num_slots)
            count = max(over, self._affordable(len(leases), len(tiers), SLOTS_PER_KEY if is_stored else 1))
            ready = slots.ready(leases[over:count])
            some = list(zip(ready, slots.keys_of(ready), strict=True))
            self.count_not_offered(source, count - len(some))
            self._offer(tiers, some, now, stored=is_stored)
            del leases[:count]
            if not leases:
                del self.ready[source]

    def count_not_offered(self, source: int, count: int) -> None:
        """Count chunks that were evicted before they were offered, for the tiers that would have taken them."""
        for tier in self._takers(source):
            if tier.seen is None or source != STORED:  # others would not: it was stored once
                self.count_dropped(tier, count)

    def _takers(self, source: int) -> list[LowerTier]:
        """Tiers that take chunks from a source."""
        takes = (WritePolicy.THROUGH, WritePolicy.ON_REUSE)
        return [tier for tier in self._tiers if tier.index != source and tier.limits.write in takes]

    def _affordable(self, chunks: int, tiers: int, per_key: int) -> int:
        """Number of chunks that may be offered to each of some tiers now; at least one while there is any budget.

        per_key: offers of one chunk to one tier for the cost of one key operation.
        """
        if not tiers:
            return chunks
        taken = self._offered.take(cdiv(chunks * tiers, per_key))
        return min(chunks, max(1, taken * per_key // tiers)) if taken else 0

    def _offer(self, tiers: Sequence[LowerTier], chunks: list[tuple[int, Key]], now: float, *, stored: bool) -> None:
        """Queue chunks for these tiers; stored ones for those with ``ON_REUSE`` at their second sight only."""
        for tier in tiers if chunks else ():
            due = chunks
            if tier.seen is not None:
                seen = [tier.seen.note(key) for _, key in chunks]
                due = [chunk for chunk, again in zip(chunks, seen, strict=True) if again or not stored]
            self.queue(tier, due if stored else self.lacking(tier, due, now), now, stored=stored)

    def lacking(self, tier: LowerTier, chunks: list[tuple[int, Key]], now: float) -> list[tuple[int, Key]]:
        """Those of ``chunks`` that are not known to be in a tier; the others are counted as skipped."""
        known = [tier.presence(key, now) for _, key in chunks]
        for (slot, _), here in zip(chunks, known, strict=True):
            if here is LookupResult.HIT:
                self._skip(tier, slot)
        return [chunk for chunk, here in zip(chunks, known, strict=True) if here is not LookupResult.HIT]

    def ask_first(
        self, tier: LowerTier, chunks: Sequence[tuple[int, Key]], now: float, *, stored: bool = False
    ) -> list[tuple[int, Key]]:
        """Choose those of ``chunks`` that a shared tier must be asked for: it may have them, so none is written twice.

        stored: they were just computed. Then only those that the tier once had are asked for. No more is asked for
        than one probe holds, because requests wait for answers too: the rest is written at once.
        """
        if tier.capabilities.authoritative_index or not tier.limits.writes:
            return []
        unknown = [
            chunk
            for chunk in chunks
            if tier.presence(chunk[1], now) is LookupResult.RETRY
            and not tier.residency.rows.is_writing(chunk[1])
            and (not stored or tier.had(chunk[1], now))
        ]
        asked = self.write_mask.allowed(tier, unknown, now)[: max(0, tier.limits.probe_keys_max - len(tier.probes))]
        for _, key in asked:
            tier.probes.put(key)
        return asked

    def _skip(self, tier: LowerTier, slot: int) -> None:
        """Count a chunk that a tier has already. A shared tier does not get it later either, from this slot."""
        self.counters.writes_skipped[tier.name] += 1
        if tier.capabilities.shared:
            self.write_mask.deny(tier, slot)

    def used(self, slots: Sequence[int], hints: RequestHints, now: float) -> None:
        """Queue chunks that a request uses, for tiers that write on reuse. The slots may still be filling."""
        kept = [] if hints.one_shot else self.write_mask.end_one_shot(slots)
        if kept and self.ready:  # these are offered soon; the first write of a chunk queued twice ends its dirty pin
            soon = set(chain.from_iterable(self.ready.values()))
            kept = [lease[0] for lease in self._host.slots.refs(kept) if lease not in soon]
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
        for slot in slots if len(ready) < len(slots) else ():
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
            fills_gap, ranks = tier.residency.listed.order.fills_gap, self._host.slots.ranks
            refused = {i for i in refused if not fills_gap(ranks[wanted[i][0]])}
            wanted = [chunk for i, chunk in enumerate(wanted) if i not in refused]
            self.counters.admissions_refused[tier.name] += len(keys) - len(wanted)
        return wanted

    def queue(self, tier: LowerTier, chunks: Sequence[tuple[int, Key]], now: float, *, stored: bool = False) -> None:
        """Append those of ``chunks`` that are due to the write queue of a tier. stored: see :meth:`ask_first`."""
        if not chunks:
            return
        generation, waiting = self._host.slots.generation, len(tier.write_queue)
        for slot, key in (
            () if tier.capabilities.authoritative_index else self.ask_first(tier, chunks, now, stored=stored)
        ):
            tier.write_later(key, (slot, generation(slot)))
        for slot, key in tier.residency.being_deleted(chunks) if tier.phase.usable else ():
            tier.write_later(key, (slot, generation(slot)))  # the deletion could undo a write
        due = self.due(tier, chunks, now)
        if stored and len(due) < len(chunks):
            self._rank_present(tier, chunks)
        if not due:
            return
        tier.write_queue.extend(self._host.slots.refs([slot for slot, _ in due]))
        # Not every waiting chunk is held, so the queue itself needs a bound while a tier is slower than stores.
        over = len(tier.write_queue) - (self._host.num_slots if tier.phase.usable else waiting)
        if over > 0:
            self._shorten(tier, over)

    def computed_again(self, slots: Sequence[int], end_tokens: Mapping[Key, int], ctx: RequestContext) -> None:
        """Rank chunks that the host tier has anew, in every tier, because a request has computed them all the same.

        Usually it has continued them already. If not, they are behind chunks that were lost, and that it stores.
        """
        table = self._host.slots
        keys = table.keys_of(slots)
        ranks = ranks_of(ctx.request_id, map(end_tokens.__getitem__, keys), ctx.number)
        if any(ranks) and (*ranks,) != table.ranks_of(slots):
            for in_order, their_ranks in by_request(slots, ranks):
                self._host.continue_prefix(in_order, their_ranks)
            for tier in self._tiers:
                self._rank_present(tier, list(zip(slots, keys, strict=True)))

    def _rank_present(self, tier: LowerTier, chunks: Sequence[tuple[int, Key]]) -> None:
        """Rank those of ``chunks`` anew that a tier has, because a request has computed and stored them all the same.

        Otherwise the tail of that request would be written in their place.
        """
        rows = tier.residency.rows.at_rest([key for _, key in chunks])
        for some, ranks in by_request(rows, self._host.slots.ranks_of([slot for slot, _ in chunks])):
            tier.residency.continue_prefix(some, ranks, again=True)

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
        """Remove the dirty pins of chunks that wait for a tier, because it takes nothing for an unknown time.

        It answers nothing either, so chunks whose existence it was to be asked for are dropped.
        """
        self._dirty_pins.unpin_tier(tier)
        self.count_dropped(tier, tier.drop_asked_writes())

    def resume(self, tier: LowerTier, keys: Sequence[Key], now: float) -> None:
        """Queue chunks that waited for the end of a deletion or for an answer, if the host tier still has them."""
        for key, (slot, generation) in tier.take_deferred_writes(keys):
            if not self._host.slots.is_ready(slot, generation):
                continue
            if tier.residency.being_deleted([(slot, key)]):  # the deletion failed, and will be retried
                self.count_dropped(tier, 1)
            elif tier.presence(key, now) is LookupResult.HIT:
                self._skip(tier, slot)
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

    def take_writable(self, tier: LowerTier, now: float) -> list[int]:
        """Take the chunks that a tier can be given now from its write queue, and begin to make room for the rest.

        Waiting chunks have at most a dirty pin: a store that finds no other slots gets theirs, and they are dropped and
        counted. Only chunks being written keep their slots in any case, under the bound of the tier.

        Returns:
            The slots to write, held for the write; tail first, because the order of the frames at rest becomes the
            order of eviction after a restart.
        """
        waiting, room = len(tier.write_queue), tier.queue_chunks_max - tier.residency.num_writing
        cost = self._write_cost
        count = min(waiting, cdiv(self._taken.left, cost), room)
        if count <= 0 or tier.phase.emptying:
            return []
        tier.retry_room(now)
        batch = self._all_of(tier, count, now) if count > FEW_CHUNKS else None
        if batch is None:
            batch = self._writable_of(tier, count, now)
        self._taken.take(cost * (waiting - len(tier.write_queue)))
        if batch:
            keys = list(batch.values())
            tier.residency.begin_write(keys, self.sizes.frame_bounds(keys))
            self._dirty_pins.begin_writes(tier, batch)
        return list(batch)[::-1]

    def _all_of(self, tier: LowerTier, count: int, now: float) -> dict[int, Key] | None:
        """Take the first ``count`` chunks of a queue if all of them can be written: usual, and looked up together.

        Returns:
            Their slots with their keys; None if one cannot be written now, or not at all: then the queue is unchanged.
        """
        slots, residency = self._host.ready_slots(tier.write_queue.first(count)), tier.residency
        batch = dict(zip(slots, self._host.slots.keys_of(slots), strict=True))
        if len(batch) < count or not tier.phase.usable or len(tier.missing(list(batch.items()), now)) < count:
            return None
        if not residency.has_room(self.sizes.frame_bounds(batch.values())):
            return None
        ranks, is_cut = self._host.slots.ranks_of(slots), residency.listed.order.is_cut
        if is_cut(*ranks):  # victims for chunks that are then refused would cut the prefix of others
            return None
        self._room.make(tier, self.sizes.frame_bound(batch[slots[0]]), len(tier.write_queue), ranks[0])
        if is_cut(*ranks) or residency.being_deleted(list(batch.items())):  # by the victims, or among them
            return None
        tier.write_queue.pop_front(count)
        return batch

    def _writable_of(self, tier: LowerTier, count: int, now: float) -> dict[int, Key]:
        """Take those of the first ``count`` chunks of a queue that can be written, one by one, and drop the others.

        Returns:
            Their slots with their keys.
        """
        batch: dict[int, Key] = {}
        batch_bytes, may_get_room = 0, False
        slots, residency, queue = self._host.slots, tier.residency, tier.write_queue
        for _ in range(min(len(queue), cdiv(self._taken.left, self._write_cost))):
            if len(batch) >= count:
                break
            slot, generation = lease = queue.front()
            is_ready = slots.is_ready(slot, generation)
            if not (is_ready and tier.phase.usable):
                self._drop_front(tier, lease, is_ready=is_ready)
                continue
            key = slots.key(slot)
            size, rank = self.sizes.frame_bound(key), slots.ranks[slot]
            is_cut = residency.listed.order.is_cut(rank)
            is_wanted = not is_cut and slot not in batch and tier.wants(key, now)
            if is_wanted and not batch:  # once, for all that wait
                may_get_room = self._room.make(tier, size, len(queue), rank)
            if is_old_deleted := bool(residency.being_deleted(((slot, key),))):  # it may be a victim of that room
                tier.write_later(key, lease)  # the deletion could undo the write
            if is_old_deleted or not is_wanted:
                queue.drop_front()
                self._dirty_pins.unpin(tier, (lease,))
                self.counters.admissions_refused[tier.name] += is_cut
                continue
            if residency.has_room(batch_bytes + size):
                batch[slot] = key
                batch_bytes += size
                queue.pop_front()
            elif batch or may_get_room or residency.may_get_room(size):
                break
            else:
                self._drop_front(tier, lease, is_ready=is_ready, rank=rank)
        return batch

    @property
    def _write_cost(self) -> int:
        """Key operations of one chunk that is written to one tier: its row is found past those of all other tiers."""
        return 1 + len(self._tiers) // KEYS_PER_LOOK

    def _drop_front(self, tier: LowerTier, lease: tuple[int, int], *, is_ready: bool, rank: int = 0) -> None:
        """Drop the first chunk; one that would displace the chunks before it in its prefix counts as refused."""
        tier.write_queue.drop_front()
        self._dirty_pins.unpin(tier, (lease,))
        if tier.residency.listed.order.refuse(rank):
            self.counters.admissions_refused[tier.name] += 1
            return
        # A chunk evicted from above a write-back tier was written, or counted, then.
        if is_ready or tier.limits.write is not WritePolicy.BACK:
            self.count_dropped(tier, 1)
