"""Policy ``s3-fifo``: a small queue for new chunks, a main queue, and a queue of ghosts."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.policies.ghost import GhostTable, marks_of
from tierkv.structures.columns import column, longer, longer_bytes
from tierkv.structures.rings import PASSED_OVER_MAX, Rings
from tierkv.types.keys import Key

_SMALL, _MAIN = 0, 1

SMALL_SHARE = 10
"""The small queue has 1 / SMALL_SHARE of the room."""

LOOKS_MAX = 4096
"""Largest number of handles that one choice gives another round. After that it takes the next handles."""

_USES_MAX = 4
_OWN_USE = 1
"""Number of uses by the request that stores a chunk. They say nothing about other requests."""
_NEEDED = (_OWN_USE + 2, _OWN_USE + 1)
"""Uses from which on a chunk at the end of the small, and of the main queue, moves to the back of the main queue."""


class S3FifoPolicy:
    """S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi, 2023).

    New chunks join the small queue, and returning ghosts the main queue. At the end of the small queue, chunks with two
    further uses move to the main queue. All others are evicted and become ghosts. At the end of the main queue, a chunk
    gets one more round per use. A use only increments a counter and moves nothing, so ``touch`` is cheap.

    The number of further rounds per choice is bounded. After that the choice takes the next chunks regardless of uses.
    """

    def __init__(self, chunks_max: int | None = None, looks_max: int = LOOKS_MAX) -> None:
        self._rings = Rings(2, chunks_max)
        self._uses = bytearray(self._rings.length)
        self._ring = bytearray(self._rings.length)
        self._marks = column("I", self._rings.length)
        self._sizes = [0, 0]
        self._room = chunks_max or 0
        self._looks_max = looks_max
        self._ghosts = GhostTable(self._room)

    def __len__(self) -> int:
        """Number of known handles, pinned or not."""
        return sum(self._sizes)

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        """Append new chunks to the small queue, and returning ghosts to the main queue."""
        self._begin(handles, keys, _MAIN)
        for ring in _SMALL, _MAIN:
            self._rings.append(ring, [handle for handle in handles if self._ring[handle] == ring])

    def add_behind(self, handles: Sequence[int], keys: Sequence[Key], behind: int) -> None:
        """Add chunks just before ``behind`` to its queue; new ones not to the main queue, but to the small one."""
        self._begin(handles, keys, self._ring[behind])
        for ring in _SMALL, _MAIN:
            some = [handle for handle in handles if self._ring[handle] == ring]
            if ring == self._ring[behind] and not self._rings.is_aside(behind):
                self._rings.insert(some, behind)
            else:
                self._rings.append(ring, some)

    def _begin(self, handles: Sequence[int], keys: Sequence[Key], ring_of_ghosts: int) -> None:
        """Set the columns of new handles, and count them in their queues."""
        if self._rings.make_room(handles):
            for column in self._uses, self._ring:
                longer_bytes(column, self._rings.length)
            self._marks = longer(self._marks, self._rings.length)
        marks, known, uses, rings = marks_of(keys), self._marks, self._uses, self._ring
        candidates = self._ghosts.candidates(marks)
        returning = 0
        for handle, mark in zip(handles, marks, strict=True):
            known[handle] = mark
            uses[handle] = 0
            rings[handle] = _SMALL
            if mark in candidates and self._ghosts.pop(mark) is not None:
                rings[handle] = ring_of_ghosts
                returning += ring_of_ghosts == _MAIN
        self._sizes[_SMALL] += len(handles) - returning
        self._sizes[_MAIN] += returning
        self._room = max(self._room, len(self))
        self._ghosts.ghosts_max = self._room - self._room // SMALL_SHARE

    def touch(self, handles: Sequence[int]) -> None:
        """Count one more use per handle."""
        uses = self._uses
        for handle in handles:
            count = uses[handle]
            if count < _USES_MAX:
                uses[handle] = count + 1

    def release(self, handles: Sequence[int]) -> None:
        """Append handles that were passed over to the back of their queue."""
        rings = self._rings
        for handle in handles:
            if rings.is_aside(handle):
                rings.move(self._ring[handle], (handle,))

    def release_after_write(self, handles: Sequence[int]) -> None:
        """Move handles that were passed over to the front of their queue."""
        for handle in reversed(handles):
            if self._rings.is_aside(handle):
                self._rings.prepend(self._ring[handle], handle)

    def remove(self, handles: Sequence[int]) -> None:
        """Forget the handles."""
        self._rings.unlink(handles)
        for handle in handles:
            self._sizes[self._ring[handle]] -= 1

    def evict(self, count: int, pins: Sequence[int]) -> list[int]:
        """Forget and return victims of the small queue if it has its share, otherwise of the main queue."""
        return self._evict(count, count, pins, -1)

    def evict_before(self, count: int, pins: Sequence[int], stop: int) -> list[int]:
        """Forget and return up to ``count`` victims, until ``stop`` is the next one."""
        return self._evict(count, 1, pins, stop)

    def _evict(self, count: int, least: int, pins: Sequence[int], stop: int) -> list[int]:
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
            if handle < 0 or not left or handle == stop:
                break
            if pins[handle]:
                rings.put_aside(handle)
                left -= 1
            elif looks and uses[handle] >= _NEEDED[ring]:
                looks -= 1
                self._requeue(handle, ring)
            else:
                after = following[handle]
                following[~ring], previous[after] = after, ~ring
                sizes[ring] -= 1
                victims.append(handle)
        if len(victims) < least:
            self._restore_victims(victims)
            return []
        marks, of_ring = self._marks, self._ring
        self._ghosts.extend([marks[handle] for handle in victims if of_ring[handle] == _SMALL])
        return victims

    def _requeue(self, handle: int, ring: int) -> None:
        """Give a handle another round in the main queue. It costs one use, or all uses if it was in the small queue."""
        self._uses[handle] = _OWN_USE if ring == _SMALL else self._uses[handle] - 1
        self._ring[handle] = _MAIN
        self._sizes[ring] -= 1
        self._sizes[_MAIN] += 1
        self._rings.move(_MAIN, (handle,))

    def _restore_victims(self, victims: Sequence[int]) -> None:
        """Put victims of an incomplete choice back to the front of their queues."""
        for handle in reversed(victims):
            ring = self._ring[handle]
            self._rings.prepend(ring, handle)
            self._sizes[ring] += 1
