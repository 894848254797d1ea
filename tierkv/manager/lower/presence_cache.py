"""Cache of a tier's answers about the presence of chunks, each kept for a while."""

from __future__ import annotations

from array import array

from tierkv.structures.fifo_index import FifoIndex
from tierkv.types.keys import Key


class PresenceCache:
    """Key -> (present, expiry), under a bound: the oldest answer is discarded first. Sans-IO; O(1) per call."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._order = FifoIndex()
        self._until = array("d")
        self._present = bytearray()
        self.any = False
        """Whether there ever was an answer. While False, callers skip the lookup."""

    def __len__(self) -> int:
        """Number of answers kept, expired or not."""
        return len(self._order)

    def get(self, key: Key, now: float) -> bool | None:
        """Whether the chunk is present; None without an answer that has not expired."""
        row = self._order.find(key)
        if row is None:
            return None
        if now >= self._until[row]:
            self._order.discard(key)
            return None
        return bool(self._present[row])

    def put(self, key: Key, until: float, *, present: bool) -> None:
        """Keep an answer until a time in seconds on the stack's clock."""
        self.any = True
        row = self._order.put(key)
        if row >= len(self._until):
            more = self._order.length - len(self._until)
            self._until.extend([0.0] * more)
            self._present.extend(bytes(more))
        self._until[row] = until
        self._present[row] = present
        if len(self._order) > self._keys_max:
            self._order.pop()

    def forget(self, key: Key) -> None:
        """Discard the answer about a chunk."""
        self._order.discard(key)
