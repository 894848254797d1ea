"""Several orders of handles in two columns: what the policies that are more than recency are made of."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

PASSED_OVER_MAX = 8192
"""Held handles that one choice passes over before it gives up for now: half a millisecond's work."""

_GROWTH_HANDLES_MIN = 4096


def longer_bytes(column: bytearray, length: int) -> None:
    """Have room for handles below ``length``, with zeros."""
    column.extend(bytes(max(0, length - len(column))))


class Rings:
    """Rings of handles, each from oldest to newest; a handle is in one of them, or in none.

    A ring's ends meet in its fixed point, which is a negative index, counted from the columns' ends: ring 0 has -1,
    ring 1 has -2 (``~ring``). So a step to an index below zero is the end of a ring, and growing moves no handle.
    A handle that is in no ring for a while is *aside*: linked to itself.

    ``next`` and ``previous`` are for hot loops that do themselves what the methods do.

    Args:
        rings: how many.
        handles_max: handles are expected to be below this; more may come.
    """

    __slots__ = ("_rings", "length", "next", "passed_over", "previous")

    def __init__(self, rings: int, handles_max: int | None) -> None:
        self._rings = rings
        self.length = 0
        """Handles are below it; columns beside this one need as many places."""
        self.passed_over = 0
        """Held handles that :meth:`unpinned` met since this was set to 0."""
        self.next = self.previous = _links(0)
        self._resize(max(handles_max or 0, _GROWTH_HANDLES_MIN))

    def _resize(self, length: int) -> None:
        old = self.length
        following, previous = _links(length + self._rings), _links(length + self._rings)
        if old:
            for column, before in ((following, self.next), (previous, self.previous)):
                column[:old] = before[:old]
                column[length:] = before[old:]
        else:
            for ring in range(self._rings):
                following[~ring] = previous[~ring] = ~ring
        self.next, self.previous, self.length = following, previous, length

    def make_room(self, handles: Sequence[int]) -> bool:
        """Grow if any of ``handles`` is beyond the end. Returns whether it did."""
        highest = max(handles, default=-1)
        if highest < self.length:
            return False
        self._resize(max(highest + 1, self.length + max(_GROWTH_HANDLES_MIN, self.length // 8)))
        return True

    def append(self, ring: int, handles: Sequence[int]) -> None:
        """Handles that are in no ring become the newest of one, the last one most of all."""
        following, previous, end = self.next, self.previous, ~ring
        last = previous[end]
        for handle in handles:
            following[last] = handle
            previous[handle] = last
            last = handle
        following[last] = end
        previous[end] = last

    def prepend(self, ring: int, handle: int) -> None:
        """A handle that is in no ring becomes the oldest of one."""
        following, previous, end = self.next, self.previous, ~ring
        first = following[end]
        following[end] = previous[first] = handle
        previous[handle], following[handle] = end, first

    def move(self, ring: int, handles: Sequence[int]) -> None:
        """Handles, from whatever ring or aside, become the newest of one, the last one most of all."""
        following, previous, end = self.next, self.previous, ~ring
        for handle in handles:
            before, after = previous[handle], following[handle]
            following[before] = after
            previous[after] = before
            last = previous[end]
            following[last] = previous[end] = handle
            previous[handle] = last
            following[handle] = end

    def join(self, ring: int, other: int) -> None:
        """All of another ring become the newest of one, in their order. Does nothing where both are the same."""
        following, previous = self.next, self.previous
        first, last = following[~other], previous[~other]
        if first < 0 or ring == other:
            return
        newest = previous[~ring]
        following[newest], previous[first] = first, newest
        following[last], previous[~ring] = ~ring, last
        following[~other] = previous[~other] = ~other

    def unlink(self, handles: Sequence[int]) -> None:
        """Take handles out of their rings."""
        following, previous = self.next, self.previous
        for handle in handles:
            before, after = previous[handle], following[handle]
            following[before] = after
            previous[after] = before

    def put_aside(self, handle: int) -> None:
        """Take a handle out of its ring until it is moved to one."""
        self.unlink((handle,))
        self.next[handle] = self.previous[handle] = handle

    def is_aside(self, handle: int) -> bool:
        """Whether a handle was put aside."""
        return self.next[handle] == handle

    def oldest(self, ring: int) -> int:
        """The first handle of a ring; negative if there is none."""
        return self.next[~ring]

    def newest(self, ring: int) -> int:
        """The last handle of a ring; negative if there is none."""
        return self.previous[~ring]

    def after(self, handle: int) -> int:
        """The next newer handle of its ring; negative if there is none."""
        return self.next[handle]

    def before(self, handle: int) -> int:
        """The next older handle of its ring; negative if there is none."""
        return self.previous[handle]

    def unpinned(self, ring: int, pins: Sequence[int]) -> Iterator[int]:
        """The handles of a ring that are not held, oldest first. Those that are held are put aside.

        Ends early when :attr:`passed_over` reaches :data:`PASSED_OVER_MAX`. What it gave may be unlinked only after
        the next was taken, or the last.
        """
        following = self.next
        handle = following[~ring]
        while handle >= 0:
            after = following[handle]
            if pins[handle]:
                self.put_aside(handle)
                self.passed_over += 1
                if self.passed_over >= PASSED_OVER_MAX:
                    return
            else:
                yield handle
            handle = after


def _links(length: int) -> memoryview[int]:
    return memoryview(bytearray(length * array("i").itemsize)).cast("i")


def numbers(length: int) -> memoryview[int]:
    """A column of zeros: numbers of four bytes, without a sign."""
    return memoryview(bytearray(length * array("I").itemsize)).cast("I")


def longer(column: memoryview[int], length: int) -> memoryview[int]:
    """A copy of such a column with zeros behind it."""
    new = numbers(length)
    new[: len(column)] = column
    return new
