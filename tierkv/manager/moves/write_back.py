"""Demotions: writes of chunks to write-back tiers when the host tier is about to evict them.

No store waits for a demotion. Victims are chosen ahead of need, so that some slots are free when a store comes. They
are *demoting* until they are written, and evicted then. Where stores come faster than a tier takes chunks, stores evict
as without a write-back tier; chunks that were not written are dropped and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tierkv.manager.host.chunk_state import ChunkState
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier, WritePolicy
from tierkv.manager.lower.tier_phase import TierPhase
from tierkv.manager.moves.admission import Admissions
from tierkv.manager.moves.write_through import Cascades
from tierkv.types.keys import Key

FREE_SHARE = 1 / 8
"""Share of the host slots that are free, or becoming free, while there is a write-back tier."""

DEMOTIONS_PER_STEP_MAX = 256
"""Victims chosen in one step, so that a step stays short."""

FLUSHED_PER_STEP_MAX = 128
"""Slots that a flush checks in one step."""


class Demotions:
    """Chooses the chunks to demote. Sans-IO.

    :class:`~tierkv.manager.moves.tier_io.TierIO` turns the choice into instructions.
    """

    def __init__(self, host: HostTier, tiers: Iterable[LowerTier], cascades: Cascades, admissions: Admissions) -> None:
        self._host = host
        self._tiers = tiers
        self._cascades = cascades
        self._admissions = admissions
        self._free_wanted = max(1, int(host.num_slots * FREE_SHARE))
        self._to_flush = range(0)

    def begin(self, now: float) -> dict[int, list[int]]:
        """Begin as many demotions as needed to have some slots free. Returns the slots to write, by tier."""
        back = [tier for tier in self._tiers if tier.limits.write is WritePolicy.BACK]
        if not back:
            self._to_flush = range(0)  # the tiers that it was for were detached
            return {}
        self._flush(back, now)
        demoting = self._host.begin_quota_demotions()
        short = min(self._free_wanted - self._host.free - len(self._host.demoting), DEMOTIONS_PER_STEP_MAX)
        if short > -self._free_wanted:
            takes = max(map(self._takes, back))
            short -= len(self._admissions.drop_one_shots(short))
            self._admissions.dirty_pins.pin()
            demoting += self._host.begin_demotions(max(0, min(short, takes)))
        return self._demote(back, demoting, now) if demoting else {}

    def evict_over_quota(self, now: float) -> None:
        """Evict chunks of tenants that are over their quotas, unless :meth:`begin` writes them first."""
        if self._host.has_quotas and not any(tier.limits.write is WritePolicy.BACK for tier in self._tiers):
            self._admissions.evict_over_quota(now)

    def _takes(self, tier: LowerTier) -> int:
        """Number of further chunks that a tier can be given now. Makes room there ahead of need."""
        if tier.phase is not TierPhase.SERVING:
            return 0
        size = self._cascades.sizes.frame_bound_max
        self._cascades.has_room(tier, size, self._free_wanted)
        residency = tier.residency
        return min(tier.queue_chunks_max - residency.num_writing, residency.frames_free(size, DEMOTIONS_PER_STEP_MAX))

    def _demote(self, back: Sequence[LowerTier], demoting: Sequence[int], now: float) -> dict[int, list[int]]:
        host = self._host
        chunks = [(slot, host.slots.key(slot)) for slot in demoting]
        writes: dict[int, list[int]] = {}
        for tier in back:
            due = self._cascades.due(tier, chunks, now)
            writes[tier.index] = slots = [slot for slot, key in due if self._begin_write(tier, key)]
            host.pin_to_write(slots)
            self._cascades.count_dropped(tier, len(due) - len(slots))
        self.end_writes(demoting)
        return writes

    def _begin_write(self, tier: LowerTier, key: Key) -> bool:
        size = self._cascades.sizes.frame_bound(key)
        takes = tier.phase is TierPhase.SERVING and tier.residency.num_writing < tier.queue_chunks_max
        if not (takes and self._cascades.has_room(tier, size, 1)):
            return False
        tier.residency.begin_write((key,), size)
        return True

    def end_writes(self, slots: Sequence[int]) -> None:
        """Undo one hold of a write of each slot. Demoting chunks without further holds are evicted."""
        self._admissions.report_evicted(self._host.end_demotions(slots).keys)

    # -- flush -------------------------------------------------------------------------------------------------------

    @property
    def is_flushing(self) -> bool:
        """Whether a flush has slots left to check."""
        return bool(self._to_flush)

    def flush(self) -> None:
        """Queue every chunk of the host tier for the write-back tiers, over the next steps."""
        if any(tier.limits.write is WritePolicy.BACK for tier in self._tiers):
            self._to_flush = range(self._host.num_slots)

    def _flush(self, back: Sequence[LowerTier], now: float) -> None:
        some, self._to_flush = self._to_flush[:FLUSHED_PER_STEP_MAX], self._to_flush[FLUSHED_PER_STEP_MAX:]
        slot_table = self._host.slots
        chunks = [(slot, slot_table.key(slot)) for slot in some if slot_table.state(slot) is ChunkState.READY]
        for tier in back if chunks else ():
            self._cascades.queue(tier, chunks, now)
