"""Chunks of the tier in columns by handle: mark, run, number of requests, parent and children."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise

from tierkv.structures.columns import column, longer, longer_bytes

NO_HANDLE = 0xFFFFFFFF
_HEADS_MIN = 1 << 10
MISSING_PARENTS_MAX = 256


class Residents:
    """Columns by handle, and a hash table from mark to handle.

    The table grows by one place at a time, so no call stalls for a rebuild. ``parents`` has marks, not handles: a
    handle may belong to another chunk by the time it is used.
    """

    def __init__(self) -> None:
        self.marks = column("I", 0)
        self.runs = column("I", 0)
        """Number of the run that a chunk belongs to."""
        self.parents = column("I", 0)
        """Mark of the previous chunk in the prompt; 0: unknown."""
        self.children = column("I", 0)
        """Number of chunks in the tier whose parent is this chunk."""
        self.seen = bytearray()
        """Number of requests that had the chunk in their path, up to 255."""
        self._after = column("I", 0)  # the next handle in the same place of the table
        self._heads = array("I", [NO_HANDLE]) * _HEADS_MIN
        self._half = _HEADS_MIN  # places before the first that was split since the table had half its size
        self._count = 0
        self._missing_parents: dict[
            int, tuple[int, int]
        ] = {}  # by mark of a parent not in the tier: a child and its mark

    def __len__(self) -> int:
        """Number of chunks."""
        return self._count

    def grow(self, length: int) -> None:
        """Make room for handles below ``length``."""
        for name in ("marks", "runs", "parents", "children", "_after"):
            setattr(self, name, longer(getattr(self, name), length))
        longer_bytes(self.seen, length)

    def find(self, mark: int) -> int:
        """Handle of a chunk; negative if it is not in the tier."""
        place = mark & (2 * self._half - 1)
        if place >= len(self._heads):
            place &= self._half - 1
        handle = self._heads[place]
        while handle != NO_HANDLE:
            if self.marks[handle] == mark:
                return handle
            handle = self._after[handle]
        return -1

    def find_all(self, marks: Sequence[int]) -> list[int]:
        """Handle of each chunk; negative for each that is not in the tier."""
        heads, after, here, half = self._heads, self._after, self.marks, self._half
        mask, count, found = 2 * half - 1, len(heads), list[int]()
        for mark in marks:
            place = mark & mask
            handle = heads[place if place < count else place - half]
            while handle != NO_HANDLE and here[handle] != mark:
                handle = after[handle]
            found.append(-1 if handle == NO_HANDLE else handle)
        return found

    def insert(self, handles: Sequence[int], marks: Sequence[int], notes: Iterable[tuple[int, int, int]]) -> None:
        """Insert chunks; each note has the number of requests, the run, and the mark of the parent."""
        heads, after, here, missing_parents = self._heads, self._after, self.marks, self._missing_parents
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
            if mark in missing_parents:
                self._link_expected_child(handle, mark)
            if self._count > len(heads):
                self._split()

    def _link_expected_child(self, handle: int, mark: int) -> None:
        child, its_mark = self._missing_parents.pop(mark)
        if self.find(its_mark) == child:
            self.parents[child] = mark
            self.children[handle] = 1

    def _split(self) -> None:
        """Add one place to the table, and move part of the chunks of another place to it."""
        new, heads, after = len(self._heads), self._heads, self._after
        handle, old = heads[new - self._half], new - self._half
        heads.append(NO_HANDLE)
        heads[old] = NO_HANDLE
        while handle != NO_HANDLE:
            following = after[handle]
            place = self.marks[handle] & (2 * self._half - 1)
            after[handle] = heads[place]
            heads[place] = handle
            handle = following
        if len(heads) == 2 * self._half:
            self._half *= 2

    def remove(self, handles: Sequence[int]) -> None:
        """Remove chunks."""
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

    def link_parents(self, handles: Sequence[int]) -> None:
        """Count chunks as children of their parents, where those are in the tier."""
        parents, marks, children = self.parents, self.marks, self.children
        for handle, guess in pairwise((*handles, -1)):  # tail first, so the next chunk is mostly the parent
            if mark := parents[handle]:
                parent = guess if guess >= 0 and marks[guess] == mark else self.find(mark)
                if parent < 0:
                    parents[handle] = 0
                    self._expect_parent(mark, handle)
                else:
                    children[parent] += 1

    def _expect_parent(self, parent_mark: int, handle: int) -> None:
        """Remember a missing parent. It may be stored just after its child: tiers store the tail first (S54)."""
        if len(self._missing_parents) >= MISSING_PARENTS_MAX:
            self._missing_parents.clear()
        self._missing_parents[parent_mark] = (handle, self.marks[handle])

    def unlink_parent(self, handle: int, guess: int = -1) -> int:
        """Stop counting a chunk as a child. Return the parent's handle if that has no child left, otherwise NO_HANDLE.

        Args:
            handle: the child.
            guess: handle that is likely to be the parent; negative: none.
        """
        mark = self.parents[handle]
        if not mark:
            return NO_HANDLE
        parent = guess if guess >= 0 and self.marks[guess] == mark else self.find(mark)
        if parent < 0 or not self.children[parent]:
            return NO_HANDLE
        self.children[parent] -= 1
        return NO_HANDLE if self.children[parent] else parent
