"""Three queues without an order to keep: a small one to prove oneself in, a main one, and one of ghosts."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.policies.ghost import GhostTable, mark_of
from tierkv.structures.rings import PASSED_OVER_MAX, Rings, longer, longer_bytes, numbers
from tierkv.types.keys import Key

_SMALL, _MAIN = 0, 1

SMALL_SHARE = 10
"""The small queue's share of the room: one in so many."""

LOOKS_MAX = 4096
"""Handles that one choice gives another round before it takes whatever comes first."""

_USES_MAX = 4
_OWN_USE = 1
"""The request that brings a chunk uses it, which says nothing about others."""
_NEEDED = (_OWN_USE + 2, _OWN_USE + 1)
"""Uses with which a chunk at the end of each queue goes on in the main one."""


class S3FifoPolicy:
    """S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi, 2023). See :class:`tierkv.abc.EvictionPolicy`.

    Newcomers queue in the small queue, or in the main one if they left not long ago. At the small queue's end, who was
    used twice since goes on to the main one, all others leave and become ghosts. At the main queue's end, who was used
    goes round once more for each use. A use only counts: nothing moves, so a touch costs next to nothing.

    A choice that would give too many a further round stops doing so, and takes the next ones as they come.
    """

    def __init__(self, chunks_max: int | None = None, looks_max: int = LOOKS_MAX) -> None:
        self._rings = Rings(2, chunks_max)
        self._uses = bytearray(self._rings.length)
        self._ring = bytearray(self._rings.length)
        self._marks = numbers(self._rings.length)
        self._sizes = [0, 0]
        self._room = chunks_max or 0
        self._looks_max = looks_max
        self._ghosts = GhostTable(self._room)

    def __len__(self) -> int:
        """How many handles are known, held or not."""
        return sum(self._sizes)

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        """Newcomers join a queue."""
        if self._rings.make_room(handles):
            for column in self._uses, self._ring:
                longer_bytes(column, self._rings.length)
            self._marks = longer(self._marks, self._rings.length)
        marks = list(map(mark_of, keys))
        perhaps = self._ghosts.perhaps(marks)
        came_back: list[int] = []
        for handle, mark in zip(handles, marks, strict=True):
            self._marks[handle] = mark
            self._uses[handle] = 0
            self._ring[handle] = _SMALL
            if mark in perhaps and self._ghosts.pop(mark) is not None:
                self._ring[handle] = _MAIN
                came_back.append(handle)
        new = [handle for handle in handles if self._ring[handle] == _SMALL] if came_back else handles
        self._rings.append(_SMALL, new)
        self._rings.append(_MAIN, came_back)
        self._sizes[_SMALL] += len(new)
        self._sizes[_MAIN] += len(came_back)
        self._room = max(self._room, len(self))
        self._ghosts.ghosts_max = self._room - self._room // SMALL_SHARE

    def touch(self, handles: Sequence[int]) -> None:
        """Count."""
        uses = self._uses
        for handle in handles:
            count = uses[handle]
            if count < _USES_MAX:
                uses[handle] = count + 1

    def release(self, handles: Sequence[int]) -> None:
        """Those that were passed over while they were held queue again, at the end."""
        rings = self._rings
        for handle in handles:
            if rings.is_aside(handle):
                rings.move(self._ring[handle], (handle,))

    def release_after_write(self, handles: Sequence[int]) -> None:
        """Those that were passed over are at the end of their queue again."""
        for handle in reversed(handles):
            if self._rings.is_aside(handle):
                self._rings.prepend(self._ring[handle], handle)

    def remove(self, handles: Sequence[int]) -> None:
        """Forget these."""
        self._rings.unlink(handles)
        for handle in handles:
            self._sizes[self._ring[handle]] -= 1

    def evict(self, count: int, pins: Sequence[int]) -> list[int]:
        """Those at the end of the small queue if that has its share, else of the main one."""
        rings, sizes, small_max = self._rings, self._sizes, max(1, self._room // SMALL_SHARE)
        following, previous, uses = rings.next, rings.previous, self._uses
        victims: list[int] = []
        looks, left = self._looks_max, PASSED_OVER_MAX
        while len(victims) < count:
            ring = _SMALL if sizes[_SMALL] >= small_max else _MAIN
            handle = following[~ring]
            if handle < 0:
                ring = 1 - ring
                handle = following[~ring]
            if handle < 0 or not left:
                self._take_back(victims)
                return []
            if pins[handle]:
                rings.put_aside(handle)
                left -= 1
            elif looks and uses[handle] >= _NEEDED[ring]:
                looks -= 1
                self._go_on(handle, ring)
            else:
                after = following[handle]
                following[~ring], previous[after] = after, ~ring
                sizes[ring] -= 1
                victims.append(handle)
        self._ghosts.extend([self._marks[handle] for handle in victims if self._ring[handle] == _SMALL])
        return victims

    def _go_on(self, handle: int, ring: int) -> None:
        """Give a handle at the end of its queue another round in the main one; that costs it a use, or all."""
        self._uses[handle] = _OWN_USE if ring == _SMALL else self._uses[handle] - 1
        self._ring[handle] = _MAIN
        self._sizes[ring] -= 1
        self._sizes[_MAIN] += 1
        self._rings.move(_MAIN, (handle,))

    def _take_back(self, victims: Sequence[int]) -> None:
        """They were not enough: each is the first of its queue again."""
        for handle in reversed(victims):
            ring = self._ring[handle]
            self._rings.prepend(ring, handle)
            self._sizes[ring] += 1
