"""Which chunks were seen before, under a bound: the memory of an edge that writes on reuse."""

from __future__ import annotations

from tierkv.structures.key_table import column
from tierkv.types.keys import GROUP_BYTES, Key

_WAYS = 8
"""Places in which a key may stand. A newcomer takes the first, and the one that came longest ago falls out of the last:
of as many keys as half the bound, hardly one in a hundred is forgotten early."""

_MARK_BYTES = 8
_MARK_MASK = (1 << 8 * _MARK_BYTES) - 1
_SPREAD = 0x9E3779B97F4A7C15
"""Odd and without a pattern: spreads numbers that come one after the other. Hashes need no spreading, but groups do."""


class SeenFilter:
    """A table of marks, 8 bytes per place, with no dict behind it: a million take 8 MB and never stop to be rebuilt.

    A mark is not the key: two keys that share mark and place, one pair in 2**64, count as one. A chunk would then be
    written that was seen once only. Sans-IO, O(1) per call.
    """

    def __init__(self, keys_max: int) -> None:
        self._ways = min(_WAYS, keys_max)
        self._buckets = keys_max // self._ways
        self._marks = column("Q", self._buckets * self._ways)

    def note(self, key: Key) -> bool:
        """Remember a key. Returns whether it was remembered already."""
        tail = int.from_bytes(key[-GROUP_BYTES - _MARK_BYTES :], "big")
        mark = (tail ^ tail >> 8 * _MARK_BYTES) * _SPREAD & _MARK_MASK or 1  # 0 is an empty place
        marks, first = self._marks, (mark * self._buckets >> 8 * _MARK_BYTES) * self._ways
        places = marks[first : first + self._ways].tolist()
        known = mark in places
        last = first + (places.index(mark) if known else self._ways - 1)
        marks[first + 1 : last + 1] = marks[first:last]
        marks[first] = mark
        return known
