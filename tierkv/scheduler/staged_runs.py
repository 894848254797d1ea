"""What an engine that asks chunk by chunk has asked of one group in one step."""

from __future__ import annotations

from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult

_MISS, _RETRY = LookupResult.MISS, LookupResult.RETRY


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
