"""Estimate of the engine's own cache: the chunks that it most likely still has on the GPU. Sans-IO."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tierkv.structures.key_table import SHARD_BYTE, new_shards
from tierkv.types.keys import Key


class EngineCache:
    """Chunks of the latest requests, up to as many as the engine's blocks can have. O(1) per chunk, amortised.

    The core knows the chunks of every request and the numbers of their blocks, but not what the engine evicts. A list
    by recency, as long as the engine's pool of blocks, is close to it where the engine evicts by recency.

    Args:
        blocks_per_chunk: GPU blocks of one chunk.
        active: whether the engine shares computed blocks. Otherwise the estimate is empty.
    """

    def __init__(self, blocks_per_chunk: int, *, active: bool) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._active = active
        self._latest = new_shards()  # key -> number of its run; one dict of all would rebuild itself in one step
        self._runs: deque[tuple[int, Sequence[Key]]] = deque()
        self._number = 0
        self._chunks = 0
        self.waiting: deque[tuple[int, Sequence[Key], bool]] = deque()
        """Changes that :meth:`advance` has not applied: number of a run, its keys, and whether they are added."""
        self._position = 0  # in the first of these

    def add(self, keys: Sequence[Key], num_blocks: int) -> None:
        """Add the chunks of a request that runs or has ended, as the most recent ones. :meth:`advance` does the work.

        num_blocks: of the engine's pool, as far as known.
        """
        if not self._active or not keys:
            return
        self._number += 1
        run = tuple(keys)
        self._runs.append((self._number, run))
        self.waiting.append((self._number, run, True))
        self._chunks += len(run)
        while self._chunks > num_blocks // self._blocks_per_chunk and len(self._runs) > 1:
            number, gone = self._runs.popleft()
            self._chunks -= len(gone)
            self.waiting.append((number, gone, False))

    def advance(self, keys_max: int) -> int:
        """Apply what was added and what has left, up to ``keys_max`` chunks. Returns the number of chunks."""
        left, latest = keys_max, self._latest
        while self.waiting and left > 0:
            number, keys, is_added = self.waiting[0]
            part = keys[self._position : self._position + left] if self._position or len(keys) > left else keys
            if is_added:
                for key in part:
                    latest[key[SHARD_BYTE]][key] = number
            else:
                for key in part:
                    if key in (shard := latest[key[SHARD_BYTE]]) and shard[key] == number:
                        del shard[key]
            count = len(part)
            left -= count
            if part is keys or self._position + count == len(keys):
                self.waiting.popleft()
                self._position = 0
            else:
                self._position += count
        return keys_max - left

    def prefix(self, keys: Sequence[Key]) -> int:
        """Number of leading ``keys`` that the engine most likely has."""
        latest = self._latest
        for i, key in enumerate(keys):
            if key not in latest[key[SHARD_BYTE]]:
                return i
        return len(keys)
