"""Retention that requests ask for in their hints: lifetimes (TTL), and one-shot chunks that are evicted first.

A chunk without such hints costs nothing here. The tiers that a chunk may be written to are decided elsewhere: once,
when it is admitted (see :mod:`tierkv.manager.moves.write_mask`).
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from tierkv.structures.fifo_index import FifoIndex
from tierkv.structures.key_set import KeySet
from tierkv.types.hints import RequestHints
from tierkv.types.keys import Key

LIFETIMES_MAX = 1_000_000
"""Number of chunks whose expiry is remembered. Over it the oldest is forgotten, and stays until it is evicted."""

HELD_SKIPPED_MAX = 8
"""One-shot chunks with holds that one search for a slot passes over."""


class Retention:
    """Lifetimes and one-shot chunks. Sans-IO, single-threaded; every method O(1) per key.

    Args:
        chunks_max: chunks of the host tier, which bounds the number of one-shot chunks.
    """

    def __init__(self, chunks_max: int) -> None:
        self._chunks_max = chunks_max
        self.has_ever_expiring = False
        """Whether any chunk ever had a TTL; for callers that ask per chunk, and often."""
        self.lifetimes = FifoIndex()
        """Chunks with a TTL."""
        self._expiries_s = array("d")
        self._ended = KeySet()  # they have expired, and have no row yet
        self._to_end: deque[Iterator[Key]] = deque()  # they follow, the chunks of a prompt from the front
        self._num_to_end = 0
        self._begun = set[Key]()  # these had none, and have a row now
        self._one_shots = FifoIndex()

    @property
    def any(self) -> bool:
        """Whether any chunk has a TTL or is one-shot."""
        return (self.has_ever_expiring and self.has_lifetimes) or bool(self._one_shots)

    @property
    def has_lifetimes(self) -> bool:
        """Whether any chunk has a TTL. None has one in most stacks, so callers check it before they ask per chunk."""
        return self.has_ever_expiring and bool(self.lifetimes or self._num_to_end or self._ended)

    @property
    def num_ended(self) -> int:
        """Number of chunks of :meth:`end_now` that are not known to be gone from every tier, nor stored again."""
        return self._num_to_end + len(self._ended) + len(self._begun)

    def stored(
        self, keys: Iterable[Key], hints: RequestHints, now: float, source_of: Callable[[Key], object | None]
    ) -> None:
        """Apply the hints of a request to chunks that it stores and that were not in the host tier.

        A chunk that a lower tier has without a TTL keeps having none, and does not become one-shot. source_of: a lower
        tier that has a chunk, or None.
        """
        for key in keys:
            if key in self._ended or key in self.lifetimes or source_of(key) is not None:
                self._used(key, hints, now)
                continue
            if hints.ttl_s is not None:
                self._set_expiry(key, now + hints.ttl_s)
            if hints.one_shot:
                self._one_shots.put(key)
                if len(self._one_shots) > self._chunks_max:
                    self._one_shots.pop()
            else:
                self._one_shots.discard(key)

    def used(self, keys: Iterable[Key], hints: RequestHints, now: float) -> None:
        """Apply the hints of a request that uses existing chunks: the longer lifetime wins, and reuse ends one-shot."""
        if self.any:
            for key in keys:
                self._used(key, hints, now)

    def _used(self, key: Key, hints: RequestHints, now: float) -> None:
        if not hints.one_shot:
            self._one_shots.discard(key)
        if key in self._ended:
            self._ended.discard(key)
            self._begin_end(key)
        row = self.lifetimes.find(key)
        if row is not None:
            self._begun.discard(key)
            if hints.ttl_s is None:
                self.lifetimes.discard(key)
            else:
                self._expiries_s[row] = max(self._expiries_s[row], now + hints.ttl_s)

    def end_now(self, keys: Iterable[Key], count: int, keys_max: int) -> None:
        """Let ``count`` chunks expire, from the front of a prompt, whatever their lifetimes were.

        ``keys_max`` of them expire now, and the others by :meth:`end_more`: no hit begins behind the first ones. Of a
        million, the tails of prompts are left out. :meth:`begin_ends` does the rest.
        """
        self.has_ever_expiring = True
        left = iter(keys)
        kept = max(0, min(count, LIFETIMES_MAX - len(self._ended) - self._num_to_end))
        self._ended.update(islice(left, min(kept, keys_max)))
        if kept > keys_max:
            self._to_end.append(islice(left, kept - keys_max))
            self._num_to_end += kept - keys_max

    def end_more(self, keys_max: int) -> int:
        """Let up to ``keys_max`` further chunks of :meth:`end_now` expire. Returns how many."""
        if not self._to_end:
            return 0
        keys = [*islice(self._to_end[0], keys_max)]
        if len(keys) < keys_max:
            self._to_end.popleft()
        self._ended.update(keys)
        self._num_to_end -= len(keys)
        return len(keys)

    def begin_ends(self, keys_max: int, remove: Callable[[Key], bool]) -> int:
        """Remove up to ``keys_max`` chunks of :meth:`end_now`. Returns how many. remove: as :meth:`sweep`.

        Those that are not gone yet are checked again by :meth:`sweep`.
        """
        keys = [self._ended.pop() for _ in range(min(keys_max, len(self._ended)))]
        for key in keys:
            if not remove(key):
                self._begin_end(key)
        return len(keys)

    def _begin_end(self, key: Key) -> None:
        self._begun.add(key)
        self._set_expiry(key, -math.inf)

    def _set_expiry(self, key: Key, expiry_s: float) -> None:
        self.has_ever_expiring = True
        row = self.lifetimes.put(key)
        if row >= len(self._expiries_s):
            self._expiries_s.extend([0.0] * (self.lifetimes.length - len(self._expiries_s)))
        self._expiries_s[row] = expiry_s
        if len(self.lifetimes) > LIFETIMES_MAX:
            self._begun.discard(self.lifetimes.pop()[0])

    # -- lifetimes ---------------------------------------------------------------------------------------------------

    def has_ttl(self, key: Key) -> bool:
        """Whether the chunk has a TTL, expired or not."""
        return key in self.lifetimes or key in self._ended

    def is_expired(self, key: Key, now: float) -> bool:
        """Whether the chunk has expired, and counts as absent."""
        if key in self._ended:
            return True
        row = self.lifetimes.find(key)
        return row is not None and now >= self._expiries_s[row]

    def unexpired_prefix(self, keys: Sequence[Key], now: float) -> Sequence[Key]:
        """Leading ``keys`` that have not expired."""
        if self.has_lifetimes:
            expired = next((i for i, key in enumerate(keys) if self.is_expired(key, now)), len(keys))
            return keys[:expired]
        return keys

    def sweep(self, now: float, keys_max: int, remove: Callable[[Key], bool]) -> int:
        """Check up to ``keys_max`` lifetimes, and remove chunks that have expired. Returns how many were checked.

        remove: returns whether the chunk is gone from every tier.
        """
        count = min(len(self.lifetimes), keys_max)
        for _ in range(count):
            key, row = self.lifetimes.pop()
            expiry_s = self._expiries_s[row]
            if now < expiry_s or not remove(key):
                self._set_expiry(key, expiry_s)
            else:
                self._begun.discard(key)
        return count

    # -- one-shot chunks ---------------------------------------------------------------------------------------------

    def take_one_shot(self, is_idle: Callable[[Key], bool | None]) -> Key | None:
        """Take a one-shot chunk whose slot is available; None if a bounded search finds none.

        is_idle: returns False for a chunk with holds, None for one that is gone.
        """
        held: list[Key] = []
        found: Key | None = None
        while self._one_shots and found is None and len(held) < HELD_SKIPPED_MAX:
            key, _ = self._one_shots.pop()
            idle = is_idle(key)
            if idle:
                found = key
            elif idle is False:
                held.append(key)
        for key in held:
            self._one_shots.put(key)
        return found

    def forget_one_shots(self) -> None:
        """Forget all one-shot chunks, after a reset of the host tier."""
        self._one_shots = FifoIndex()
