"""Demotions: writes of chunks to write-back tiers when the host tier is about to evict them.

No store waits for a demotion. Victims are chosen ahead of need, so that some slots are free when a store comes. They
are *demoting* until they are written, and evicted then. A shared tier is asked first for those that it may have; they
are demoting meanwhile. Where stores come faster than a tier takes chunks, stores evict
as without a write-back tier; chunks that were not written are dropped and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tierkv.manager.host.chunk_state import ChunkState
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier, WritePolicy
from tierkv.manager.lower.tier_list import TierList
from tierkv.manager.lower.tier_phase import TierPhase
from tierkv.manager.moves.admission import Admissions
from tierkv.manager.moves.lower_room import LowerRoom
from tierkv.manager.moves.write_through import Cascades
from tierkv.manager.step_budget import StepBudget
from tierkv.types.keys import Key

FREE_SHARE, FREE_SHARE_MAX = 1 / 8, 1 / 2
"""Share of the host slots that are free, or becoming free, while there is a write-back tier: at least, and at most.

Between them, as many as one step took lately: otherwise its stores evict chunks that no tier was given.
"""


class LargestStep:
    """Largest number of slots that one step took, among those that took the latest two to four times all slots.

    Counted in slots, not in steps or seconds: prompts may be few, with many small steps between them.
    """

    def __init__(self, num_slots: int) -> None:
        self._span = max(1, 2 * num_slots)
        self.taken = self._began = 0
        """Slots taken so far, when it was noted last."""
        self._largest = self._before = 0

    def note(self, taken: int) -> None:
        """Note the number of slots taken so far, at the end of a step."""
        self._largest = max(self._largest, taken - self.taken)
        self.taken = taken
        if taken - self._began >= self._span:
            self._began, self._before, self._largest = taken, self._largest, 0

    @property
    def num_slots(self) -> int:
        """Slots that the largest of those steps took."""
        return max(self._largest, self._before)


class Demotions:
    """Chooses the chunks to demote. Sans-IO.

    :class:`~tierkv.manager.moves.tier_io.TierIO` turns the choice into instructions.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - its collaborators
        self,
        host: HostTier,
        tiers: TierList,
        cascades: Cascades,
        admissions: Admissions,
        room: LowerRoom,
        budget: StepBudget,
    ) -> None:
        self._host = host
        self._tiers = tiers
        self._cascades = cascades
        self._admissions = admissions
        self._room = room
        self._free_wanted = self._free_min = max(1, int(host.num_slots * FREE_SHARE))
        self._free_max = max(1, int(host.num_slots * FREE_SHARE_MAX))
        self._largest_step = LargestStep(host.num_slots)
        self._to_flush = range(0)
        # Slots by number of a tier, each held for a write there: of chunks that it is asked for, by key, and of those
        # for which it has answered.
        self._asked: dict[int, dict[Key, int]] = {}
        self._answered: dict[int, list[int]] = {}
        self._chosen = budget.share()
        self._flushed = budget.share()

    def end_step(self) -> None:
        """Learn how many slots a step takes, at its end. Also without a write-back tier: one may be attached."""
        if self._admissions.num_admitted == self._largest_step.taken:
            return
        self._largest_step.note(self._admissions.num_admitted)
        self._free_wanted = min(max(self._free_min, self._largest_step.num_slots), self._free_max)

    def begin(self, now: float) -> dict[int, list[int]]:
        """Begin as many demotions as needed to have some slots free. Returns the slots to write, by tier."""
        if not self._tiers.writes_back:
            self._to_flush = range(0)  # the tiers that it was for were detached
            return {}
        back = [tier for tier in self._tiers if tier.limits.write is WritePolicy.BACK]
        self._flush(back, now)
        demoting = self._host.begin_quota_demotions()
        short = self._free_wanted - self._host.free - len(self._host.slots.demoting)
        if short > -self._free_wanted:
            wanted = max(0, min(short, self._chosen.left))
            takes = max(self._takes(tier, wanted) for tier in back)
            dropped = len(self._admissions.drop_one_shots(wanted))
            self._admissions.dirty_pins.pin()
            chosen = self._host.begin_demotions(min(wanted - dropped, takes))
            self._chosen.take(dropped + len(chosen))
            demoting += chosen
        return self._demote(back, demoting, now) if demoting or self._answered else {}

    def is_due(self) -> bool:
        """Whether :meth:`begin` has something to do."""
        if self._to_flush or self._answered:
            return True
        host = self._host
        if not self._tiers.writes_back:
            return False
        return host.free - self._free_wanted + len(host.slots.demoting) < self._free_wanted

    def evict_over_quota(self, now: float) -> None:
        """Evict chunks of tenants that are over their quotas, unless :meth:`begin` writes them first."""
        if self._host.has_quotas and not self._tiers.writes_back:
            self._admissions.evict_over_quota(now)

    def _takes(self, tier: LowerTier, wanted: int) -> int:
        """Number of chunks, up to ``wanted``, that a tier can be given now. Makes room there ahead of need."""
        if tier.phase is not TierPhase.SERVING:
            return 0
        size = self._cascades.sizes.frame_bound_max
        self._room.has(tier, size, self._free_wanted)
        residency = tier.residency
        return max(0, min(tier.queue_chunks_max - residency.num_writing, residency.frames_free(size, wanted)))

    def _demote(self, back: Sequence[LowerTier], demoting: Sequence[int], now: float) -> dict[int, list[int]]:
        host, ended = self._host, list(demoting)
        chunks = [(slot, host.slots.key(slot)) for slot in demoting]
        writes: dict[int, list[int]] = {}
        for tier in back:
            asked = self._cascades.ask_first(tier, chunks, now)
            held = self._asked.setdefault(tier.index, {})
            ended += [held[key] for _, key in asked if key in held]  # damaged, and stored anew in another slot since
            held.update((key, slot) for slot, key in asked)
            host.pin_to_write(slot for slot, _ in asked)
            waiting = {slot for slot, _ in asked}
            answered = self._answered.pop(tier.index, [])
            ended += answered
            missing = self._cascades.lacking(tier, [(slot, host.slots.key(slot)) for slot in answered], now)
            missing = [chunk for chunk in missing if chunk[0] in host.slots.demoting]  # a use has cancelled others
            due = self._cascades.due(tier, [one for one in chunks if one[0] not in waiting] + missing, now)
            writes[tier.index] = slots = [slot for slot, key in due if self._begin_write(tier, slot, key)]
            host.pin_to_write(slots)
            self._cascades.count_dropped(tier, len(due) - len(slots))
        self.end_writes(ended)
        return writes

    @property
    def held(self) -> list[int]:
        """Slots held until a shared tier has answered whether it has their chunks; one that two tiers hold, twice."""
        slots = [slot for asked in self._asked.values() for slot in asked.values()]
        return slots + [slot for answered in self._answered.values() for slot in answered]

    def answered(self, tier: LowerTier, keys: Iterable[Key]) -> None:
        """Have :meth:`begin` write those of ``keys`` that wait for this answer of a shared tier, unless it has them."""
        asked = self._asked.get(tier.index)
        if slots := [asked.pop(key) for key in keys if key in asked] if asked else []:
            self._answered.setdefault(tier.index, []).extend(slots)

    def out_of_service(self, tier: LowerTier) -> None:
        """Stop waiting for the answers of a tier. Its chunks are evicted unwritten, and counted."""
        slots = [*self._asked.pop(tier.index, {}).values(), *self._answered.pop(tier.index, [])]
        self._cascades.count_dropped(tier, len(slots))
        self.end_writes(slots)

    def _begin_write(self, tier: LowerTier, slot: int, key: Key) -> bool:
        size = self._cascades.sizes.frame_bound(key)
        takes = tier.phase is TierPhase.SERVING and tier.residency.num_writing < tier.queue_chunks_max
        if not (takes and self._room.has(tier, size, 1, self._host.slots.ranks[slot])):
            return False
        if tier.residency.being_deleted(((slot, key),)):  # its old frame made room: the deletion could undo the write
            return False
        tier.residency.begin_write((key,), size)
        return True

    def end_writes(self, slots: Sequence[int]) -> None:
        """Undo one hold of a write of each slot. Demoting chunks without further holds are evicted."""
        if self._host.slots.demoting:
            self._admissions.report_evicted(self._host.end_demotions(slots).keys)
        else:
            self._host.unpin_written(slots)

    # -- flush -------------------------------------------------------------------------------------------------------

    @property
    def is_flushing(self) -> bool:
        """Whether a flush has slots left to check."""
        return bool(self._to_flush)

    def flush(self) -> None:
        """Queue every chunk of the host tier for the write-back tiers, over the next steps.

        Chunks that were evicted while they waited for a tier are counted now. Otherwise they are counted when their
        turn comes, and would look like a loss of the flush.
        """
        self._drop_evicted()
        if self._tiers.writes_back:
            self._to_flush = range(self._host.num_slots)

    def _drop_evicted(self) -> None:
        is_ready = self._host.slots.is_ready
        for source, leases in self._cascades.ready.items():
            kept = [lease for lease in leases if is_ready(*lease)]
            self._cascades.count_not_offered(source, len(leases) - len(kept))
            leases[:] = kept
        for tier in self._tiers:
            gone = tier.write_queue.drop_unless(is_ready)
            self._admissions.dirty_pins.unpin(tier, gone)
            if tier.limits.write is not WritePolicy.BACK:  # there, a chunk is written or counted as it is evicted
                self._cascades.count_dropped(tier, len(gone))

    def _flush(self, back: Sequence[LowerTier], now: float) -> None:
        count = self._flushed.take(len(self._to_flush))
        some, self._to_flush = self._to_flush[:count], self._to_flush[count:]
        slot_table = self._host.slots
        chunks = [(slot, slot_table.key(slot)) for slot in some if slot_table.state(slot) is ChunkState.READY]
        for tier in back if chunks else ():
            self._cascades.queue(tier, chunks, now)
