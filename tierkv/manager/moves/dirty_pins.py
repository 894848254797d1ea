"""Pins on chunks that wait to be written to a lower tier.

A chunk with a copy in a lower tier is evicted before one whose only copy is in the host tier. While a chunk is pinned
as dirty, its slot has a hold, so every eviction policy passes over it. After the write its place in the eviction order
is the one that it would have without the pin (see :class:`~tierkv.abc.WriteAwarePolicy`).

Pins are bounded to a share of the host tier. A request for slots that finds no other victims gets those of the oldest
pins: a store never fails because chunks are dirty.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice

from tierkv.errors import require
from tierkv.manager.host.dropping import SLOTS_PER_KEY
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier, WritePolicy
from tierkv.manager.lower.tier_list import TierList
from tierkv.manager.lower.tier_phase import TierPhase
from tierkv.manager.step_budget import BudgetShare
from tierkv.types.geometry import cdiv

PINNED_SHARE = 1 / 2
"""Largest share of the host slots that may be pinned."""

UNWRITTEN_SHARE = 3 / 4
"""Largest share of the host slots that may be pinned or being written. The rest keeps the most used chunks, even when
no lower tier makes progress."""

PINNED_MAX = 4096
"""Largest number of pinned chunks: one choice of victims must be able to pass over all of them."""


class DirtyPins:
    """Pins by slot. Sans-IO; O(1) amortised per chunk. A slot has one pin, however many tiers its chunk waits for.

    Args:
        host: the host tier.
        tiers: the tiers below.
        share: key operations of the step.
    """

    def __init__(self, host: HostTier, tiers: TierList, share: BudgetShare) -> None:
        self._host = host
        self._share = share
        self._tiers = tiers
        # Under quotas a tenant that floods the cache must evict its own chunks, also those that wait.
        self._slots_max = 0 if host.has_quotas else min(int(host.num_slots * PINNED_SHARE), PINNED_MAX)
        self._unwritten_max = int(host.num_slots * UNWRITTEN_SHARE)
        # By slot, the oldest pin first: the tiers that the chunk waits for, a bit for each.
        self._waits: dict[int, int] = {}

    @property
    def slots(self) -> Collection[int]:
        """Slots that are pinned."""
        return self._waits.keys()

    def spare(self) -> int:
        """Number of pinned slots that nothing else holds. O(pins)."""
        return sum(1 for _ in self._host.slots.pinned_once(self._waits))

    def has(self, tier: LowerTier, slot: int, generation: int) -> bool:
        """Whether a chunk is pinned because it waits for this tier."""
        return bool(self._waits.get(slot, 0) >> tier.index & 1) and self._host.slots.generation(slot) == generation

    def pin(self) -> None:
        """Pin waiting chunks, up to the bounds and within the step's budget, those that have waited longest first.

        Called before an eviction.
        """
        waits, left = self._waits, SLOTS_PER_KEY * self._share.left
        written = sum(tier.residency.num_writing for tier in self._tiers.with_detached)
        slots_max = min(self._slots_max, self._unwritten_max - written)
        for tier in self._tiers:
            # A chunk that waits for a write-back tier is written at the latest when it is evicted.
            if tier.limits.write is WritePolicy.BACK or tier.phase is not TierPhase.SERVING:
                continue
            bit = 1 << tier.index
            while (room := min(slots_max - len(waits), left)) > 0 and (leases := tier.write_queue.take_aside(room)):
                left -= SLOTS_PER_KEY * self._share.take(cdiv(len(leases), SLOTS_PER_KEY))
                waiting = dict.fromkeys(self._host.ready_slots(leases))
                self._host.pin_to_write([slot for slot in waiting if slot not in waits])
                for slot in waiting:
                    waits[slot] = waits.get(slot, 0) | bit

    def pin_ahead(self) -> None:
        """Pin waiting chunks at the end of a step, if evictions are near and one of them could not pin all."""
        if self._host.free < self._slots_max:
            own = SLOTS_PER_KEY * self._share.own_left
            if any(tier.write_queue.num_behind > own for tier in self._tiers):
                self.pin()

    def begin_writes(self, tier: LowerTier, slots: Collection[int]) -> None:
        """Hold these slots for a write to a tier, and end their wait for it. The hold of a pin is reused."""
        waits, bit = self._waits, 1 << tier.index
        if waits:  # as _end_wait(), without a call for each
            pinned = {slot for slot in slots if slot in waits and waits[slot] == bit}
            slots = [slot for slot in slots if slot not in pinned]
            for slot in pinned:
                del waits[slot]
            for slot in waits.keys() & set(slots):
                waits[slot] &= ~bit
        self._host.pin_to_write(slots)

    def unpin(self, tier: LowerTier, leases: Iterable[tuple[int, int]]) -> None:
        """End the wait of these leases for a tier, and remove pins that wait for no other."""
        if not self._waits:
            return
        generation, bit = self._host.slots.generation, 1 << tier.index
        unpinned = [slot for slot, number in leases if generation(slot) == number and self._end_wait(slot, bit)]
        if unpinned:
            self._host.unpin_written(unpinned)

    def _end_wait(self, slot: int, bit: int) -> bool:
        """End the wait of a chunk for one tier. Returns whether it was pinned and waits for no other tier."""
        tiers = self._waits.get(slot, 0)
        if tiers == bit:
            del self._waits[slot]
        elif tiers & bit:
            self._waits[slot] = tiers ^ bit
        return tiers == bit

    def unpin_oldest(self, count: int) -> None:
        """Remove the oldest pins that nothing else holds, until the host tier has room for ``count`` slots."""
        oldest = list(islice(self._host.slots.pinned_once(self._waits), count - self._host.room))
        for slot in oldest:
            del self._waits[slot]
        self._host.unpin_written(oldest)

    def unpin_tier(self, tier: LowerTier) -> None:
        """Remove the pins of all chunks that wait for a tier. They keep waiting, and may be pinned again later."""
        self.unpin(tier, [(slot, self._host.slots.generation(slot)) for slot in self._waits])
        tier.write_queue.rejoin()

    def unpin_all(self) -> None:
        """Remove every pin."""
        slots = list(self._waits)
        self._waits.clear()
        self._host.unpin_written(slots)

    def validate(self) -> None:
        """Check that every pinned chunk is held, and waits for the tiers of its pin.

        Raises:
            InvariantError: one is not held, or does not wait.
        """
        count = len(self._waits)
        require(count <= self._slots_max, f"{count} chunks are pinned as dirty, {self._slots_max} may be")
        if not count:
            return
        tiers = self._tiers.with_detached
        queues = {1 << tier.index: set(tier.write_queue.first(len(tier.write_queue))) for tier in tiers}
        for slot, bits in self._waits.items():
            lease = slot, self._host.slots.generation(slot)
            waiting = sum(bit for bit, queue in queues.items() if lease in queue)
            require(bits > 0 and not bits & ~waiting, f"slot {slot} is pinned as dirty, but waits for no write")
            require(self._host.slots.is_written(slot), f"slot {slot} is pinned as dirty, but not held")
