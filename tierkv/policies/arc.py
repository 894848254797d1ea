"""Policy ``arc``: adaptive replacement. Evicted chunks that return decide the balance of recency and frequency."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.policies.ghost import GhostTable, marks_of
from tierkv.structures.columns import column, longer, longer_bytes
from tierkv.structures.rings import PASSED_OVER_MAX, Rings
from tierkv.types.keys import Key

_ONCE, _OFTEN = 0, 1
_NEW, _USED, _AGAIN = 0, 1, 2


class ArcPolicy:
    """ARC (Megiddo and Modha, 2003).

    Chunks that one request used are in the first ring, chunks of several requests in the second, least recently used
    first. A chunk evicted from a ring becomes a ghost of that ring. A ghost that returns shows that its ring was too
    small, and moves ``target``, the fair size of the first ring. There are at most as many ghosts as chunks.

    Two things differ from the paper, in which a cache only sees misses and hits. First, victims are chosen before the
    new chunk is known. So the rule for a tie (the new chunk is a ghost of the second ring, and the first ring has
    exactly the target size) has no effect. Second, the request that stores a chunk also uses it, so only its second
    use counts.
    """

    def __init__(self, chunks_max: int | None = None) -> None:
        self._rings = Rings(2, chunks_max)
        self._uses = bytearray(self._rings.length)
        self._marks = column("I", self._rings.length)
        self._sizes = [0, 0]
        self._room = chunks_max or 0
        self._ghosts = (GhostTable(self._room), GhostTable(self._room))
        self.target = 0.0
        """Number of chunks that the first ring should have."""

    def __len__(self) -> int:
        """Number of known handles, pinned or not."""
        return sum(self._sizes)

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        """Append new chunks to the first ring, and returning ghosts to the second."""
        self._begin(handles, keys)
        uses = self._uses
        self._append([handle for handle in handles if uses[handle] == _NEW], _ONCE)
        self._append([handle for handle in handles if uses[handle] == _AGAIN], _OFTEN)
        self._bound_ghosts()

    def add_behind(self, handles: Sequence[int], keys: Sequence[Key], behind: int) -> None:
        """Add chunks less recently used than ``behind``, and no ghost to a better ring than that of ``behind``."""
        self._begin(handles, keys)
        uses, ring = self._uses, _OFTEN if self._uses[behind] == _AGAIN else _ONCE
        for handle in handles if ring == _ONCE else ():
            uses[handle] = min(uses[handle], _USED)
        beside = [handle for handle in handles if (uses[handle] == _AGAIN) == ring]
        if self._rings.is_aside(behind):
            self._append(beside, ring)
        else:
            self._rings.insert(beside, behind)
            self._sizes[ring] += len(beside)
        if ring == _OFTEN:
            self._append([handle for handle in handles if uses[handle] != _AGAIN], _ONCE)
        self._bound_ghosts()

    def _append(self, handles: Sequence[int], ring: int) -> None:
        self._rings.append(ring, handles)
        self._sizes[ring] += len(handles)

    def _begin(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        """Set the columns of new handles; those of returning ghosts count as used again."""
        if self._rings.make_room(handles):
            longer_bytes(self._uses, self._rings.length)
            self._marks = longer(self._marks, self._rings.length)
        marks, column, uses = marks_of(keys), self._marks, self._uses
        for handle, mark in zip(handles, marks, strict=True):
            column[handle] = mark
            uses[handle] = _NEW
        candidates = self._ghosts[_ONCE].candidates(marks) | self._ghosts[_OFTEN].candidates(marks)
        if candidates:
            for handle, mark in zip(handles, marks, strict=True):
                if mark in candidates and self._pop_ghost(mark):
                    uses[handle] = _AGAIN

    def _pop_ghost(self, mark: int) -> bool:
        """Remove the ghost of a new chunk, if there is one, and move the target. Return whether there was one."""
        once, often = self._ghosts
        sizes = len(once), len(often)
        if once.pop(mark) is not None:
            self.target = min(self.target + max(1.0, sizes[1] / sizes[0]), self._room)
            return True
        if often.pop(mark) is not None:
            self.target = max(self.target - max(1.0, sizes[0] / sizes[1]), 0.0)
            return True
        return False

    def _bound_ghosts(self) -> None:
        """Bound the first ring and its ghosts to the room, and all rings and ghosts to twice the room."""
        self._room = room = max(self._room, len(self))
        once, often = self._ghosts
        once.ghosts_max = often.ghosts_max = room
        once.drop_oldest(max(0, self._sizes[_ONCE] + len(once) - room))
        often.drop_oldest(max(0, len(self) + len(once) + len(often) - 2 * room))

    def touch(self, handles: Sequence[int]) -> None:
        """Make the handles the most recently used. The second use moves a handle to the second ring."""
        uses = self._uses
        for handle in handles:
            used = uses[handle]
            if used == _USED:
                self._sizes[_ONCE] -= 1
                self._sizes[_OFTEN] += 1
            if used < _AGAIN:
                uses[handle] = used + 1
        self.release(handles)

    def release(self, handles: Sequence[int]) -> None:
        """Make the handles the most recently used of their ring."""
        uses = self._uses
        self._rings.move(_ONCE, [handle for handle in handles if uses[handle] < _AGAIN])
        self._rings.move(_OFTEN, [handle for handle in handles if uses[handle] == _AGAIN])

    def release_after_write(self, handles: Sequence[int]) -> None:
        """Move handles that were passed over to the front of their ring."""
        for handle in reversed(handles):
            if self._rings.is_aside(handle):
                self._rings.prepend(_OFTEN if self._uses[handle] == _AGAIN else _ONCE, handle)

    def remove(self, handles: Sequence[int]) -> None:
        """Forget the handles without ghosts, because other chunks did not displace them."""
        self._rings.unlink(handles)
        for handle in handles:
            self._sizes[self._uses[handle] == _AGAIN] -= 1

    def evict(self, count: int, pins: Sequence[int]) -> list[int]:
        """Forget and return victims of the first ring while it is above its target, otherwise of the second ring."""
        return self._evict(count, count, pins, -1)

    def evict_before(self, count: int, pins: Sequence[int], stop: int) -> list[int]:
        """Forget and return up to ``count`` victims, until ``stop`` is the next one of its ring."""
        return self._evict(count, 1, pins, stop)

    def _evict(self, count: int, least: int, pins: Sequence[int], stop: int) -> list[int]:
        rings, sizes, target = self._rings, list(self._sizes), self.target
        rings.passed_over = 0
        queues = rings.unpinned(_ONCE, pins, stop), rings.unpinned(_OFTEN, pins, stop)
        victims: list[int] = []
        for _ in range(count):
            ring = _ONCE if sizes[_ONCE] > target else _OFTEN
            victim = next(queues[ring], None)
            if victim is None and rings.passed_over < PASSED_OVER_MAX:
                ring = 1 - ring
                victim = next(queues[ring], None)
            if victim is None:
                break
            sizes[ring] -= 1
            victims.append(victim)
        if len(victims) < least:
            return []
        rings.unlink(victims)
        marks, uses = self._marks, self._uses
        for ring, ghosts in enumerate(self._ghosts):
            ghosts.extend([marks[victim] for victim in victims if (uses[victim] == _AGAIN) == ring])
        self._sizes = sizes
        return victims
