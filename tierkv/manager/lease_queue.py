"""A queue of leases on host slots that nothing in it holds."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1
_GAP_MIN = 4096
"""Places at the front that are let pile up before the rest moves down."""


class LeaseQueue:
    """First in, first out. An array of numbers, because the garbage collector walks a deque, which can hold a million.

    It is bounded by whoever fills it.
    """

    def __init__(self) -> None:
        self._leases = array("Q")
        self._head = 0

    def __len__(self) -> int:
        """Leases that wait."""
        return len(self._leases) - self._head

    def extend(self, leases: Iterable[tuple[int, int]]) -> None:
        """Put (slot, generation) pairs behind the others."""
        self._leases.extend([generation << _SLOT_BITS | slot for slot, generation in leases])

    def front(self) -> tuple[int, int]:
        """Slot and generation of the one that has waited longest."""
        lease = self._leases[self._head]
        return lease & _SLOT_MASK, lease >> _SLOT_BITS

    def drop_front(self, count: int = 1) -> None:
        """Forget those that have waited longest."""
        self._head += count
        if self._head >= _GAP_MIN and 2 * self._head >= len(self._leases):
            del self._leases[: self._head]
            self._head = 0
