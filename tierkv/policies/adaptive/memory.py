"""What is remembered of chunks that are not in the tier: those that left, were refused, or are about to come."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain, repeat

from tierkv.policies.ghost import GhostTable

GHOSTS_PER_CHUNK = 10
GHOSTS_MIN, GHOSTS_MAX = 1 << 12, 2_000_000
NEWCOMERS_MAX = 4096
"""Chunks that requests asked for and that were neither stored nor refused so far; beyond it they count as refused."""

Note = tuple[int, int, int]
"""Of a chunk: how many requests had it in their path (to 255), its run's number, its parent's mark (0: unknown)."""

_NOTE = struct.Struct("<BII")


class Memory:
    """Notes by mark. Newcomers wait in a small table of their own: most of them are stored soon.

    Args:
        chunks_max: that the policy was opened for.
        lost: called with the runs of chunks that are forgotten, one for each.
    """

    def __init__(self, chunks_max: int, lost: Callable[[Sequence[int]], None]) -> None:
        ghosts_max = min(max(GHOSTS_PER_CHUNK * chunks_max, GHOSTS_MIN), GHOSTS_MAX)
        self._ghosts = GhostTable(ghosts_max, _NOTE.size, self._forgotten)
        self._newcomers: OrderedDict[int, Note] = OrderedDict()
        self._lost = lost

    def _forgotten(self, notes: Sequence[bytes]) -> None:
        self._lost([run for _, run, _ in _NOTE.iter_unpack(b"".join(notes))])

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._ghosts) + len(self._newcomers)

    def get(self, mark: int) -> Note | None:
        """The note of a chunk."""
        if (note := self._newcomers.get(mark)) is not None:
            return note
        packed = self._ghosts.get(mark)
        return None if packed is None else _NOTE.unpack(packed)

    def pop_all(self, marks: Sequence[int]) -> list[Note | None]:
        """The notes of chunks, which are forgotten."""
        newcomers = self._newcomers
        notes: list[Note | None] = [newcomers.pop(mark, None) for mark in marks]
        if None in notes:
            others = [at for at, note in enumerate(notes) if note is None]
            for at, packed in zip(others, self._ghosts.pop_all([marks[at] for at in others]), strict=True):
                if packed is not None:
                    notes[at] = _NOTE.unpack(packed)
        return notes

    def expect(self, mark: int, note: Note) -> None:
        """A chunk that is not remembered was asked for."""
        self._newcomers[mark] = note

    def expect_new(self, marks: Sequence[int], run: int, parent: int) -> None:
        """Chunks that nobody saw before were asked for, in the order of their path. parent: what the first one has."""
        self._newcomers.update(zip(marks, zip(repeat(1), repeat(run), chain((parent,), marks)), strict=False))

    def settle(self) -> None:
        """Too many newcomers: the oldest count as refused. To be called after some were expected."""
        newcomers = self._newcomers
        if (over := len(newcomers) - NEWCOMERS_MAX) > 0:
            oldest = [newcomers.popitem(last=False) for _ in range(over)]
            self.left([mark for mark, _ in oldest], [note for _, note in oldest])

    def left(self, marks: Sequence[int], notes: Sequence[Note]) -> None:
        """Chunks left the tier, the last one as the last."""
        pack = _NOTE.pack
        self._ghosts.extend_each(marks, [pack(*note) for note in notes])
