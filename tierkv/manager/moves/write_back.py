"""Write-back: chunks that a lower tier gets when the host tier is about to evict them.

No store ever waits for it. Victims are chosen ahead of need, so that some slots are free when a store comes: they are
*leaving* until they are written, and free then. Where stores come faster than a tier takes chunks, they evict as they
always do, and what was not written is dropped and counted.
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
"""Share of the host slots that are kept free, or on their way to be, while a tier is written back to."""

LEAVING_PER_STEP_MAX = 256
"""Victims chosen in one step; a step stays short however much is wanted at once."""

FLUSHED_PER_STEP_MAX = 128
"""Slots that a flush looks at in one step."""


class Demotions:
    """Chooses what leaves; :class:`~tierkv.manager.moves.tier_io.TierIO` makes instructions of it. Sans-IO."""

    def __init__(self, host: HostTier, tiers: Iterable[LowerTier], cascades: Cascades, admissions: Admissions) -> None:
        self._host = host
        self._tiers = tiers
        self._cascades = cascades
        self._admissions = admissions
        self._free_wanted = max(1, int(host.num_slots * FREE_SHARE))
        self._to_flush = range(0)

    def begin(self, now: float) -> dict[int, list[int]]:
        """Let as many chunks leave as it takes to have some slots free. Returns what to write, by tier."""
        back = [tier for tier in self._tiers if tier.limits.write is WritePolicy.BACK]
        if not back:
            self._to_flush = range(0)  # the tiers that it was for have left
            return {}
        self._flush(back, now)
        leaving = self._host.begin_quota_demotions()
        short = min(self._free_wanted - self._host.free - len(self._host.demoting), LEAVING_PER_STEP_MAX)
        if short > -self._free_wanted:
            takes = max(map(self._takes, back))
            short -= len(self._admissions.drop_one_shots(short))
            self._admissions.dirty_pins.pin()
            leaving += self._host.begin_demotions(max(0, min(short, takes)))
        return self._demote(back, leaving, now) if leaving else {}

    def trim(self, now: float) -> None:
        """Let go of chunks of tenants that are over their quotas; at once, where :meth:`begin` will not write them."""
        if self._host.has_quotas and not any(tier.limits.write is WritePolicy.BACK for tier in self._tiers):
            self._admissions.trim(now)

    def _takes(self, tier: LowerTier) -> int:
        """How many more chunks a tier can be given now. There, too, room is made ahead of need."""
        if tier.phase is not TierPhase.SERVING:
            return 0
        size = self._cascades.sizes.frame_bound_max
        self._cascades.has_room(tier, size, self._free_wanted)
        residency = tier.residency
        return min(tier.queue_chunks_max - residency.num_writing, residency.frames_free(size, LEAVING_PER_STEP_MAX))

    def _demote(self, back: Sequence[LowerTier], leaving: Sequence[int], now: float) -> dict[int, list[int]]:
        host = self._host
        chunks = [(slot, host.slots.key(slot)) for slot in leaving]
        writes: dict[int, list[int]] = {}
        for tier in back:
            due = self._cascades.due(tier, chunks, now)
            writes[tier.index] = slots = [slot for slot, key in due if self._begin_write(tier, key)]
            host.hold_to_write(slots)
            self._cascades.dropped(tier, len(due) - len(slots))
        self.left(leaving)
        return writes

    def _begin_write(self, tier: LowerTier, key: Key) -> bool:
        size = self._cascades.sizes.frame_bound(key)
        takes = tier.phase is TierPhase.SERVING and tier.residency.num_writing < tier.queue_chunks_max
        if not (takes and self._cascades.has_room(tier, size, 1)):
            return False
        tier.residency.begin_write((key,), size)
        return True

    def left(self, slots: Sequence[int]) -> None:
        """Undo a hold of each. Those that are leaving, and that nobody holds any more, are gone."""
        self._admissions.evicted(self._host.end_demotions(slots).keys)

    # -- flush -------------------------------------------------------------------------------------------------------

    @property
    def is_flushing(self) -> bool:
        """Whether there are slots that a flush has not looked at yet."""
        return bool(self._to_flush)

    def flush(self) -> None:
        """Queue every chunk of the host tier for the tiers that are written back to, over the next steps."""
        if any(tier.limits.write is WritePolicy.BACK for tier in self._tiers):
            self._to_flush = range(self._host.num_slots)

    def _flush(self, back: Sequence[LowerTier], now: float) -> None:
        some, self._to_flush = self._to_flush[:FLUSHED_PER_STEP_MAX], self._to_flush[FLUSHED_PER_STEP_MAX:]
        host = self._host
        chunks = [(slot, host.slots.key(slot)) for slot in some if host.slots.state(slot) is ChunkState.READY]
        for tier in back if chunks else ():
            self._cascades.queue(tier, chunks, now)
