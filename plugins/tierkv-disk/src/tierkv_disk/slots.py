"""Which slots of the segment files are free. Pure: no I/O, no lock; the owner serialises calls."""

from __future__ import annotations

from array import array
from collections.abc import Container
from typing import NamedTuple


class Slot(NamedTuple):
    """One place for one frame: slot ``number`` of segment file ``segment``, both from 0."""

    segment: int
    number: int


class SlotTable:
    """Free slots, and pins: a slot that somebody reads is not handed out again before the last reader is done."""

    def __init__(self) -> None:
        # Per segment, indices as four-byte integers (a tuple per free slot would cost 100 bytes); full segments absent.
        self._free: dict[int, array[int]] = {}
        self._ends: dict[int, int] = {}
        self._pins: dict[Slot, int] = {}
        self._freed_while_pinned: set[Slot] = set()

    def add_segment(self, segment: int, end: int, used: Container[int] = ()) -> None:
        """Manage the slots 0..end-1 of a segment, all of them free but the used ones.

        Slots from ``end`` on (the capacity shrank) are never handed out; those in use may be pinned, unpinned, freed.
        """
        self._ends[segment] = end
        free = array("I", (index for index in reversed(range(end)) if index not in used))
        if free:
            self._free[segment] = free

    def take(self) -> Slot | None:
        """A free slot, of the oldest segment that has one; or None."""
        for segment, free in self._free.items():
            index = free.pop()
            if not free:
                del self._free[segment]
            return Slot(segment, index)
        return None

    def free(self, slot: Slot) -> None:
        """Nobody refers to this slot any more; once its readers are done it can be taken again."""
        if slot in self._pins:
            self._freed_while_pinned.add(slot)
        elif slot.number < self._ends[slot.segment]:
            self._free.setdefault(slot.segment, array("I")).append(slot.number)

    def pin(self, slot: Slot) -> None:
        """A reader starts."""
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slot: Slot) -> None:
        """A reader is done."""
        readers = self._pins.pop(slot) - 1
        if readers:
            self._pins[slot] = readers
        elif slot in self._freed_while_pinned:
            self._freed_while_pinned.remove(slot)
            self.free(slot)

    def __len__(self) -> int:
        """How many slots can be taken now."""
        return sum(map(len, self._free.values()))
