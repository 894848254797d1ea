"""Adaptive replacement: recency and frequency, and what has left says which of them deserves more room."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.policies.ghost import GhostTable, mark_of
from tierkv.structures.rings import Rings, longer, longer_bytes, numbers
from tierkv.types.keys import Key

_ONCE, _OFTEN = 0, 1
_NEW, _USED, _AGAIN = 0, 1, 2


class ArcPolicy:
    """ARC (Megiddo and Modha, 2003). See :class:`tierkv.abc.EvictionPolicy`.

    Chunks that one request used are in one ring, those of several in another, least recently used first. What leaves
    one of them leaves a ghost; a ghost that comes back shows that its ring was too small, and moves ``target``, the
    first ring's fair size. Together they have as many ghosts as there are chunks.

    Two things differ from the paper, where a cache is told of a miss and a hit and nothing else. Room is made before
    it is known for whom, so the rule for a tie (the newcomer is a ghost of the second ring, and the first has its exact
    target) has no say. And a chunk is used by the request that brought it: only the second use counts as one more.
    """

    def __init__(self, chunks_max: int | None = None) -> None:
        self._rings = Rings(2, chunks_max)
        self._uses = bytearray(self._rings.length)
        self._marks = numbers(self._rings.length)
        self._sizes = [0, 0]
        self._room = chunks_max or 0
        self._ghosts = (GhostTable(self._room), GhostTable(self._room))
        self.target = 0.0
        """How many chunks the first ring should have."""

    def __len__(self) -> int:
        """How many handles are known, held or not."""
        return sum(self._sizes)

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        """Newcomers are in the first ring, those that were here not long ago in the second."""
        if self._rings.make_room(handles):
            longer_bytes(self._uses, self._rings.length)
            self._marks = longer(self._marks, self._rings.length)
        marks, uses = list(map(mark_of, keys)), self._uses
        for handle, mark in zip(handles, marks, strict=True):
            self._marks[handle] = mark
            uses[handle] = _NEW
        perhaps = self._ghosts[_ONCE].perhaps(marks) | self._ghosts[_OFTEN].perhaps(marks)
        if perhaps:
            for handle, mark in zip(handles, marks, strict=True):
                if mark in perhaps and self._came_back(mark):
                    uses[handle] = _AGAIN
        once = [handle for handle in handles if uses[handle] == _NEW] if perhaps else handles
        often = [handle for handle in handles if uses[handle] == _AGAIN] if perhaps else ()
        self._rings.append(_ONCE, once)
        self._rings.append(_OFTEN, often)
        self._sizes[_ONCE] += len(once)
        self._sizes[_OFTEN] += len(often)
        self._bound_ghosts()

    def _came_back(self, mark: int) -> bool:
        """Whether a newcomer is a ghost; if so, it is none any more, and the target moves."""
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
        """First ring and its ghosts: not more than there is room for; all rings and ghosts: not more than twice."""
        self._room = room = max(self._room, len(self))
        once, often = self._ghosts
        once.ghosts_max = often.ghosts_max = room
        once.drop_oldest(max(0, self._sizes[_ONCE] + len(once) - room))
        often.drop_oldest(max(0, len(self) + len(once) + len(often) - 2 * room))

    def touch(self, handles: Sequence[int]) -> None:
        """These are the most recently used of their ring; of the second one from their second use on."""
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
        """These are the most recently used of the ring that they are in."""
        uses = self._uses
        self._rings.move(_ONCE, [handle for handle in handles if uses[handle] < _AGAIN])
        self._rings.move(_OFTEN, [handle for handle in handles if uses[handle] == _AGAIN])

    def release_after_write(self, handles: Sequence[int]) -> None:
        """Those that were passed over are the first to leave their ring."""
        for handle in reversed(handles):
            if self._rings.is_aside(handle):
                self._rings.prepend(_OFTEN if self._uses[handle] == _AGAIN else _ONCE, handle)

    def remove(self, handles: Sequence[int]) -> None:
        """Forget these, without a ghost: they left for no merit of others."""
        self._rings.unlink(handles)
        for handle in handles:
            self._sizes[self._uses[handle] == _AGAIN] -= 1

    def evict(self, count: int, pins: Sequence[int]) -> list[int]:
        """The least recently used of the first ring while that is above its target, else of the second."""
        rings, sizes, target = self._rings, list(self._sizes), self.target
        rings.passed_over = 0
        queues = rings.unpinned(_ONCE, pins), rings.unpinned(_OFTEN, pins)
        victims: list[int] = []
        for _ in range(count):
            ring = _ONCE if sizes[_ONCE] > target else _OFTEN
            victim = next(queues[ring], None)
            if victim is None:
                ring = 1 - ring
                victim = next(queues[ring], None)
            if victim is None:
                return []
            sizes[ring] -= 1
            victims.append(victim)
        rings.unlink(victims)
        for ring, ghosts in enumerate(self._ghosts):
            ghosts.extend([self._marks[victim] for victim in victims if (self._uses[victim] == _AGAIN) == ring])
        self._sizes = sizes
        return victims
