"""Filter of recently seen keys, under a bound; for tiers that write on reuse."""

from __future__ import annotations

from tierkv.structures.columns import column
from tierkv.types.keys import GROUP_BYTES, Key

_WAYS = 8
"""Places per bucket. A new key takes the first place, and the oldest key of the bucket is forgotten. With half as many
keys as the bound, less than one in a hundred is forgotten early."""

_MARK_BYTES = 8
_MARK_MASK = (1 << 8 * _MARK_BYTES) - 1
_SPREAD = 0x9E3779B97F4A7C15
"""Odd multiplier that spreads consecutive numbers. Hashes need no spreading, but group indices do."""


class SeenFilter:
    """Table of marks, 8 bytes per place: a million take 8 MB, and no dict has to be rebuilt. O(1) per call.

    A mark is a hash of the key. Two keys with the same mark, one pair in 2**64, count as one; then a chunk is written
    at its first use.
    """

    def __init__(self, keys_max: int) -> None:
        self._ways = min(_WAYS, keys_max)
        self._buckets = keys_max // self._ways
        self._marks = column("Q", self._buckets * self._ways)

    def note(self, key: Key) -> bool:
        """Add a key. Returns whether it was in the filter already."""
        tail = int.from_bytes(key[-GROUP_BYTES - _MARK_BYTES :], "big")
        mark = (tail ^ tail >> 8 * _MARK_BYTES) * _SPREAD & _MARK_MASK or 1  # 0 is an empty place
        marks, first = self._marks, (mark * self._buckets >> 8 * _MARK_BYTES) * self._ways
        places = marks[first : first + self._ways].tolist()
        known = mark in places
        last = first + (places.index(mark) if known else self._ways - 1)
        marks[first + 1 : last + 1] = marks[first:last]
        marks[first] = mark
        return known
