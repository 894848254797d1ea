"""Chunks that wait to be written below are kept from being evicted meanwhile, as far as there are others.

What has a copy below leaves before what would be lost. A chunk in the *shelter* is held, so every eviction policy
passes over it; when it was written, it is where it would be without (see :class:`~tierkv.abc.WriteAwarePolicy`). The
shelter is a part of the host tier, and whoever needs slots when there are no others gets those of the oldest in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice

from tierkv.errors import require
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier, WritePolicy
from tierkv.manager.lower.tier_list import TierList
from tierkv.manager.lower.tier_phase import TierPhase

SHELTERED_SHARE = 1 / 2
"""Share of the host slots that the shelter has at most."""

UNWRITTEN_SHARE = 3 / 4
"""The same, together with what is being written. The rest is for what is used most, whatever becomes of the tiers."""

SHELTERED_MAX = 4096
"""Chunks that the shelter has at most: a choice must be able to pass over all of them at once."""


class DirtyPins:
    """Sans-IO; O(1) amortised per chunk. One hold per slot, however many tiers its chunk waits for."""

    def __init__(self, host: HostTier, tiers: TierList) -> None:
        self._host = host
        self._tiers = tiers
        # Under quotas a tenant that floods the cache evicts its own chunks, also those that wait.
        self._slots_max = 0 if host.has_quotas else min(int(host.num_slots * SHELTERED_SHARE), SHELTERED_MAX)
        self._unwritten_max = int(host.num_slots * UNWRITTEN_SHARE)
        # By slot, the oldest first: the tiers that the chunk waits for, a bit for each.
        self._waits: dict[int, int] = {}

    def spare(self) -> int:
        """Slots that can be had beside those of the host tier: those of the shelter that nobody else holds."""
        return sum(1 for _ in self._host.slots.held_once(self._waits))

    def pin(self) -> None:
        """Something is about to be evicted: shelter what waits, those first that have waited longest."""
        waits = self._waits
        written = sum(tier.residency.num_writing for tier in self._tiers.with_leaving)
        slots_max = min(self._slots_max, self._unwritten_max - written)
        for tier in self._tiers:
            # What waits for a tier that is written back to is written when it is evicted, if not before.
            if tier.limits.write is WritePolicy.BACK or tier.phase is not TierPhase.SERVING:
                continue
            bit = 1 << tier.index
            while len(waits) < slots_max and (leases := tier.write_queue.take_aside(slots_max - len(waits))):
                waiting = dict.fromkeys(self._host.ready_slots(leases))
                self._host.hold_to_write([slot for slot in waiting if slot not in waits])
                for slot in waiting:
                    waits[slot] = waits.get(slot, 0) | bit

    def has(self, tier: LowerTier, slot: int, generation: int) -> bool:
        """Whether a chunk is sheltered because it waits for this tier."""
        return bool(self._waits.get(slot, 0) >> tier.index & 1) and self._host.slots.generation(slot) == generation

    def begin_writes(self, tier: LowerTier, slots: Iterable[int]) -> None:
        """Hold these for a write to a tier, for which they do not wait any more: who is sheltered is held already."""
        if self._waits:
            slots = [slot for slot in slots if not self._leaves(slot, 1 << tier.index)]
        self._host.hold_to_write(slots)

    def unpin(self, tier: LowerTier, leases: Iterable[tuple[int, int]]) -> None:
        """These do not wait for a tier any more."""
        if not self._waits:
            return
        generation, bit = self._host.slots.generation, 1 << tier.index
        out = [slot for slot, number in leases if generation(slot) == number and self._leaves(slot, bit)]
        if out:
            self._host.end_writes(out)

    def _leaves(self, slot: int, bit: int) -> bool:
        """A chunk does not wait for a tier any more. Whether it was sheltered, and waits for no other."""
        tiers = self._waits.get(slot, 0)
        if tiers == bit:
            del self._waits[slot]
        elif tiers & bit:
            self._waits[slot] = tiers ^ bit
        return tiers == bit

    def give_way(self, count: int) -> None:
        """There is not room for so many without the shelter: let the oldest out whom nobody else holds."""
        oldest = list(islice(self._host.slots.held_once(self._waits), count - self._host.room))
        for slot in oldest:
            del self._waits[slot]
        self._host.end_writes(oldest)

    def unpin_tier(self, tier: LowerTier) -> None:
        """Those who wait for a tier do so without shelter, until they are taken in again."""
        self.unpin(tier, [(slot, self._host.slots.generation(slot)) for slot in self._waits])
        tier.write_queue.rejoin()

    def empty(self) -> None:
        """Nobody is sheltered any more."""
        everybody = list(self._waits)
        self._waits.clear()
        self._host.end_writes(everybody)

    @property
    def slots(self) -> Collection[int]:
        """Whose chunks are sheltered."""
        return self._waits.keys()

    def validate(self) -> None:
        """Check that all who are sheltered are held, and wait.

        Raises:
            InvariantError: one is not.
        """
        count = len(self._waits)
        require(count <= self._slots_max, f"{count} chunks are sheltered, {self._slots_max} may be")
        if not count:
            return
        queues = {
            1 << tier.index: set(tier.write_queue.first(len(tier.write_queue))) for tier in self._tiers.with_leaving
        }
        for slot, bits in self._waits.items():
            lease = slot, self._host.slots.generation(slot)
            waiting = sum(bit for bit, queue in queues.items() if lease in queue)
            require(bits > 0 and not bits & ~waiting, f"slot {slot} is sheltered, and nobody is to write it")
            require(self._host.slots.is_written(slot), f"slot {slot} is sheltered, and not held")
