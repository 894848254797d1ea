"""Keys in an order, with a row for each: an ordered dict that never stops to rebuild itself."""

from __future__ import annotations

from collections.abc import Iterator

from tierkv.manager.columns import KeyTable
from tierkv.policies.lru import LruPolicy
from tierkv.types.keys import Key


class KeyOrder:
    """First in, first out, unless put again. Columns beside it need ``length`` places. Sans-IO, O(1) per call."""

    __slots__ = ("_holds", "_order", "_rows")

    def __init__(self) -> None:
        self._rows = KeyTable()
        self._order = LruPolicy()
        self._holds = bytearray()  # the order's question, who may not leave: all may

    def __len__(self) -> int:
        """Keys that are here."""
        return len(self._order)

    def __contains__(self, key: Key) -> bool:
        """Whether a key is here."""
        return self._rows.find(key) is not None

    def __iter__(self) -> Iterator[Key]:
        """The keys, in no order."""
        return (key for key, _ in self._rows.items())

    @property
    def length(self) -> int:
        """Every row is below it."""
        return self._rows.length

    def find(self, key: Key) -> int | None:
        """The row of a key."""
        return self._rows.find(key)

    def put(self, key: Key) -> int:
        """Bring a key to the end of the order. Returns its row."""
        row = self._rows.find(key)
        if row is not None:
            self._order.touch((row,))
            return row
        row = self._rows.add(key)
        self._holds.extend(bytes(self._rows.length - len(self._holds)))
        self._order.add((row,), (key,))
        return row

    def discard(self, key: Key) -> None:
        """Forget a key, if it is here."""
        row = self._rows.find(key)
        if row is not None:
            self._order.remove((row,))
            self._rows.discard(row)

    def pop(self) -> tuple[Key, int]:
        """Forget the first key of all, and return it with the row it had.

        Raises:
            ValueError: there is none.
        """
        (row,) = self._order.evict(1, self._holds)
        key = self._rows.key(row)
        self._rows.discard(row)
        return key, row
