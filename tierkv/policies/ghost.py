"""Ghosts: memory of evicted chunks, about eight bytes each."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import xxhash

from tierkv.types.keys import Key

MARK_BYTES = 4

BUCKET_GHOSTS = 32
"""Average number of ghosts per bucket, which a search for one ghost scans."""

BUCKETS_MAX = 1 << 16
"""Largest number of buckets, numbered with two bytes. Above two million ghosts, the buckets are larger instead."""

STEPS_MAX = 32
"""Largest number of entries removed from the queue per added ghost. Only holes make it more than one."""

Forgotten = Callable[[Sequence[bytes]], None]

_HOLE = 0x80  # in the last byte of a mark, which has 31 bits


def marks_of(keys: Sequence[Key]) -> list[int]:
    """Mark of each key."""
    digest = xxhash.xxh32_intdigest
    return [digest(key) >> 1 for key in keys]


def mark_of(key: Key) -> int:
    """Digest of a key that a policy remembers: 31 bits.

    With a million ghosts, one key in two thousand has the mark of another key. A policy then finds a wrong ghost, which
    affects its choices but no bytes. A key has the same mark in every process, so a replay is reproducible.
    """
    return xxhash.xxh32_intdigest(key) >> 1


class GhostTable:
    """Queue of marks, first in, first out, each with a note. Marks can be found and removed.

    Marks are in buckets by their value. Each bucket is one ``bytes``, oldest first. A second queue holds the bucket
    numbers in order of age: the oldest mark of all is always the first of its bucket. A mark removed from the middle
    becomes a hole, which is dropped in its turn. So finding, adding and removing are a few calls into C each. Nothing
    is ever rebuilt, and the garbage collector sees one object per bucket.

    A ghost is dropped at the latest when ``2 * ghosts_max`` others were added after it. That bounds the holes.

    Args:
        ghosts_max: largest number of ghosts. The oldest are forgotten when there are more. 0: none.
        note_bytes: length of every note.
        forgotten: called with the notes of ghosts that are forgotten because there are too many.
    """

    __slots__ = ("_buckets", "_count", "_forgotten", "_left", "_turns", "_width", "ghosts_max")

    def __init__(self, ghosts_max: int, note_bytes: int = 0, forgotten: Forgotten | None = None) -> None:
        self.ghosts_max = ghosts_max
        """Largest number of ghosts. May be changed; a smaller one takes effect gradually. The buckets stay the same."""
        self._buckets = [b""] * min(BUCKETS_MAX, max(1, -(-ghosts_max // BUCKET_GHOSTS)))
        self._width = MARK_BYTES + note_bytes
        self._forgotten = forgotten
        self._turns = array("H")  # bucket numbers in order of age; the oldest at _left
        self._left = 0
        self._count = 0

    def __len__(self) -> int:
        """Number of ghosts."""
        return self._count

    def __contains__(self, mark: int) -> bool:
        """Whether a mark is remembered."""
        return self._offset(self._buckets[mark % len(self._buckets)], mark) >= 0

    def get(self, mark: int) -> bytes | None:
        """Note of a mark; None if it is not remembered."""
        bucket = self._buckets[mark % len(self._buckets)]
        at = self._offset(bucket, mark)
        return None if at < 0 else bucket[at + MARK_BYTES : at + self._width]

    def pop_all(self, marks: Sequence[int]) -> list[bytes | None]:
        """Remove marks and return their notes. Fast for batches of which many marks are not remembered."""
        buckets, count, pop = self._buckets, len(self._buckets), self.pop
        return [pop(mark) if mark.to_bytes(MARK_BYTES, "little") in buckets[mark % count] else None for mark in marks]

    def candidates(self, marks: Sequence[int]) -> set[int]:
        """Marks that may be remembered; the others are not. Fast for batches of which few marks are remembered."""
        if not self._count:
            return set()
        buckets = self._buckets
        count = len(buckets)
        return {mark for mark in marks if mark.to_bytes(MARK_BYTES, "little") in buckets[mark % count]}

    def pop(self, mark: int) -> bytes | None:
        """Remove a mark and return its note; None if it is not remembered."""
        number = mark % len(self._buckets)
        bucket = self._buckets[number]
        at = self._offset(bucket, mark)
        if at < 0:
            return None
        last = at + MARK_BYTES - 1
        self._buckets[number] = b"%b%c%b" % (bucket[:last], bucket[last] | _HOLE, bucket[last + 1 :])
        self._count -= 1
        return bucket[last + 1 : at + self._width]

    def extend(self, marks: Sequence[int], note: bytes = b"") -> None:
        """Add marks, the last one as the newest, all with the same note.

        A mark that is added twice is remembered twice; the older one is found first.
        """
        self.extend_each(marks, (note,) * len(marks))

    def extend_each(self, marks: Sequence[int], notes: Sequence[bytes]) -> None:
        """Add marks, the last one as the newest, each with its note."""
        if not self.ghosts_max:
            return
        buckets, turns = self._buckets, self._turns
        count = len(buckets)
        for mark, note in zip(marks, notes, strict=True):
            number = mark % count
            buckets[number] += mark.to_bytes(MARK_BYTES, "little") + note
            turns.append(number)
        self._count += len(marks)
        self._drop(self.ghosts_max, STEPS_MAX * len(marks))

    def drop_oldest(self, count: int = 1) -> None:
        """Forget the oldest marks, up to ``count``; fewer if there are too many holes before them."""
        self._drop(max(0, self._count - count), STEPS_MAX * count)

    def _drop(self, count_max: int, steps: int) -> None:
        """Remove the oldest entries until at most ``count_max`` marks remain, in at most ``steps`` steps."""
        buckets, turns, width, spare = self._buckets, self._turns, self._width, 2 * self.ghosts_max
        left, count, end, notes, forgotten = self._left, self._count, len(turns), list[bytes](), self._forgotten
        while steps and (count > count_max or end - left > spare):
            number = turns[left]
            bucket = buckets[number]
            buckets[number] = bucket[width:]
            if bucket[MARK_BYTES - 1] < _HOLE:
                count -= 1
                if forgotten is not None:
                    notes.append(bucket[MARK_BYTES:width])
            left += 1
            steps -= 1
        if 2 * left > end:
            del turns[:left]
            left = 0
        self._left, self._count = left, count
        if notes and forgotten is not None:
            forgotten(notes)

    def _offset(self, bucket: bytes, mark: int) -> int:
        """Offset of a mark in its bucket; negative if it is not there."""
        wanted, width = mark.to_bytes(MARK_BYTES, "little"), self._width
        at = bucket.find(wanted)
        while at > 0 and at % width:  # the end of one entry and the beginning of the next can look like a mark
            at = bucket.find(wanted, at + 1)
        return at
