"""Ghosts: what a policy remembers of chunks that have left, four bytes each."""

from __future__ import annotations

import xxhash

from tierkv.types.keys import Key

MARK_BYTES = 4

BUCKET_GHOSTS = 32
"""Ghosts per bucket on average. More: nearer to one queue for all. Fewer: less to search and to move."""

_EMPTY_BUCKETS_MAX = 32
"""Empty buckets that one look for the oldest passes over."""

_DROPPED_MAX = 32
"""Ghosts that leave for one newcomer, after the bound was made smaller."""


def mark_of(key: Key) -> int:
    """What a policy keeps of a key: 32 bits.

    With a million ghosts, one key in four thousand finds another key's; a policy takes it for a ghost of its own, which
    costs nobody a byte. Same key, same mark, in every process: a replay gives the same figures again.
    """
    return xxhash.xxh32_intdigest(key)


class GhostTable:
    """A queue of marks, each with a note of a fixed length, that can tell whether it holds a mark.

    Marks lie in buckets by their value, the oldest of a bucket first, each bucket one ``bytes``: to find, to append and
    to cut are one call into C each, nothing is ever rebuilt, and the garbage collector sees one object per bucket.

    The oldest mark of a bucket leaves, not the oldest of all: exact up to 32 ghosts, which is one bucket; beyond, a
    bucket holds a fair sample, and a mark's time in the queue varies by about a fifth. A mark may be here only once.

    Args:
        ghosts_max: how many are remembered; when there are more, the oldest leaves. 0: none.
        note_bytes: length of every note.
    """

    __slots__ = ("_buckets", "_count", "_hand", "_width", "ghosts_max")

    def __init__(self, ghosts_max: int, note_bytes: int = 0) -> None:
        self.ghosts_max = ghosts_max
        """May be changed; a smaller one takes effect little by little. The number of buckets stays what it was."""
        self._buckets = [b""] * max(1, -(-ghosts_max // BUCKET_GHOSTS))
        self._width = MARK_BYTES + note_bytes
        self._count = 0
        self._hand = 0

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

    def pop(self, mark: int) -> bytes | None:
        """Forget a mark and return its note; None if it is not here."""
        number = mark % len(self._buckets)
        bucket = self._buckets[number]
        at = self._place(bucket, mark)
        if at < 0:
            return None
        end = at + self._width
        self._buckets[number] = bucket[:at] + bucket[end:]
        self._count -= 1
        return bucket[at + MARK_BYTES : end]

    def push(self, mark: int, note: bytes = b"") -> None:
        """Remember a mark, as the newest; if it is here already it becomes the newest, with this note."""
        if not self.ghosts_max:
            return
        number = mark % len(self._buckets)
        bucket = self._buckets[number]
        at = self._place(bucket, mark)
        if at >= 0:
            bucket = bucket[:at] + bucket[at + self._width :]
            self._count -= 1
        self._buckets[number] = bucket + mark.to_bytes(MARK_BYTES, "little") + note
        self._count += 1
        for _ in range(min(self._count - self.ghosts_max, _DROPPED_MAX)):
            self.drop_oldest(mark)

    def drop_oldest(self, near: int = 0) -> None:
        """Forget the oldest mark of a bucket.

        Of two buckets, that of the mark ``near`` (best: the one that came in just now) and the next one in turn, the
        fuller loses: so all stay about equally full. Where the buckets are nearly all empty, it may find none to forget.
        """
        buckets, number = self._buckets, near % len(self._buckets)
        for _ in range(_EMPTY_BUCKETS_MAX):
            self._hand = (self._hand + 1) % len(buckets)
            if len(buckets[self._hand]) > len(buckets[number]):
                number = self._hand
            if buckets[number]:
                buckets[number] = buckets[number][self._width :]
                self._count -= 1
                return

    def _place(self, bucket: bytes, mark: int) -> int:
        """Where in its bucket a mark begins; negative if it is not there."""
        wanted, width = mark.to_bytes(MARK_BYTES, "little"), self._width
        at = bucket.find(wanted)
        while at > 0 and at % width:  # the end of one entry and the beginning of the next can look like a mark
            at = bucket.find(wanted, at + 1)
        return at
