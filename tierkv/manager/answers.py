"""What a tier has answered about chunks, believed for a while."""

from __future__ import annotations

from array import array

from tierkv.manager.columns import KeyTable
from tierkv.policies.lru import LruPolicy
from tierkv.types.keys import Key


class Answers:
    """Key -> (yes or no, until when), under a bound: the answer given longest ago goes first. Sans-IO."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._rows = KeyTable()
        self._until = array("d")
        self._present = bytearray()
        self._holds = bytearray()  # the order's question, who may not be forgotten: all may
        self._order = LruPolicy()

    def __len__(self) -> int:
        """Answers that are remembered, believed or not any more."""
        return len(self._order)

    def get(self, key: Key, now: float) -> bool | None:
        """Whether the chunk is there; None if nobody has said so lately."""
        row = self._rows.find(key)
        if row is None:
            return None
        if now >= self._until[row]:
            self._forget(row)
            return None
        return bool(self._present[row])

    def put(self, key: Key, until: float, *, present: bool) -> None:
        """Believe this until then."""
        row = self._rows.find(key)
        if row is None:
            row = self._add(key)
        else:
            self._order.touch((row,))
        self._until[row] = until
        self._present[row] = present

    def forget(self, key: Key) -> None:
        """Nothing is known of the chunk any more."""
        row = self._rows.find(key)
        if row is not None:
            self._forget(row)

    def _forget(self, row: int) -> None:
        self._order.remove((row,))
        self._rows.discard(row)

    def _add(self, key: Key) -> int:
        if len(self) >= self._keys_max:
            for oldest in self._order.evict(1, self._holds):
                self._rows.discard(oldest)
        row = self._rows.add(key)
        if row >= len(self._until):
            more = self._rows.length - len(self._until)
            self._until.extend([0.0] * more)
            self._present.extend(bytes(more))
            self._holds.extend(bytes(more))
        self._order.add((row,), (key,))
        return row
