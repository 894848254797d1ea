"""Queue of leases on host slots. The queue does not hold the slots."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from tierkv.structures.columns import column

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1
_PAGE_SLOTS = 4096
_GAP_MIN = 4096
"""Unused entries at the front that are kept before the rest moves down."""


class LeaseQueue:
    """First in, first out. An array of numbers, because a garbage collection walks a deque, which may have a million.

    Leases at the front can be taken *aside*: they stay the first of the queue, but leases behind them can be dropped
    without them. The caller bounds the length.

    Args:
        unique: whether a lease is accepted only once until it is dropped; for chunks that are queued repeatedly.
    """

    def __init__(self, *, unique: bool = False) -> None:
        self._aside = _Leases()
        self._behind = _Leases()
        # Of a unique queue: by slot, in pages, the generation that was accepted last; 0: accept again.
        self._put: dict[int, memoryview[int]] = {}
        self._unique = unique

    def __len__(self) -> int:
        """Number of leases."""
        return self._aside.count + self._behind.count

    def __bool__(self) -> bool:
        """Whether there is a lease."""
        return bool(self._behind.count or self._aside.count)

    def extend(self, leases: Iterable[tuple[int, int]]) -> None:
        """Append (slot, generation) pairs."""
        if self._unique:
            leases = [lease for lease in leases if self._is_new(*lease)]
        self._behind.extend(_numbers(leases))

    def _is_new(self, slot: int, generation: int) -> bool:
        number, place = divmod(slot, _PAGE_SLOTS)
        page = self._put.get(number)
        if page is None:
            page = self._put[number] = column("I", _PAGE_SLOTS)
        known = page[place] == generation
        page[place] = generation
        return not known

    def front(self) -> tuple[int, int]:
        """Slot and generation of the oldest lease."""
        return (self._aside if self._aside.count else self._behind).front()

    def first(self, count: int) -> list[tuple[int, int]]:
        """Up to ``count`` oldest leases."""
        leases = self._aside.first(count)
        return leases + self._behind.first(count - len(leases))

    def pop_front(self, count: int = 1) -> None:
        """Remove the oldest leases. A unique queue does not accept them again."""
        if not self._aside.count:  # usual, and without a further call
            self._behind.skip(count)
            return
        aside = min(count, self._aside.count)
        self._aside.skip(aside)
        self._behind.skip(count - aside)

    def drop_front(self, count: int = 1) -> None:
        """Drop the oldest leases; a unique queue accepts them again."""
        if self._unique:
            self.forget(self.first(count))
        self.pop_front(count)

    def forget(self, leases: Iterable[tuple[int, int]]) -> None:
        """Accept these leases again, in a unique queue."""
        for slot, generation in leases if self._unique else ():
            number, place = divmod(slot, _PAGE_SLOTS)
            page = self._put.get(number)
            if page is not None and page[place] == generation:
                page[place] = 0

    def drop_unless(self, is_kept: Callable[[int, int], bool]) -> list[tuple[int, int]]:
        """Drop the leases for which ``is_kept`` is false, and return them; a unique queue accepts them again."""
        gone = [lease for lease in self.first(len(self)) if not is_kept(*lease)]
        if gone:
            self.forget(gone)
            for part in (self._aside, self._behind):
                kept = [lease for lease in part.first(part.count) if is_kept(*lease)]
                part.skip(part.count)
                part.extend(_numbers(kept))
        return gone

    # -- aside -------------------------------------------------------------------------------------------------------

    @property
    def num_behind(self) -> int:
        """Number of leases that are not aside."""
        return self._behind.count

    def take_aside(self, count_max: int) -> list[tuple[int, int]]:
        """Take up to ``count_max`` oldest leases aside that are not aside yet. Returns them."""
        leases = self._behind.first(count_max)
        self._aside.extend_from(self._behind, len(leases))
        return leases

    def drop_behind(self, count: int) -> None:
        """Drop the oldest leases that are not aside; a unique queue accepts them again."""
        if self._unique:
            self.forget(self._behind.first(count))
        self._behind.skip(count)

    def rejoin(self) -> None:
        """End the state aside of all leases; they keep their order."""
        self._aside.extend_from(self._behind, self._behind.count)
        self._aside, self._behind = self._behind, self._aside


def _numbers(leases: Iterable[tuple[int, int]]) -> list[int]:
    return [generation << _SLOT_BITS | slot for slot, generation in leases]


class _Leases:
    """Leases, each a slot and a generation in one number. Each step asks for their count, so it is an attribute."""

    __slots__ = ("_head", "_leases", "count")

    def __init__(self) -> None:
        self._leases = array("Q")
        self._head = 0
        self.count = 0

    def extend(self, leases: Sequence[int]) -> None:
        self._leases.extend(leases)
        self.count += len(leases)

    def extend_from(self, other: _Leases, count: int) -> None:
        """Move the first leases of another array to the end of this one."""
        self._leases.extend(other._leases[other._head : other._head + count])
        self.count += count
        other.skip(count)

    def front(self) -> tuple[int, int]:
        lease = self._leases[self._head]
        return lease & _SLOT_MASK, lease >> _SLOT_BITS

    def first(self, count: int) -> list[tuple[int, int]]:
        some = self._leases[self._head : self._head + count]
        return [(lease & _SLOT_MASK, lease >> _SLOT_BITS) for lease in some]

    def skip(self, count: int) -> None:
        """Remove the first leases."""
        self._head += count
        self.count -= count
        if self._head >= _GAP_MIN and 2 * self._head >= len(self._leases):
            del self._leases[: self._head]
            self._head = 0
