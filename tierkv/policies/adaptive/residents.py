"""The chunks of the tier, in columns by handle: who they are, what was seen of them, whose children they are."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise

from tierkv.structures.rings import longer, longer_bytes, numbers

NOBODY = 0xFFFFFFFF
_HEADS_MIN = 1 << 10
WAITING_MAX = 256


class Residents:
    """Columns, and a hash table from mark to handle that grows by one place at a time, so it never stops to rebuild.

    ``parents`` holds marks, not handles: a handle may be somebody else's by the time that it is needed.
    """

    def __init__(self) -> None:
        self.marks = numbers(0)
        self.runs = numbers(0)
        """The number of the run that a chunk belongs to."""
        self.parents = numbers(0)
        """The mark of the chunk before it in its prompt; 0: unknown."""
        self.children = numbers(0)
        """How many chunks of the tier have it as their parent."""
        self.seen = bytearray()
        self._after = numbers(0)  # the next handle in the same place of the table
        self._heads = array("I", [NOBODY]) * _HEADS_MIN
        self._half = _HEADS_MIN  # places before the first that was split since the table had half its size
        self._count = 0
        self._waiting: dict[int, tuple[int, int]] = {}  # by mark of a parent that is not here: a child and its mark

    def __len__(self) -> int:
        """How many chunks there are."""
        return self._count

    def grow(self, length: int) -> None:
        """Have room for handles below ``length``."""
        for name in ("marks", "runs", "parents", "children", "_after"):
            setattr(self, name, longer(getattr(self, name), length))
        longer_bytes(self.seen, length)

    def find(self, mark: int) -> int:
        """The handle of a chunk; negative if it is not here."""
        place = mark & (2 * self._half - 1)
        if place >= len(self._heads):
            place &= self._half - 1
        handle = self._heads[place]
        while handle != NOBODY:
            if self.marks[handle] == mark:
                return handle
            handle = self._after[handle]
        return -1

    def find_all(self, marks: Sequence[int]) -> list[int]:
        """:meth:`find` of each."""
        heads, after, here, half = self._heads, self._after, self.marks, self._half
        mask, count, found = 2 * half - 1, len(heads), list[int]()
        for mark in marks:
            place = mark & mask
            handle = heads[place if place < count else place - half]
            while handle != NOBODY and here[handle] != mark:
                handle = after[handle]
            found.append(-1 if handle == NOBODY else handle)
        return found

    def insert(self, handles: Sequence[int], marks: Sequence[int], notes: Iterable[tuple[int, int, int]]) -> None:
        """Chunks came. notes: of each, how often it was seen, its run and its parent's mark."""
        heads, after, here, waiting = self._heads, self._after, self.marks, self._waiting
        seen, runs, parents, children = self.seen, self.runs, self.parents, self.children
        for handle, mark, note in zip(handles, marks, notes, strict=True):
            place = mark & (2 * self._half - 1)
            if place >= len(heads):
                place -= self._half
            here[handle] = mark
            after[handle] = heads[place]
            heads[place] = handle
            seen[handle], runs[handle], parents[handle] = note
            children[handle] = 0
            self._count += 1
            if mark in waiting:
                self._was_waited_for(handle, mark)
            if self._count > len(heads):
                self._split()

    def _was_waited_for(self, handle: int, mark: int) -> None:
        child, its_mark = self._waiting.pop(mark)
        if self.find(its_mark) == child:
            self.parents[child] = mark
            self.children[handle] = 1

    def _split(self) -> None:
        """One more place: a part of the chunks of one place move there."""
        new, heads, after = len(self._heads), self._heads, self._after
        handle, old = heads[new - self._half], new - self._half
        heads.append(NOBODY)
        heads[old] = NOBODY
        while handle != NOBODY:
            following = after[handle]
            place = self.marks[handle] & (2 * self._half - 1)
            after[handle] = heads[place]
            heads[place] = handle
            handle = following
        if len(heads) == 2 * self._half:
            self._half *= 2

    def take_out(self, handles: Sequence[int]) -> None:
        """Chunks left."""
        heads, after, here, half = self._heads, self._after, self.marks, self._half
        mask, count = 2 * half - 1, len(heads)
        for handle in handles:
            place = here[handle] & mask
            if place >= count:
                place -= half
            at = heads[place]
            if at == handle:
                heads[place] = after[handle]
            else:
                while after[at] != handle:
                    at = after[at]
                after[at] = after[handle]
        self._count -= len(handles)

    def adopt(self, handles: Sequence[int]) -> None:
        """Count these with their parents, where those are in the tier."""
        parents, marks, children = self.parents, self.marks, self.children
        for handle, guess in pairwise((*handles, -1)):  # tail first, so a parent is mostly the next one
            if mark := parents[handle]:
                parent = guess if guess >= 0 and marks[guess] == mark else self.find(mark)
                if parent < 0:
                    parents[handle] = 0
                    self._wait(mark, handle)
                else:
                    children[parent] += 1

    def _wait(self, parent_mark: int, handle: int) -> None:
        """A parent may come just after its child: a tier that stores chunk by chunk goes tail first (S54)."""
        if len(self._waiting) >= WAITING_MAX:
            self._waiting.clear()
        self._waiting[parent_mark] = (handle, self.marks[handle])

    def orphan(self, handle: int, guess: int = -1) -> int:
        """A chunk does not count with its parent any more. Its parent's handle if that has no child now, or NOBODY.

        guess: a chunk that is likely to be its parent; negative: none.
        """
        mark = self.parents[handle]
        if not mark:
            return NOBODY
        parent = guess if guess >= 0 and self.marks[guess] == mark else self.find(mark)
        if parent < 0 or not self.children[parent]:
            return NOBODY
        self.children[parent] -= 1
        return NOBODY if self.children[parent] else parent
