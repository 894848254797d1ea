"""Set of keys that grows and shrinks without pauses to rebuild itself."""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.structures.key_table import SHARD_BYTE
from tierkv.types.keys import Key


class KeySet:
    """Keys in 256 dicts, one for each value of the shard byte. O(1) per key."""

    __slots__ = ("_popped", "_shards")

    def __init__(self) -> None:
        self._shards: list[dict[Key, None]] = [{} for _ in range(256)]
        self._popped = 0  # shard of the key that was popped last

    def __len__(self) -> int:
        """Number of keys."""
        return sum(map(len, self._shards))

    def __contains__(self, key: Key) -> bool:
        """Whether the set has a key."""
        return key in self._shards[key[SHARD_BYTE]]

    def update(self, keys: Iterable[Key]) -> None:
        """Add keys, without a call for each."""
        shards = self._shards
        for key in keys:
            shards[key[SHARD_BYTE]][key] = None

    def discard(self, key: Key) -> None:
        """Remove a key, if it is there."""
        self._shards[key[SHARD_BYTE]].pop(key, None)

    def pop(self) -> Key:
        """Remove any key, and return it.

        Raises:
            KeyError: the set is empty.
        """
        shards, at = self._shards, self._popped
        if not shards[at]:
            at = self._popped = next((i for i, shard in enumerate(shards) if shard), at)
        return shards[at].popitem()[0]
