"""Ghosts: what a policy remembers of chunks that have left, some eight bytes each."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import xxhash

from tierkv.types.keys import Key

MARK_BYTES = 4

BUCKET_GHOSTS = 32
"""Ghosts per bucket on average: so many are searched for one."""

BUCKETS_MAX = 1 << 16
"""As many as two bytes can number. Above two million ghosts buckets get larger instead."""

STEPS_MAX = 32
"""Entries that leave the queue for one that comes; only holes can make it so many."""

Forgotten = Callable[[Sequence[bytes]], None]

_HOLE = 0x80  # in the last byte of a mark, which has 31 bits


def marks_of(keys: Sequence[Key]) -> list[int]:
    """:func:`mark_of` of each."""
    digest = xxhash.xxh32_intdigest
    return [digest(key) >> 1 for key in keys]


def mark_of(key: Key) -> int:
    """What a policy keeps of a key: 31 bits.

    With a million ghosts, one key in two thousand finds another key's; a policy takes it for a ghost of its own, which
    costs nobody a byte. Same key, same mark, in every process: a replay gives the same figures again.
    """
    return xxhash.xxh32_intdigest(key) >> 1


class GhostTable:
    """A queue of marks, first in, first out, each with a note; it can tell whether it holds a mark, and let it go.

    Marks lie in buckets by their value, each bucket one ``bytes``, the oldest first. A second queue says from which
    bucket the oldest of all leaves: that is always the first of its bucket. What is taken from the middle leaves a hole
    that goes when its turn comes. So to find, to add and to let go are a few calls into C each, nothing is ever
    rebuilt, and the garbage collector sees one object per bucket.

    No ghost stays longer than twice as many others came as may be here, which bounds the holes.

    Args:
        ghosts_max: how many are remembered; when there are more, the oldest leave. 0: none.
        note_bytes: length of every note.
        forgotten: called with the notes of ghosts that leave because there are too many.
    """

    __slots__ = ("_buckets", "_count", "_forgotten", "_left", "_turns", "_width", "ghosts_max")

    def __init__(self, ghosts_max: int, note_bytes: int = 0, forgotten: Forgotten | None = None) -> None:
        self.ghosts_max = ghosts_max
        """May be changed; a smaller one takes effect little by little. The number of buckets stays what it was."""
        self._buckets = [b""] * min(BUCKETS_MAX, max(1, -(-ghosts_max // BUCKET_GHOSTS)))
        self._width = MARK_BYTES + note_bytes
        self._forgotten = forgotten
        self._turns = array("H")  # numbers of buckets, the first to leave at _left
        self._left = 0
        self._count = 0

    def __len__(self) -> int:
        """How many ghosts are remembered."""
        return self._count

    def __contains__(self, mark: int) -> bool:
        """Whether a mark is here."""
        return self._place(self._buckets[mark % len(self._buckets)], mark) >= 0

    def get(self, mark: int) -> bytes | None:
        """The note of a mark; None if it is not here."""
        bucket = self._buckets[mark % len(self._buckets)]
        at = self._place(bucket, mark)
        return None if at < 0 else bucket[at + MARK_BYTES : at + self._width]

    def pop_all(self, marks: Sequence[int]) -> list[bytes | None]:
        """:meth:`pop` of each. For batches of which many are not here."""
        buckets, count, pop = self._buckets, len(self._buckets), self.pop
        return [pop(mark) if mark.to_bytes(MARK_BYTES, "little") in buckets[mark % count] else None for mark in marks]

    def perhaps(self, marks: Sequence[int]) -> set[int]:
        """Those of ``marks`` that may be here; the others are not. For batches of which nearly none is."""
        buckets = self._buckets
        count = len(buckets)
        return {mark for mark in marks if mark.to_bytes(MARK_BYTES, "little") in buckets[mark % count]}

    def pop(self, mark: int) -> bytes | None:
        """Forget a mark and return its note; None if it is not here."""
        number = mark % len(self._buckets)
        bucket = self._buckets[number]
        at = self._place(bucket, mark)
        if at < 0:
            return None
        last = at + MARK_BYTES - 1
        self._buckets[number] = b"%b%c%b" % (bucket[:last], bucket[last] | _HOLE, bucket[last + 1 :])
        self._count -= 1
        return bucket[last + 1 : at + self._width]

    def push(self, mark: int, note: bytes = b"") -> None:
        """Remember a mark, as the newest. One that is here already is here twice then, and the older is found first."""
        self.extend((mark,), note)

    def extend(self, marks: Sequence[int], note: bytes = b"") -> None:
        """Remember marks, the last one as the newest, each with the same note."""
        self.extend_each(marks, (note,) * len(marks))

    def extend_each(self, marks: Sequence[int], notes: Sequence[bytes]) -> None:
        """Remember marks, the last one as the newest, each with a note of its own."""
        if not self.ghosts_max:
            return
        buckets, turns = self._buckets, self._turns
        count = len(buckets)
        for mark, note in zip(marks, notes, strict=True):
            number = mark % count
            buckets[number] += mark.to_bytes(MARK_BYTES, "little") + note
            turns.append(number)
        self._count += len(marks)
        self._shed(self.ghosts_max, STEPS_MAX * len(marks))

    def drop_oldest(self, count: int = 1) -> None:
        """Forget the oldest marks; fewer, if there are too many holes before them."""
        self._shed(max(0, self._count - count), STEPS_MAX * count)

    def _shed(self, count_max: int, steps: int) -> None:
        """The first entries of the queue leave, marks and holes, until no more marks are left than this."""
        buckets, turns, width, spare = self._buckets, self._turns, self._width, 2 * self.ghosts_max
        left, count, end, notes = self._left, self._count, len(turns), list[bytes]()
        while steps and (count > count_max or end - left > spare):
            number = turns[left]
            bucket = buckets[number]
            buckets[number] = bucket[width:]
            if bucket[MARK_BYTES - 1] < _HOLE:
                count -= 1
                notes.append(bucket[MARK_BYTES:width])
            left += 1
            steps -= 1
        if 2 * left > end:
            del turns[:left]
            left = 0
        self._left, self._count = left, count
        if notes and self._forgotten is not None:
            self._forgotten(notes)

    def _place(self, bucket: bytes, mark: int) -> int:
        """Where in its bucket a mark begins; negative if it is not there."""
        wanted, width = mark.to_bytes(MARK_BYTES, "little"), self._width
        at = bucket.find(wanted)
        while at > 0 and at % width:  # the end of one entry and the beginning of the next can look like a mark
            at = bucket.find(wanted, at + 1)
        return at
