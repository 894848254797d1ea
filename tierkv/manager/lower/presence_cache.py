"""Cache of a tier's answers about the presence of chunks, each kept for a while."""

from __future__ import annotations

import math
from array import array

from tierkv.structures.fifo_index import FifoIndex
from tierkv.types.keys import Key

EXPIRED_KEPT_S = 60.0
"""Seconds for which an answer is kept at least, for lookups that were open when it was given."""

EXPIRED_PER_STEP_MAX = 64
"""Expired answers discarded per step."""

DOUBTS_MAX = 1024
"""Doubts that are remembered, the latest ones: the return of a tier ends them in one step."""

FIRST_DOUBT_S = 0.5
"""Seconds for which a chunk counts as absent after one failed read. A single fault costs few hits."""


class PresenceCache:
    """Key -> (present, expiry). Sans-IO; O(1) per call.

    Each step begins with at most ``keys_max`` answers: the oldest ones are discarded first. The answers of one step
    come on top of them. So a lookup that needs more answers than the cache keeps sees each of them once, and never asks
    for the same chunks for ever.
    """

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._order = FifoIndex()
        self._until = array("d")
        self._answered = array("d")
        self._present = bytearray()
        self._doubted: dict[Key, float] = {}  # time of the latest doubt
        self.any = False
        """Whether there are answers, expired or not. While False, callers skip the lookup."""

    def __len__(self) -> int:
        """Number of answers kept, expired or not."""
        return len(self._order)

    def get(self, key: Key, now: float, since: float = math.inf) -> bool | None:
        """Whether the chunk is present; None without an answer that has not expired, or that was given ``since``."""
        row = self._order.find(key)
        if row is None or (now >= self._until[row] and self._answered[row] < since):
            return None
        return bool(self._present[row])

    def answered_s(self, key: Key) -> float:
        """Time at which the tier answered about the chunk; minus infinity if no answer is kept."""
        row = self._order.find(key)
        return -math.inf if row is None else self._answered[row]

    def put(self, key: Key, until: float, *, present: bool, answered: float = -math.inf) -> None:
        """Keep an answer until a time in seconds on the stack's clock. answered: time at which the tier gave it."""
        self.any = True
        row = self._order.put(key)
        if row >= len(self._until):
            more = self._order.length - len(self._until)
            self._until.extend([0.0] * more)
            self._answered.extend([0.0] * more)
            self._present.extend(bytes(more))
        self._until[row] = until
        self._answered[row] = answered
        self._present[row] = present

    def doubt(self, key: Key, now: float, ttl_s: float, *, briefly: bool = False) -> None:
        """Count a chunk as absent for ``ttl_s``, or until :meth:`end_doubts`, because a read of it failed.

        briefly: for :data:`FIRST_DOUBT_S` if that was the first failure within a minute.
        """
        is_first = now >= self._doubted.pop(key, -math.inf) + EXPIRED_KEPT_S
        self.put(key, now + (min(FIRST_DOUBT_S, ttl_s) if briefly and is_first else ttl_s), present=False)
        if len(self._doubted) == DOUBTS_MAX:
            del self._doubted[next(iter(self._doubted))]
        self._doubted[key] = now

    def end_doubts(self) -> None:
        """Ask again about chunks that are doubted, and were not answered for since."""
        for key in self._doubted:
            row = self._order.find(key)
            if row is not None and not self._present[row] and self._answered[row] == -math.inf:
                self.forget(key)
        self._doubted.clear()

    def forget(self, key: Key) -> None:
        """Discard the answer about a chunk."""
        self._order.discard(key)
        self.any = len(self._order) > 0

    def expire(self, now: float) -> None:
        """Discard answers over the bound, and some of the oldest ones, if they have expired. Called once per step."""
        while len(self._order) > self._keys_max:
            self._order.pop()
        for _ in range(min(len(self._order), EXPIRED_PER_STEP_MAX)):
            row = self._order.oldest
            if now < self._until[row] or now < self._answered[row] + EXPIRED_KEPT_S:
                break
            self._order.pop()
        self.any = len(self._order) > 0
