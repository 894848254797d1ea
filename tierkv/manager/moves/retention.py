"""On what terms chunks are kept whose requests said so: for how long, and whether they leave first.

Chunks without terms cost nothing here: while the books are empty nobody looks into them. Which tiers a chunk may go to
is no part of it: that is decided once, when it becomes readable.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from tierkv.structures.fifo_index import FifoIndex
from tierkv.types.hints import RequestHints
from tierkv.types.keys import Key

LIFETIMES_MAX = 1_000_000
"""Chunks whose end is remembered; over it the oldest is forgotten and stays until it is evicted."""

SWEPT_PER_STEP_MAX = 64
"""Lifetimes looked at per step, so that a step stays short however many end at once."""

HELD_SKIPPED_MAX = 8
"""One-shot chunks that somebody holds, passed over in one search for a slot."""


class Retention:
    """The books. Sans-IO, single-threaded; every verb O(1) per key.

    Args:
        chunks_max: chunks of the host tier: more one-shot chunks than that cannot be there.

    Attributes:
        lifetimes: the chunks that end. Empty in most stacks, so that callers look here before they ask.
        ever_limited: whether there ever was one; for who asks about single chunks, and often.
    """

    def __init__(self, chunks_max: int) -> None:
        self._chunks_max = chunks_max
        self.ever_limited = False
        self.lifetimes = FifoIndex()
        self._ends = array("d")
        self._one_shot = FifoIndex()

    @property
    def any(self) -> bool:
        """Whether there is anything in the books."""
        return bool(self.lifetimes or self._one_shot)

    def stored(self, keys: Iterable[Key], hints: RequestHints, now: float, is_below: Callable[[Key], bool]) -> None:
        """These are being stored and were not in the host tier.

        A chunk that a lower tier has without an end keeps having none, and is nobody's one-shot chunk.
        """
        for key in keys:
            if key in self.lifetimes or is_below(key):
                self._used(key, hints, now)
                continue
            if hints.ttl_s is not None:
                self._limit(key, now + hints.ttl_s)
                if len(self.lifetimes) > LIFETIMES_MAX:
                    self.lifetimes.pop()
            if hints.one_shot:
                self._one_shot.put(key)
                if len(self._one_shot) > self._chunks_max:
                    self._one_shot.pop()
            else:
                self._one_shot.discard(key)

    def used(self, keys: Iterable[Key], hints: RequestHints, now: float) -> None:
        """These are there and somebody wants them."""
        if self.any:
            for key in keys:
                self._used(key, hints, now)

    def _used(self, key: Key, hints: RequestHints, now: float) -> None:
        if not hints.one_shot:
            self._one_shot.discard(key)
        row = self.lifetimes.find(key)
        if row is not None:
            if hints.ttl_s is None:
                self.lifetimes.discard(key)
            else:
                self._ends[row] = max(self._ends[row], now + hints.ttl_s)

    def _limit(self, key: Key, end: float) -> None:
        self.ever_limited = True
        row = self.lifetimes.put(key)
        if row >= len(self._ends):
            self._ends.extend([0.0] * (self.lifetimes.length - len(self._ends)))
        self._ends[row] = end

    # -- ends --------------------------------------------------------------------------------------------------------

    def has_ttl(self, key: Key) -> bool:
        """Whether the chunk has an end, past or to come."""
        return key in self.lifetimes

    def is_expired(self, key: Key, now: float) -> bool:
        """Whether the chunk counts as absent."""
        row = self.lifetimes.find(key)
        return row is not None and now >= self._ends[row]

    def sweep(self, now: float, remove: Callable[[Key], bool]) -> None:
        """Remove some of what has ended. ``remove`` says whether the chunk is gone from everywhere by now."""
        for _ in range(min(len(self.lifetimes), SWEPT_PER_STEP_MAX)):
            key, row = self.lifetimes.pop()
            end = self._ends[row]
            if now < end or not remove(key):
                self._limit(key, end)

    # -- one-shot ----------------------------------------------------------------------------------------------------

    def take_one_shot(self, is_free: Callable[[Key], bool | None]) -> Key | None:
        """A one-shot chunk whose slot can be had. ``is_free`` says no for a held chunk, None for one that is gone."""
        held: list[Key] = []
        found: Key | None = None
        while self._one_shot and found is None and len(held) < HELD_SKIPPED_MAX:
            key, _ = self._one_shot.pop()
            free = is_free(key)
            if free:
                found = key
            elif free is False:
                held.append(key)
        for key in held:
            self._one_shot.put(key)
        return found

    def forget_one_shots(self) -> None:
        """The host tier was emptied."""
        self._one_shot = FifoIndex()
