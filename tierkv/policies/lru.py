"""Policy ``lru``: evict the least recently used chunks."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.structures.rings import PASSED_OVER_MAX
from tierkv.types.keys import Key

_GROWTH_HANDLES_MIN = 4096


class LruPolicy:
    """Eviction policy of recency.

    A ring of handles, oldest first, linked through two columns. The last element of both columns is the anchor of the
    ring. A pinned handle that a choice meets is taken out of the ring (linked to itself) until it is released. So it is
    passed over once, however long the pin lasts.
    """

    def __init__(self, chunks_max: int | None = None) -> None:
        self._end = 0
        self._next = self._previous = memoryview(bytes(8)).cast("i")  # replaced at once
        self._link(max(chunks_max or 0, _GROWTH_HANDLES_MIN))
        self._count = 0

    def _link(self, end: int) -> None:
        """Copy the ring to columns for handles below ``end``."""
        old, first, last = self._end, self._next[self._end], self._previous[self._end]
        following, previous = (memoryview(bytearray(4 * (end + 1))).cast("i") for _ in range(2))
        following[:old], previous[:old] = self._next[:old], self._previous[:old]
        self._next, self._previous, self._end = following, previous, end
        if first == old:  # the ring is empty
            first = last = end
        following[end], previous[end] = first, last
        previous[first] = following[last] = end

    def __len__(self) -> int:
        """Number of known handles, pinned or not."""
        return self._count

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:  # noqa: ARG002 - recency needs no keys
        """Make the handles the most recently used, the last one the most recent."""
        if not handles:
            return
        highest = max(handles)
        if highest >= self._end:
            self._link(max(highest + 1, self._end + max(_GROWTH_HANDLES_MIN, self._end // 8)))
        following, previous, end = self._next, self._previous, self._end
        last = previous[end]
        for handle in handles:
            following[last] = handle
            previous[handle] = last
            last = handle
        following[last] = end
        previous[end] = last
        self._count += len(handles)

    def touch(self, handles: Sequence[int]) -> None:
        """Make the handles the most recently used, the last one the most recent."""
        following, previous, end = self._next, self._previous, self._end
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

    def release(self, handles: Sequence[int]) -> None:
        """Treat the end of the last pin as a use."""
        self.touch(handles)

    def release_after_write(self, handles: Sequence[int]) -> None:
        """Move handles that were passed over to the front, to be evicted first."""
        following, previous, end = self._next, self._previous, self._end
        for handle in reversed(handles):
            if following[handle] == handle:
                first = following[end]
                following[end] = previous[first] = handle
                previous[handle], following[handle] = end, first

    def remove(self, handles: Sequence[int]) -> None:
        """Forget the handles."""
        following, previous = self._next, self._previous
        for handle in handles:
            before, after = previous[handle], following[handle]
            following[before] = after
            previous[after] = before
        self._count -= len(handles)

    def evict(self, count: int, pins: Sequence[int]) -> list[int]:
        """Forget and return the least recently used unpinned handles."""
        following, previous, end = self._next, self._previous, self._end
        victims: list[int] = []
        handle, left = following[end], PASSED_OVER_MAX
        while len(victims) < count and handle != end:
            after = following[handle]
            if pins[handle]:
                before = previous[handle]
                following[before] = after
                previous[after] = before
                following[handle] = previous[handle] = handle
                left -= 1
                if not left:
                    return []
            else:
                victims.append(handle)
            handle = after
        if len(victims) < count:
            return []
        following[end] = handle
        previous[handle] = end
        self._count -= count
        return victims
