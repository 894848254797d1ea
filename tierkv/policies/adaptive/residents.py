"""The chunks of the tier, in columns by handle: who they are, what was seen of them, whose children they are."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tierkv.policies.rings import longer, longer_bytes, numbers

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

    def _place(self, mark: int) -> int:
        place = mark & (2 * self._half - 1)
        return place if place < len(self._heads) else mark & (self._half - 1)

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

    def insert(self, handle: int, mark: int, note: tuple[int, int, int]) -> None:
        """A chunk came. note: how often it was seen, its run and its parent's mark."""
        place = self._place(mark)
        self.marks[handle] = mark
        self._after[handle] = self._heads[place]
        self._heads[place] = handle
        self.seen[handle], self.runs[handle], self.parents[handle] = note
        self.children[handle] = 0
        self._count += 1
        if (child := self._waiting.pop(mark, None)) is not None and self.find(child[1]) == child[0]:
            self.parents[child[0]] = mark
            self.children[handle] = 1
        if self._count > len(self._heads):
            self._split()

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

    def take_out(self, handle: int) -> None:
        """A chunk left."""
        place, after = self._place(self.marks[handle]), self._after
        at = self._heads[place]
        if at == handle:
            self._heads[place] = after[handle]
        else:
            while after[at] != handle:
                at = after[at]
            after[at] = after[handle]
        self._count -= 1

    def adopt(self, handles: Sequence[int]) -> None:
        """Count these with their parents, where those are in the tier."""
        following = (*handles[1:], NOBODY) if handles else ()
        for handle, guess in zip(handles, following, strict=True):  # tail first, so a parent is mostly the next one
            if mark := self.parents[handle]:
                parent = guess if guess != NOBODY and self.marks[guess] == mark else self.find(mark)
                if parent < 0:
                    self.parents[handle] = 0
                    self._wait(mark, handle)
                else:
                    self.children[parent] += 1

    def _wait(self, parent_mark: int, handle: int) -> None:
        """A parent may come just after its child: a tier that stores chunk by chunk goes tail first (S54)."""
        if len(self._waiting) >= WAITING_MAX:
            self._waiting.clear()
        self._waiting[parent_mark] = (handle, self.marks[handle])

    def orphan(self, handle: int) -> int:
        """A chunk does not count with its parent any more. Its parent's handle if that has no child now, or NOBODY."""
        parent = self.find(self.parents[handle]) if self.parents[handle] else -1
        if parent < 0 or not self.children[parent]:
            return NOBODY
        self.children[parent] -= 1
        return NOBODY if self.children[parent] else parent
