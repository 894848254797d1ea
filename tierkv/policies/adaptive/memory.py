"""What is remembered of chunks that are not in the tier: those that left, were refused, or are about to come."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable

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
        lost: called with the run of each chunk that is forgotten.
    """

    def __init__(self, chunks_max: int, lost: Callable[[int], None]) -> None:
        ghosts_max = min(max(GHOSTS_PER_CHUNK * chunks_max, GHOSTS_MIN), GHOSTS_MAX)
        self._ghosts = GhostTable(ghosts_max, _NOTE.size, lambda note: lost(_NOTE.unpack(note)[1]))
        self._newcomers: OrderedDict[int, Note] = OrderedDict()

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._ghosts) + len(self._newcomers)

    def get(self, mark: int) -> Note | None:
        """The note of a chunk."""
        if (note := self._newcomers.get(mark)) is not None:
            return note
        packed = self._ghosts.get(mark)
        return None if packed is None else _NOTE.unpack(packed)

    def pop(self, mark: int) -> Note | None:
        """The note of a chunk, which is forgotten."""
        if (note := self._newcomers.pop(mark, None)) is not None:
            return note
        packed = self._ghosts.pop(mark)
        return None if packed is None else _NOTE.unpack(packed)

    def expect(self, mark: int, note: Note) -> None:
        """A chunk that is not remembered was asked for."""
        self._newcomers[mark] = note
        if len(self._newcomers) > NEWCOMERS_MAX:
            oldest, its_note = self._newcomers.popitem(last=False)
            self.left(oldest, its_note)

    def left(self, mark: int, note: Note) -> None:
        """A chunk left the tier."""
        self._ghosts.push(mark, _NOTE.pack(*note))
