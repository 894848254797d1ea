"""A queue of leases on host slots that nothing in it holds."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from tierkv.manager.columns import column

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1
_PAGE_SLOTS = 4096
_GAP_MIN = 4096
"""Places at the front that are let pile up before the rest moves down."""


class LeaseQueue:
    """First in, first out. An array of numbers, because the garbage collector walks a deque, which can hold a million.

    It is bounded by whoever fills it.

    Args:
        unique: a lease is put in once, unless it is dropped; for queues that chunks come to more than once.
    """

    def __init__(self, *, unique: bool = False) -> None:
        self._leases = array("Q")
        self._head = 0
        self._seen = 0  # the first place that was not given by unseen()
        # Of a unique queue: by slot, in pages, the generation that was put in last; 0: may come again.
        self._put: dict[int, memoryview[int]] = {}
        self._unique = unique

    def __len__(self) -> int:
        """Leases that wait."""
        return len(self._leases) - self._head

    def extend(self, leases: Iterable[tuple[int, int]]) -> None:
        """Put (slot, generation) pairs behind the others."""
        if self._unique:
            leases = [lease for lease in leases if self._is_new(*lease)]
        self._leases.extend([generation << _SLOT_BITS | slot for slot, generation in leases])

    def _is_new(self, slot: int, generation: int) -> bool:
        number, place = divmod(slot, _PAGE_SLOTS)
        page = self._put.get(number)
        if page is None:
            page = self._put[number] = column("I", _PAGE_SLOTS)
        known = page[place] == generation
        page[place] = generation
        return not known

    def front(self) -> tuple[int, int]:
        """Slot and generation of the one that has waited longest."""
        lease = self._leases[self._head]
        return lease & _SLOT_MASK, lease >> _SLOT_BITS

    def unseen(self, count_max: int) -> list[tuple[int, int]]:
        """Of those that this did not give before, the ones that have waited longest."""
        leases = self._leases[self._seen : self._seen + count_max]
        self._seen += len(leases)
        return [(lease & _SLOT_MASK, lease >> _SLOT_BITS) for lease in leases]

    def first(self, count: int) -> list[tuple[int, int]]:
        """Those that have waited longest."""
        return [(lease & _SLOT_MASK, lease >> _SLOT_BITS) for lease in self._leases[self._head : self._head + count]]

    def pop_front(self, count: int = 1) -> None:
        """Those that have waited longest wait no more."""
        self._head += count
        self._seen = max(self._seen, self._head)
        if self._head >= _GAP_MIN and 2 * self._head >= len(self._leases):
            del self._leases[: self._head]
            self._seen -= self._head
            self._head = 0

    def drop_front(self, count: int = 1) -> None:
        """The same, in vain: they may come again."""
        for lease in self.first(count) if self._unique else ():
            self.forget(*lease)
        self.pop_front(count)

    def forget(self, slot: int, generation: int) -> None:
        """A lease may come again."""
        number, place = divmod(slot, _PAGE_SLOTS)
        page = self._put.get(number)
        if page is not None and page[place] == generation:
            page[place] = 0
