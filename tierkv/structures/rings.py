"""Several orders of handles in two columns, for eviction policies with more than one queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tierkv.structures.columns import column, grown, longer, run_of

PASSED_OVER_MAX = 8192
"""Pinned handles that one choice of victims skips before it gives up for now: half a millisecond's work."""

LOOPED_MAX = 64
"""Most handles for which a loop takes no longer than a few calls for all of them."""

HANDLES_MIN = 4096
"""Handles for which there is room from the start."""


class Rings:
    """Rings of handles, each from oldest to newest. A handle is in one ring, or in none.

    Both ends of a ring are linked to its sentinel, a negative index counted from the end of the columns: -1 for ring 0,
    -2 for ring 1 (``~ring``). So an index below zero is the end of a ring, and growing moves no handle. A handle that
    is temporarily in no ring is *aside*: linked to itself.

    ``next`` and ``previous`` are public for hot loops that inline the methods.

    Args:
        rings: number of rings.
        handles_max: expected bound of the handles; higher ones make the columns grow.
    """

    __slots__ = ("_rings", "length", "next", "passed_over", "previous")

    def __init__(self, rings: int, handles_max: int | None) -> None:
        self._rings = rings
        self.length = 0
        """Bound of the handles; columns beside these need as many entries."""
        self.passed_over = 0
        """Number of pinned handles that :meth:`unpinned` skipped since this was set to 0; the maximum ends a choice."""
        self.next = self.previous = column("i", 0)
        self._resize(max(handles_max or 0, HANDLES_MIN))

    def _resize(self, length: int) -> None:
        rings, old = self._rings, self.length
        if old:
            self.next, self.previous = longer(self.next, length + rings), longer(self.previous, length + rings)
            for links in (self.next, self.previous):
                ends = links[old : old + rings].tobytes()
                links[old : old + rings] = column("i", rings)
                links[length:] = memoryview(ends).cast("i")
        else:
            self.next, self.previous = column("i", length + rings), column("i", length + rings)
            self.next[length:] = self.previous[length:] = np.arange(-rings, 0, dtype=np.int32).data  # ~ring at ~ring
        self.length = length

    def make_room(self, handles: Sequence[int]) -> bool:
        """Grow if any of ``handles`` is beyond the end. Returns whether the columns grew."""
        highest = max(handles, default=-1)
        if highest < self.length:
            return False
        self._resize(max(grown(self.length, highest + 1), self.length + self._rings))  # sentinels move, O(1) a handle
        return True

    def append(self, ring: int, handles: Sequence[int]) -> None:
        """Add handles that are in no ring as the newest of one; the last one becomes the newest."""
        self.insert(handles, ~ring)

    def insert(self, handles: Sequence[int], newer: int) -> None:
        """Add handles that are in no ring to that of ``newer``, just before it; the last one is next to it.

        newer: a handle of a ring, or ``~ring``, the newest end of one.
        """
        following, previous = self.next, self.previous
        last = previous[newer]
        run = run_of(handles) if handles[LOOPED_MAX:] else None  # no call for a short batch
        if run is None:
            for handle in handles:
                following[last] = handle
                previous[handle] = last
                last = handle
        else:  # as at an open, of a million chunks
            first, stop = run.start, run.stop
            upward, downward = (following, previous) if handles[0] == first else (previous, following)
            neighbours = np.arange(first, stop, dtype=np.int32).data
            upward[first : stop - 1] = neighbours[1:]
            downward[first + 1 : stop] = neighbours[:-1]
            following[last], previous[handles[0]], last = handles[0], last, handles[-1]
        following[last] = newer
        previous[newer] = last

    def prepend(self, ring: int, handle: int) -> None:
        """Add a handle that is in no ring as the oldest of one."""
        following, previous, end = self.next, self.previous, ~ring
        first = following[end]
        following[end] = previous[first] = handle
        previous[handle], following[handle] = end, first

    def move(self, ring: int, handles: Sequence[int]) -> None:
        """Move handles from any ring, or from aside, to the newest end of one; the last one becomes the newest."""
        following, previous, end = self.next, self.previous, ~ring
        if len(handles) > 2 and [*map(following.__getitem__, handles[:-1])] == [*handles[1:]]:  # noqa: PLR2004 - below it, the loop is as fast
            self._move_run(end, handles[0], handles[-1])
            return
        last = previous[end]
        for handle in handles:
            if handle == last:
                continue
            before, after = previous[handle], following[handle]
            following[before] = after
            previous[after] = before
            following[last] = handle
            previous[handle] = last
            last = handle
        following[last] = end
        previous[end] = last

    def _move_run(self, end: int, first: int, last: int) -> None:
        """Move neighbours, as the chunks of a prefix are after their first use, to the end of a ring at once."""
        following, previous = self.next, self.previous
        before, after = previous[first], following[last]
        if after == end:
            return
        following[before], previous[after] = after, before
        newest = previous[end]
        following[newest], previous[first] = first, newest
        following[last], previous[end] = end, last

    def join(self, ring: int, other: int) -> None:
        """Append another ring to the newest end of one, in its order. Does nothing if both are the same."""
        following, previous = self.next, self.previous
        first, last = following[~other], previous[~other]
        if first < 0 or ring == other:
            return
        newest = previous[~ring]
        following[newest], previous[first] = first, newest
        following[last], previous[~ring] = ~ring, last
        following[~other] = previous[~other] = ~other

    def unlink(self, handles: Sequence[int]) -> None:
        """Remove handles from their rings."""
        following, previous = self.next, self.previous
        if len(handles) > 2 and [*map(following.__getitem__, handles[:-1])] == [*handles[1:]]:  # noqa: PLR2004 - as in move()
            before, after = previous[handles[0]], following[handles[-1]]
            following[before], previous[after] = after, before
            return
        for handle in handles:
            before, after = previous[handle], following[handle]
            following[before] = after
            previous[after] = before

    def put_aside(self, handle: int) -> None:
        """Remove a handle from its ring until it is moved to one."""
        following, previous = self.next, self.previous
        before, after = previous[handle], following[handle]
        following[before], previous[after] = after, before
        following[handle] = previous[handle] = handle

    def is_aside(self, handle: int) -> bool:
        """Whether a handle was put aside."""
        return self.next[handle] == handle

    def oldest(self, ring: int) -> int:
        """Oldest handle of a ring; negative if the ring is empty."""
        return self.next[~ring]

    def newest(self, ring: int) -> int:
        """Newest handle of a ring; negative if the ring is empty."""
        return self.previous[~ring]

    def after(self, handle: int) -> int:
        """Next newer handle of the same ring; negative if there is none."""
        return self.next[handle]

    def before(self, handle: int) -> int:
        """Next older handle of the same ring; negative if there is none."""
        return self.previous[handle]

    def unpinned(self, ring: int, pins: Sequence[int], stop: int = -1) -> Iterator[int]:
        """Iterate over the handles of a ring that are not pinned, oldest first. Pinned handles are put aside.

        Ends early at the handle ``stop``, and when :attr:`passed_over` reaches :data:`PASSED_OVER_MAX`, which it is set
        to at ``stop``. A yielded handle may be unlinked only after the next one was taken, or at the end.
        """
        following = self.next
        handle = following[~ring]
        while handle >= 0:
            if handle == stop:
                self.passed_over = PASSED_OVER_MAX
                return
            after = following[handle]
            if pins[handle]:
                self.put_aside(handle)
                self.passed_over += 1
                if self.passed_over >= PASSED_OVER_MAX:
                    return
            else:
                yield handle
            handle = after
