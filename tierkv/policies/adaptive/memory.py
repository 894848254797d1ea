"""Memory of chunks that are not in the tier: evicted, refused, or about to be stored."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain, repeat

from tierkv.policies.ghost import GhostTable

GHOSTS_PER_CHUNK = 10
GHOSTS_MIN, GHOSTS_MAX = 1 << 12, 2_000_000
NEWCOMERS_MAX = 4096
"""Largest number of chunks that were requested and neither stored nor refused. Older ones count as refused."""

Note = tuple[int, int, int]
"""Note about a chunk: number of requests (up to 255), number of its run, mark of its parent (0: unknown)."""

_NOTE = struct.Struct("<BII")


class Memory:
    """Notes by mark. New chunks are in a small table of their own, because most of them are stored soon.

    Args:
        chunks_max: number of chunks that the policy was opened for.
        forget_in_runs: called with the run numbers of forgotten chunks, one entry per chunk.
    """

    def __init__(self, chunks_max: int, forget_in_runs: Callable[[Sequence[int]], None]) -> None:
        ghosts_max = min(max(GHOSTS_PER_CHUNK * chunks_max, GHOSTS_MIN), GHOSTS_MAX)
        self._ghosts = GhostTable(ghosts_max, _NOTE.size, self._forgotten)
        self._newcomers: OrderedDict[int, Note] = OrderedDict()
        self._forget_in_runs = forget_in_runs

    def _forgotten(self, notes: Sequence[bytes]) -> None:
        self._forget_in_runs([run for _, run, _ in _NOTE.iter_unpack(b"".join(notes))])

    def __len__(self) -> int:
        """Number of remembered chunks."""
        return len(self._ghosts) + len(self._newcomers)

    def get(self, mark: int) -> Note | None:
        """Note of a chunk; None if it is not remembered."""
        if (note := self._newcomers.get(mark)) is not None:
            return note
        packed = self._ghosts.get(mark)
        return None if packed is None else _NOTE.unpack(packed)

    def pop_all(self, marks: Sequence[int]) -> list[Note | None]:
        """Remove and return the notes of chunks; None for each chunk that is not remembered."""
        newcomers = self._newcomers
        notes: list[Note | None] = [newcomers.pop(mark, None) for mark in marks]
        if None in notes:
            others = [at for at, note in enumerate(notes) if note is None]
            for at, packed in zip(others, self._ghosts.pop_all([marks[at] for at in others]), strict=True):
                if packed is not None:
                    notes[at] = _NOTE.unpack(packed)
        return notes

    def add_newcomer(self, mark: int, note: Note) -> None:
        """Remember a requested chunk that is not remembered yet."""
        self._newcomers[mark] = note

    def add_newcomers(self, marks: Sequence[int], run: int, parent: int) -> None:
        """Remember chunks requested for the first time, in path order. ``parent`` is the parent of the first."""
        self._newcomers.update(zip(marks, zip(repeat(1), repeat(run), chain((parent,), marks)), strict=False))

    def bound_newcomers(self) -> None:
        """Count the oldest new chunks as refused where there are too many. To be called after new chunks were added."""
        newcomers = self._newcomers
        if (over := len(newcomers) - NEWCOMERS_MAX) > 0:
            oldest = [newcomers.popitem(last=False) for _ in range(over)]
            self.add_evicted([mark for mark, _ in oldest], [note for _, note in oldest])

    def add_evicted(self, marks: Sequence[int], notes: Sequence[Note]) -> None:
        """Remember evicted chunks, the last one as the newest."""
        pack = _NOTE.pack
        self._ghosts.extend_each(marks, [pack(*note) for note in notes])
