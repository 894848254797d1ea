"""What an engine that asks chunk by chunk has asked about in one step: runs of whole chunks, and tails."""

from __future__ import annotations

from collections.abc import Iterator

from tierkv.types.engine import GroupKind
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult

_HIT, _MISS, _RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


def has_tails(geometry: Geometry) -> bool:
    """Whether an engine of this shape may keep states inside a block, and so ask for chunks that end there."""
    return geometry.blocks_per_chunk == 1 and any(
        group.kind is GroupKind.SSM and group.hashes_per_chunk > 1 for group in geometry.groups
    )


class Run:
    """What was asked of one group since the engine last began there.

    An engine may go over a group several times in one answer, each time up to an earlier end: the last time counts.
    A group with a window, or with states, is asked from its end: what a gap cuts off there is not wanted.
    """

    __slots__ = ("_owed", "_unknown", "asked", "backwards", "first_end", "last_end", "wanted")

    def __init__(self, end_token: int) -> None:
        self.asked: set[Key] = set()
        self.wanted: dict[Key, int] = {}
        self.first_end = self.last_end = end_token
        self.backwards = False
        self._owed = False
        self._unknown = 0  # of those in ``wanted``

    def ask(self, key: Key, end_token: int) -> None:
        """Note in which direction the engine goes."""
        self.asked.add(key)
        self.backwards = end_token < self.last_end
        self.last_end = end_token

    def is_full(self, chunks_max: int) -> bool:
        """Whether as many chunks are wanted as may be.

        Going backwards, one that a tier was only asked about does not count: a state can be far from the end, and
        tiers shall be asked about all places where it may be in one go, as the engine means it.
        """
        return len(self.wanted) - (self._unknown if self.backwards else 0) >= chunks_max

    def heard(self, key: Key, end_token: int, answer: LookupResult) -> None:
        """The answer about the last chunk that was asked about."""
        if answer is _RETRY:
            self._owed = True
            self._unknown += 1
        if answer is not _MISS:
            self.wanted[key] = end_token
        elif self.backwards:
            self.wanted.clear()
            self._unknown = 0

    @property
    def owes(self) -> bool:
        """Whether the engine defers because of a chunk nearer to the end, though a gap has cut it off since."""
        return self._owed and self.backwards


class Tails:
    """Chunks that end inside a block: a state that was kept there, and what attention has up to that token.

    The engine asks about one end after the other, the largest first, and at each about every group until one misses.
    A hit takes the chunks of one end, of all groups, and lies behind all whole chunks.
    """

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        self._ends: dict[int, dict[Key, LookupResult] | None] = {}  # None: some group lacks it

    def heard(self, key: Key, end_token: int, answer: LookupResult) -> None:
        """The answer about one group's chunk."""
        chunks = self._ends.setdefault(end_token, {})
        if answer is _MISS:
            self._ends[end_token] = None
        elif chunks is not None:
            chunks[key] = answer

    def clear(self) -> None:
        """Nothing was asked."""
        self._ends.clear()

    def ends(self) -> dict[Key, int]:
        """Where each chunk ends that some end needs."""
        return {key: end for end, chunks in self._there() for key in chunks}

    def wanted(self, *, ready: bool) -> dict[Key, int]:
        """The chunks of the largest end that every group has, with that end. ready: that can be loaded now."""
        for end, chunks in self._there():
            if not ready or set(chunks.values()) == {_HIT}:
                return dict.fromkeys(chunks, end)
        return {}

    def _there(self) -> Iterator[tuple[int, dict[Key, LookupResult]]]:
        for end in sorted(self._ends, reverse=True):
            if chunks := self._ends[end]:
                yield end, chunks
