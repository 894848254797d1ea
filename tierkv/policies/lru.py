"""Policy ``lru``: evict the least recently used chunks."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.structures.rings import PASSED_OVER_MAX, Rings
from tierkv.types.keys import Key

_RING, _END = 0, ~0


class LruPolicy:
    """Eviction policy of recency.

    A ring of handles, oldest first. A pinned handle that a choice meets is put aside until it is released. So it is
    passed over once, however long the pin lasts.
    """

    def __init__(self, chunks_max: int | None = None) -> None:
        self._rings = Rings(1, chunks_max)
        self._count = 0

    def __len__(self) -> int:
        """Number of known handles, pinned or not."""
        return self._count

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:  # noqa: ARG002 - recency needs no keys
        """Make the handles the most recently used, the last one the most recent."""
        if handles:
            self._insert(handles, _END)

    def add_behind(self, handles: Sequence[int], keys: Sequence[Key], behind: int) -> None:  # noqa: ARG002 - as add
        """Make the handles less recently used than ``behind`` by just so much, the last one the most recent."""
        if handles:
            self._insert(handles, _END if self._rings.is_aside(behind) else behind)

    def _insert(self, handles: Sequence[int], newer: int) -> None:
        rings = self._rings
        if max(handles) >= rings.length:  # saves a call per batch
            rings.make_room(handles)
        rings.insert(handles, newer)
        self._count += len(handles)

    def touch(self, handles: Sequence[int]) -> None:
        """Make the handles the most recently used, the last one the most recent."""
        self._rings.move(_RING, handles)

    def release(self, handles: Sequence[int]) -> None:
        """Treat the end of the last pin as a use."""
        self.touch(handles)

    def release_after_write(self, handles: Sequence[int]) -> None:
        """Move handles that were passed over to the front, to be evicted first."""
        following = self._rings.next
        for handle in reversed(handles):
            if following[handle] == handle:
                self._rings.prepend(_RING, handle)

    def remove(self, handles: Sequence[int]) -> None:
        """Forget the handles."""
        self._rings.unlink(handles)
        self._count -= len(handles)

    def evict(self, count: int, pins: Sequence[int]) -> list[int]:
        """Forget and return the least recently used unpinned handles."""
        return self._evict(count, count, pins, _END)

    def evict_before(self, count: int, pins: Sequence[int], stop: int) -> list[int]:
        """Forget and return up to ``count`` of the unpinned handles that are less recently used than ``stop``."""
        return self._evict(count, 1, pins, stop)

    def _evict(self, count: int, least: int, pins: Sequence[int], stop: int) -> list[int]:
        following, previous = self._rings.next, self._rings.previous
        victims: list[int] = []
        handle, left = following[_END], PASSED_OVER_MAX
        while left and len(victims) < count and handle not in (_END, stop):
            after = following[handle]
            if pins[handle]:
                self._rings.put_aside(handle)
                left -= 1
            else:
                victims.append(handle)
            handle = after
        if len(victims) < least:
            return []
        following[_END] = handle
        previous[handle] = _END
        self._count -= len(victims)
        return victims
