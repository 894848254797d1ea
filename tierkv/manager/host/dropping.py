"""Removal of chunks from the host tier other than by eviction: drops, of which many are made in later steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from tierkv.manager.host.chunk_state import CODES, ChunkEvent, ChunkState
from tierkv.manager.host.slot_table import SlotTable
from tierkv.manager.host.waiters import Waiters
from tierkv.manager.step_budget import BudgetShare
from tierkv.policies.eviction_list import EvictionList
from tierkv.structures.key_table import SHARD_BYTE, IdPool
from tierkv.types.geometry import cdiv
from tierkv.types.keys import Key
from tierkv.types.transfers import SlotRef

_READY, _DOOMED = CODES[ChunkState.READY], CODES[ChunkState.DOOMED]

SLOTS_PER_KEY = 3
"""Slots that are freed in one batch for the cost of one key operation."""


class ChunkDropping:
    """Drops of chunks, whose slots are free once they have no pins. Sans-IO, single-threaded.

    A reset makes every chunk *stale* at once (:class:`~tierkv.manager.host.slot_table.SlotTable`). A stale chunk is
    dropped when a call touches its slot, or by :meth:`sweep`.

    Args:
        slots: columns of the tier.
        free: free slots.
        listed: READY chunks that are not demoting.
        waiters: notified of chunks that will never be readable.
    """

    def __init__(self, slots: SlotTable, free: IdPool, listed: EvictionList, waiters: Waiters) -> None:
        self._slots = slots
        self._free = free
        self._listed = listed
        self._waiters = waiters
        self._damaged: deque[list[SlotRef]] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether no chunk waits to be dropped."""
        return not (self._damaged or self._slots.unswept)

    def drop(self, slots: Sequence[int]) -> Sequence[Key]:
        """Make visible chunks invisible now; each slot is free once it has no pins. Returns their keys."""
        table = self._slots
        if table.unswept:
            self.drop_stale(slots)
        table.removals += 1
        visible = [slot for slot in slots if table.states[slot] != _DOOMED]
        keys = table.keys_of(visible)
        for key in keys:
            del table.shards[key[SHARD_BYTE]][key]
        self._doom(visible)
        return keys

    def drop_later(self, damaged: list[SlotRef]) -> None:
        """Have :meth:`drop_some` drop these chunks, the last one first, if their slots still have them."""
        if damaged:
            self._damaged.append(damaged)

    def drop_some(self, share: BudgetShare) -> list[Key]:
        """Drop damaged and stale chunks, as many as a part of the step's budget allows.

        Returns:
            Keys of those that were visible.
        """
        table, keys = self._slots, list[Key]()
        while self._damaged:
            leases = self._damaged[0]
            count = SLOTS_PER_KEY * share.take(cdiv(len(leases), SLOTS_PER_KEY))
            if not count:
                break
            keys += self.drop(table.leased(leases[: -count - 1 : -1]))
            del leases[-count:]
            if not leases:
                self._damaged.popleft()
        if table.unswept:
            self.sweep(SLOTS_PER_KEY * share.take(cdiv(table.unswept, SLOTS_PER_KEY)))
        table.free_old_keys()
        return keys

    def _doom(self, slots: Sequence[int]) -> None:
        """Drop chunks that no table of keys names any more."""
        if not slots:
            return
        table, pins = self._slots, self._slots.pins
        ready = [slot for slot in slots if table.states[slot] == _READY]
        if ready:
            self._listed.remove([slot for slot in ready if slot not in table.demoting])
            self._listed.evictable -= len([slot for slot in ready if not pins[slot]])
            table.demoting.difference_update(ready)
        table.transition(slots, ChunkEvent.DROPPED)
        if self._waiters.by_slot:
            self._waiters.settle(slots, readable=False)
        if idle := [slot for slot in slots if not pins[slot]]:
            self.free_doomed(idle)

    def free_doomed(self, slots: list[int]) -> None:
        """Free the slots of DOOMED chunks that have no pins any more."""
        table, keys, empty = self._slots, self._slots.keys, Key(b"")
        table.transition(slots, ChunkEvent.RELEASED)
        for slot in slots:
            keys[slot] = empty
        self._free.give_back(slots)

    def reset(self) -> None:
        """Make every chunk invisible at once, whatever their number: each is stale now (see :class:`SlotTable`).

        It is dropped when a call touches its slot, or by :meth:`sweep`.
        """
        table = self._slots
        table.removals += 1
        table.new_generations = 0
        table.unswept = self._free.fresh
        table.forget_all()

    def sweep(self, slots_max: int) -> None:
        """Drop the stale chunks among the next ``slots_max`` slots."""
        table = self._slots
        stop = table.unswept
        table.unswept = max(0, stop - slots_max)
        self._doom(table.stale_among(range(table.unswept, stop)))

    def drop_stale(self, slots: Iterable[int]) -> None:
        """Drop those of ``slots`` whose chunks are stale."""
        self._doom(self._slots.stale_among(slots))

    def without_stale(self, victims: Sequence[int]) -> list[int]:
        """Victims that are not stale. The slots of the stale ones become free; their eviction is not reported."""
        stale = self._slots.stale_among(victims)
        self._slots.transition(stale, ChunkEvent.DROPPED)
        gone = set(stale)
        kept = [slot for slot in victims if slot not in gone]
        self.free_doomed(stale)
        return kept
