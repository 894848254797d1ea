"""Estimate of the engine's own cache: the chunks that it most likely still has on the GPU. Sans-IO."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tierkv.types.keys import Key

PARTS_MIN = 16
"""Parts that a full estimate has at least: the oldest one leaves as a whole."""

PART_KEYS_MAX = 8192
"""Chunks per part at most. A larger set would move all of its keys in one call when it grows, for milliseconds."""


class EngineCache:
    """Chunks of the latest requests, as many as the engine's blocks can have. O(1) per chunk, amortised.

    The core knows the chunks of every request and the numbers of their blocks, but not what the engine evicts. A list
    by recency, as long as the engine's pool of blocks, is close to it where the engine evicts by recency. The tail of a
    prompt counts as older than its head, since engines evict it first.

    Args:
        blocks_per_chunk: GPU blocks of one chunk.
        active: whether the engine shares computed blocks. Otherwise the estimate is empty.
    """

    def __init__(self, blocks_per_chunk: int, *, active: bool) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._active = active
        self._capacity = 0
        self._parts: deque[set[Key]] = deque([set()])  # the oldest first
        self._sizes = deque([0])  # chunks that were added to each part, also those that it had
        self._size = 0  # of all parts
        self.waiting: deque[Sequence[Key]] = deque()
        """Chunks of requests that :meth:`advance` has not added, the tail of each first."""
        self._position = 0  # in the first of these

    def add(self, keys: Sequence[Key], num_blocks: int) -> None:
        """Add the chunks of a request that runs or has ended, as the most recent ones. :meth:`advance` does the work.

        num_blocks: of the engine's pool, as far as known. It has room for any single request, whatever is known.
        """
        if self._active and keys:
            self._capacity = max(self._capacity, num_blocks // self._blocks_per_chunk, len(keys))
            self.waiting.append(keys[::-1])

    def advance(self, keys_max: int) -> int:
        """Add what waits, up to ``keys_max`` chunks. Returns the number of chunks."""
        left = keys_max
        part_max = min(PART_KEYS_MAX, max(1, self._capacity // PARTS_MIN))
        while self.waiting and left > 0:
            keys, room = self.waiting[0], part_max - self._sizes[-1]
            if room <= 0:
                self._parts.append(set())
                self._sizes.append(0)
                continue
            some = keys[self._position : self._position + min(left, room)]
            self._parts[-1].update(some)
            self._position += len(some)
            self._sizes[-1] += len(some)
            self._size += len(some)
            left -= len(some)
            if self._position == len(keys):
                self.waiting.popleft()
                self._position = 0
            while self._size - self._sizes[0] >= self._capacity and len(self._parts) > 1:
                self._parts.popleft()
                self._size -= self._sizes.popleft()
        return keys_max - left

    def prefix(self, keys: Sequence[Key]) -> int:
        """Number of leading ``keys`` that the engine most likely has."""
        part = self._parts[-1]
        for i, key in enumerate(keys):
            if key not in part:  # most are where the one before them is
                found = next((other for other in self._parts if key in other), None)
                if found is None:
                    return i
                part = found
        return len(keys)
