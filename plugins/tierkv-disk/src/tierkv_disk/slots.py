"""Which slots of the segment files are free. Pure: no I/O, no lock; the owner serialises calls."""

from __future__ import annotations

from array import array
from collections.abc import Container
from typing import NewType

Slot = NewType("Slot", int)
"""A place for one frame: number of the segment file in the upper 32 bits, of the slot in it in the lower; both from 0.

Integers, because a tier has millions: the garbage collector, whose pauses the engine would feel, does not visit them.
"""

Location = NewType("Location", int)
"""A slot, and in the lower 32 bits the length of the frame in it. An integer for the same reason."""

_BITS = 32
_MASK = (1 << _BITS) - 1


def slot_at(segment: int, number: int) -> Slot:
    """Slot ``number`` of segment file ``segment``."""
    return Slot(segment << _BITS | number)


def segment_of(slot: Slot) -> int:
    """The segment file of a slot."""
    return slot >> _BITS


def number_of(slot: Slot) -> int:
    """The slot's place in its segment file."""
    return slot & _MASK


def location_at(slot: Slot, frame_bytes: int) -> Location:
    """A frame of this length in this slot."""
    return Location(slot << _BITS | frame_bytes)


def slot_of(location: Location) -> Slot:
    """The slot of a location."""
    return Slot(location >> _BITS)


def frame_bytes_of(location: Location) -> int:
    """The length of the frame there."""
    return location & _MASK


class SlotTable:
    """Free slots, and pins: a slot that somebody reads is not handed out again before the last reader is done."""

    def __init__(self) -> None:
        # Per segment, numbers of four bytes each (as integers they would take ten times that); full segments absent.
        self._free: dict[int, array[int]] = {}
        self._ends: dict[int, int] = {}
        self._pins: dict[Slot, int] = {}
        self._freed_while_pinned: set[Slot] = set()

    def add_segment(self, segment: int, end: int, used: Container[Slot] = ()) -> None:
        """Manage the slots 0..end-1 of a segment, all of them free but the used ones.

        Slots from ``end`` on (the capacity shrank) are never handed out; those in use may be pinned, unpinned, freed.
        """
        self._ends[segment] = end
        free = array("I", (number for number in reversed(range(end)) if slot_at(segment, number) not in used))
        if free:
            self._free[segment] = free

    def take(self) -> Slot | None:
        """A free slot, of the oldest segment that has one; or None."""
        for segment, free in self._free.items():
            slot = slot_at(segment, free.pop())
            if not free:
                del self._free[segment]
            return slot
        return None

    def free(self, slot: Slot) -> None:
        """Nobody refers to this slot any more; once its readers are done it can be taken again."""
        if slot in self._pins:
            self._freed_while_pinned.add(slot)
        elif number_of(slot) < self._ends[segment_of(slot)]:
            self._free.setdefault(segment_of(slot), array("I")).append(number_of(slot))

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
