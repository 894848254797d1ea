"""Questions of an engine that asks chunk by chunk, one run per group."""

from __future__ import annotations

from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult

_MISS, _RETRY = LookupResult.MISS, LookupResult.RETRY


class Run:
    """Questions about one group, since the engine last began there.

    An engine may go over a group several times for one answer, each time up to an earlier end: the last pass counts. A
    group with a window, or with states, is asked from its end: chunks in front of a gap are not wanted there.
    """

    __slots__ = ("_deferred", "_unknown", "asked", "backwards", "first_end", "last_end", "wanted")

    def __init__(self, end_token: int) -> None:
        self.asked: set[Key] = set()
        self.wanted: dict[Key, int] = {}
        self.first_end = self.last_end = end_token
        self.backwards = False
        self._deferred = False
        self._unknown = 0  # number of wanted chunks whose presence is unknown

    def note_question(self, key: Key, end_token: int, chunks_max: int) -> bool:
        """Note the question, and the direction in which the engine goes. Returns whether the chunk may be wanted.

        No more than ``chunks_max`` may be. Backwards, a chunk whose presence is unknown does not count. A state can be
        far from the end, and tiers must be asked about all of its possible places at once.
        """
        self.asked.add(key)
        self.backwards = end_token < self.last_end
        self.last_end = end_token
        return len(self.wanted) - (self._unknown if self.backwards else 0) < chunks_max

    def note_answer(self, key: Key, end_token: int, answer: LookupResult) -> None:
        """Note the answer to the latest question."""
        if answer is _RETRY:
            self._deferred = True
            self._unknown += 1
        if answer is not _MISS:
            self.wanted[key] = end_token
        elif self.backwards:
            self.wanted.clear()
            self._unknown = 0

    @property
    def awaits_tier(self) -> bool:
        """Whether the engine defers because of an unknown chunk nearer to the end, though a later gap cut it off."""
        return self._deferred and self.backwards
