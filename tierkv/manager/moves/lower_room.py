"""Room in lower tiers: the choice of chunks that are evicted from them, for writes, quotas and resets."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.lower.tier_list import TierList
from tierkv.manager.step_state import StepState
from tierkv.metrics.counters import CoreCounters
from tierkv.policies.quotas import TRIMMED_MAX
from tierkv.types.keys import Key


class LowerRoom:
    """Evicts chunks from lower tiers, within the budget of the step, and counts them. Sans-IO."""

    def __init__(self, tiers: TierList, counters: CoreCounters, step: StepState) -> None:
        self._tiers = tiers
        self._counters = counters
        self._step = step
        self._victims = step.budget.share()
        self._emptied = step.budget.share()

    def make(self, tier: LowerTier, frame_bytes: int, waiting: int, rank: int = 0) -> bool:
        """Begin to make room in a tier for ``waiting`` frames of that size; see :meth:`Residency.evict_for`.

        Returns:
            Whether a later step may choose more victims, because this step's share is used up.
        """
        left = self._victims.left
        victims_max = tier.residency.victims_max(left, self._step.now)
        victims = tier.residency.evict_for(frame_bytes, waiting, victims_max, rank)
        self._victims.take(len(victims))
        self._count(tier, victims)
        return len(victims) == left

    def has(self, tier: LowerTier, frame_bytes: int, waiting: int, rank: int = 0) -> bool:
        """Make room in a tier for ``waiting`` frames of that size. Returns whether one of them fits now."""
        self.make(tier, frame_bytes, waiting, rank)
        return tier.residency.has_room(frame_bytes)

    def evict_one(self, tier: LowerTier) -> None:
        """Evict one chunk from a tier whose backend reported that it is full."""
        self._count(tier, tier.residency.evict(tier.residency.victims_max(1, self._step.now)))

    def evict_cut(self, tier: LowerTier, keys: Sequence[Key], ranks: Sequence[int]) -> None:
        """Evict those of ``keys``, just written, before which a chunk of their prefix was evicted meanwhile.

        A chunk that waits for its write is refused then. One whose write was under way would take up the room of
        others, and serve no request.
        """
        is_cut, is_idle = tier.residency.listed.order.is_cut, tier.residency.rows.is_idle
        if is_cut(*ranks):
            cut = [key for key, rank in zip(keys, ranks, strict=True) if is_cut(rank) and is_idle(key)]
            for key in cut:
                tier.residency.schedule_delete(key)
            self._victims.take(len(cut))
            self._count(tier, cut)

    def trim(self) -> None:
        """Evict chunks of tenants that are over their quotas in lower tiers, and continue resets."""
        for tier in self._tiers:
            if tier.residency.has_quotas:
                victims = tier.residency.evict_over_quota(tier.residency.victims_max(TRIMMED_MAX, self._step.now))
                self._victims.take(len(victims))
                self._count(tier, victims)
            if tier.phase.emptying:
                self._emptied.take(tier.continue_reset(self._emptied.left))

    def _count(self, tier: LowerTier, victims: Sequence[Key]) -> None:
        if victims:
            self._counters.evictions[tier.name] += len(victims)
