"""Columns of one lower tier: one row per chunk that is stored, written, read or deleted there.

:class:`~tierkv.manager.lower.residency.Residency` is the only writer of the columns. Everything else reads them through
the methods below.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from tierkv.structures.columns import column, longer, longer_bytes, run_of
from tierkv.structures.key_table import KEY_BYTES_MIN, KeyDirectory, KeyTable
from tierkv.structures.written_order import WrittenColumn
from tierkv.types.keys import Key
from tierkv.types.tier_ops import TierContent

STORED, WRITING, DELETING, EVICTING = 1, 2, 4, 8
"""Flags of a row, in any combination: a frame is at rest in the tier; one is being written; one is being deleted; the
deletion is to make room."""


class RowTable:
    """Columns by row, and the table of keys. Sans-IO; every question is O(1) per key unless it says otherwise.

    The policy knows exactly the rows that are stored and not being deleted: they are *listed*.

    Args:
        directory: shared with other tiers, so that one lookup finds a key in all of them; None: one of its own.
    """

    __slots__ = ("flags", "frame_bytes", "keys", "uses", "written")

    def __init__(self, directory: KeyDirectory | None = None) -> None:
        self.keys = KeyTable(directory)
        """Row of each chunk."""
        self.flags = bytearray()
        """Flags; it grows in place."""
        self.frame_bytes = column("Q", 0)
        """Bytes of the frame at rest."""
        self.uses = column("I", 0)
        """Number of reads and writes under way."""
        self.written = WrittenColumn()
        """Written ranks of the stored chunks."""

    # -- one chunk ---------------------------------------------------------------------------------------------------

    def flags_of(self, key: Key) -> int:
        """Flags of a key; 0 if it has no row."""
        row = self.keys.find(key)
        return 0 if row is None else self.flags[row]

    def has_bytes_of(self, key: Key) -> bool:
        """Whether ``key`` is stored or being written."""
        return bool(self.flags_of(key) & (STORED | WRITING))

    def is_writing(self, key: Key) -> bool:
        """Whether ``key`` is being written."""
        return bool(self.flags_of(key) & WRITING)

    def is_idle(self, key: Key) -> bool:
        """Whether ``key`` is stored, and not being read, written or deleted."""
        row = self.keys.find(key)
        return row is not None and self.is_listed(row) and not self.uses[row]

    def is_at_rest(self, key: Key) -> bool:
        """Whether ``key`` is stored and not being deleted."""
        return self.flags_of(key) & (STORED | DELETING) == STORED

    def is_listed(self, row: int) -> bool:
        """Whether a row is stored and not being deleted."""
        return self.flags[row] & (STORED | DELETING) == STORED

    def frame_bytes_of(self, row: int) -> int:
        """Bytes at rest of the chunk in a row."""
        return self.frame_bytes[row]

    def last_written(self, rows: Sequence[int]) -> int:
        """Written rank of the last of ``rows`` that is stored here with one; 0: there is none."""
        for row in reversed(rows):
            if self.is_listed(row) and (rank := self.written.at(row)):
                return rank
        return 0

    # -- batches -----------------------------------------------------------------------------------------------------

    def without_flags(self, chunks: Sequence[tuple[int, Key]]) -> list[tuple[int, Key]]:
        """Those of ``chunks``, each a slot and its key, that are neither stored nor written nor deleted here."""
        flags = self.flags
        rows = self.keys.find_all([key for _, key in chunks])
        return [chunk for chunk, row in zip(chunks, rows, strict=True) if row is None or not flags[row]]

    def at_rest(self, keys: Sequence[Key]) -> list[int | None]:
        """Row of each key that is stored and not being deleted."""
        flags = self.flags
        rows = self.keys.find_all(keys)
        return [None if row is None or flags[row] & (STORED | DELETING) != STORED else row for row in rows]

    def stored(self) -> Iterator[Key]:
        """The stored chunks. O(rows)."""
        return (key for key, row in self.keys.items() if self.flags[row] & STORED)

    def deleting(self) -> Iterator[Key]:
        """The chunks whose deletion is due or under way. O(rows)."""
        return (key for key, row in self.keys.items() if self.flags[row] & DELETING)

    def listed(self) -> Iterator[tuple[Key, int, bool]]:
        """Each listed chunk with its frame's bytes, and whether a read or write uses it. O(rows)."""
        return (
            (key, self.frame_bytes[row], bool(self.uses[row])) for key, row in self.keys.items() if self.is_listed(row)
        )

    # -- changes -----------------------------------------------------------------------------------------------------

    def row_of(self, key: Key) -> int:
        """Row of a key; a new one if it has none."""
        row = self.keys.find(key)
        if row is not None:
            return row
        row = self.keys.add(key)
        self._lengthen()
        return row

    def rows_of(self, keys: Sequence[Key]) -> list[int]:
        """Rows of many keys; new ones for those that have none. ``keys`` may contain duplicates."""
        rows = self.keys.known(keys)
        return rows if len(rows) == len(keys) else self.add(keys)

    def add(self, keys: Sequence[Key]) -> list[int]:
        """Rows of many keys, as :meth:`rows_of`; in fewer calls where most of them have none."""
        rows = self.keys.numbers(keys)
        self._lengthen()
        return rows

    def add_stored(self, content: TierContent) -> range:
        """Add rows of stored chunks, adjacent.

        Returns:
            The rows; none if some keys had rows already, or a key is too short: the chunks are not stored then.
        """
        keys = content.keys
        if min(map(len, keys)) < KEY_BYTES_MIN:
            return range(0)
        rows = self.keys.add_new(keys)
        if not rows:
            return rows
        self._lengthen()
        self.written.note(rows, content.ranks)
        self.flags[rows.start : rows.stop] = bytes((STORED,)) * len(keys)
        self.frame_bytes[rows.start : rows.stop] = memoryview(content.frame_bytes)
        return rows

    def begin_use(self, rows: Sequence[int], flag: int = 0) -> int:
        """Count one more use of each row, and set a flag. Returns how many listed rows had none before."""
        usual = 0 if flag else STORED  # a new chunk is written, a stored one is read
        if self.shift(rows, (0, 1), (usual, usual | flag)):
            return 0 if flag else len(rows)
        uses, flags, begun = self.uses, self.flags, 0
        for row in rows:
            begun += not uses[row] and flags[row] & (STORED | DELETING) == STORED
            uses[row] += 1
            flags[row] |= flag
        return begun

    def end_use(self, rows: Sequence[int], flag: int = 0) -> list[int]:
        """Count one use less of each row, and clear a flag. Returns the listed rows that have no further use."""
        if self.shift(rows, (1, 0), (STORED | flag, STORED)):
            return [*rows]
        uses, flags, idle = self.uses, self.flags, list[int]()
        for row in rows:
            flags[row] &= ~flag
            uses[row] = left = uses[row] - 1
            if left:
                continue
            if flags[row] & (STORED | DELETING) == STORED:
                idle.append(row)
            else:
                self.discard_unused(row)
        return idle

    def shift(self, rows: Sequence[int], uses: tuple[int, int], flags: tuple[int, int]) -> bool:
        """Change uses and flags of rows that follow one another, up or down, if all have the first of each pair.

        Returns whether it did. Most batches are such rows: then each column is read and written at once.
        """
        run, count = run_of(rows), len(rows)
        if run is None or self.flags[run].count(flags[0]) != count:
            return False
        if self.uses[run].tobytes() != array("I", (uses[0],)).tobytes() * count:
            return False
        self.flags[run] = bytes((flags[1],)) * count
        self.uses[run] = array("I", (uses[1],)) * count
        return True

    def set_frame_bytes(self, rows: Sequence[int], lengths: array[int]) -> None:
        """Set the bytes at rest of rows that follow one another, up or down."""
        run = slice(min(rows[0], rows[-1]), max(rows[0], rows[-1]) + 1)
        self.frame_bytes[run] = memoryview(lengths if rows[0] == run.start else lengths[::-1])

    def _lengthen(self) -> None:
        length = self.keys.length
        if length > len(self.flags):
            longer_bytes(self.flags, length)
            self.frame_bytes, self.uses = longer(self.frame_bytes, length), longer(self.uses, length)

    def discard_unused(self, row: int) -> None:
        """Give up a row without flags and uses."""
        if not self.flags[row] and not self.uses[row]:
            self.keys.discard(row)
