"""What a tier has answered about chunks, believed for a while."""

from __future__ import annotations

from array import array

from tierkv.structures.fifo_index import FifoIndex
from tierkv.types.keys import Key


class PresenceCache:
    """Key -> (yes or no, until when), under a bound: the answer given longest ago goes first. Sans-IO."""

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._order = FifoIndex()
        self._until = array("d")
        self._present = bytearray()
        self.any = False
        """Whether there ever was an answer. While not, nobody needs to look."""

    def __len__(self) -> int:
        """Answers that are remembered, believed or not any more."""
        return len(self._order)

    def get(self, key: Key, now: float) -> bool | None:
        """Whether the chunk is there; None if nobody has said so lately."""
        row = self._order.find(key)
        if row is None:
            return None
        if now >= self._until[row]:
            self._order.discard(key)
            return None
        return bool(self._present[row])

    def put(self, key: Key, until: float, *, present: bool) -> None:
        """Believe this until then."""
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
        """Nothing is known of the chunk any more."""
        self._order.discard(key)
