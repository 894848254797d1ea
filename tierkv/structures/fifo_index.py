"""Keys in insertion order, each with a row: an ordered dict without pauses to rebuild itself."""

from __future__ import annotations

from collections.abc import Iterator

from tierkv.structures.key_table import KeyTable
from tierkv.structures.rings import Rings
from tierkv.types.keys import Key

_ORDER = 0
"""The only ring: keys from the first put to the last."""


class FifoIndex:
    """First in, first out, unless put again. Columns beside it need ``length`` entries. O(1) per call."""

    __slots__ = ("_count", "_order", "_rows")

    def __init__(self) -> None:
        self._rows = KeyTable()
        self._order = Rings(1, None)
        self._count = 0

    def __len__(self) -> int:
        """Number of keys."""
        return self._count

    def __contains__(self, key: Key) -> bool:
        """Whether the key is in the index."""
        return self._rows.find(key) is not None

    def __iter__(self) -> Iterator[Key]:
        """Iterate over the keys, in no order."""
        return (key for key, _ in self._rows.items())

    @property
    def length(self) -> int:
        """Upper bound of all rows."""
        return self._rows.length

    @property
    def oldest(self) -> int:
        """Row of the first key; negative if there is none."""
        return self._order.oldest(_ORDER)

    def find(self, key: Key) -> int | None:
        """Row of a key; None if it is not in the index."""
        return self._rows.find(key)

    def put(self, key: Key) -> int:
        """Move a key to the end of the order. Returns its row."""
        row = self._rows.find(key)
        if row is not None:
            self._order.move(_ORDER, (row,))
            return row
        row = self._rows.add(key)
        self._order.make_room((row,))
        self._order.insert((row,), ~_ORDER)
        self._count += 1
        return row

    def discard(self, key: Key) -> None:
        """Remove a key, if it is there."""
        row = self._rows.find(key)
        if row is not None:
            self._remove(row)

    def pop(self) -> tuple[Key, int]:
        """Remove the first key. Returns it with the row it had.

        Raises:
            ValueError: the index is empty.
        """
        row = self._order.oldest(_ORDER)
        if row < 0:
            raise ValueError("the index is empty")
        key = self._rows.key(row)
        self._remove(row)
        return key, row

    def _remove(self, row: int) -> None:
        self._order.unlink((row,))
        self._rows.discard(row)
        self._count -= 1
