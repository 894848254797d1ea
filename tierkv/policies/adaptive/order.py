"""In which order chunks would leave: per class a queue of runs, per run a ring of chunks, deepest first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from tierkv.policies.adaptive.classes import LEVEL_WORTH, LEVELS
from tierkv.policies.adaptive.runs import QUEUES, RunLog
from tierkv.policies.adaptive.value_model import AGES, ValueModel
from tierkv.structures.rings import Rings

LOOK_EVERY_S = 1.0
"""How long the worth of a queue's ends pins, unless the ends change: no interval of age is shorter than five times."""

_End = tuple[float, float, int, int]  # worth, time, ring, and whether from here on runs get younger, older or neither


class LeavingOrder:
    """Which chunks of the tier are in which run, and which run is worth least.

    A run whose place in the log is given to another ends: its chunks join the *ancient* ones of its queue, which have
    one ring and one age.

    Two rings are no queue's: chunks that lost their turn to leave because others of the tier build on them are
    *parked*; when the last of those has gone, they are *leaving*.
    """

    def __init__(self, log: RunLog, worths: ValueModel, chunks_max: int | None) -> None:
        self._log = log
        self._worths = worths
        self._ancient = log.size
        self.parked = log.size + QUEUES
        """Number of the ring."""
        self.leaving = log.size + QUEUES + 1
        """Number of the ring."""
        self.rings = Rings(log.size + QUEUES + 2, chunks_max)
        self._queues = Rings(QUEUES, log.size)
        self._queued = bytearray(log.size)
        self._ends: dict[int, list[_End]] = {}
        self._heap: list[_End] = []
        self._changed: set[int] = set()
        self._looked_s = 0.0
        self._ended_s = [0.0] * QUEUES  # when the youngest of the ancient chunks was seen

    def put(self, place: int, handles: Sequence[int]) -> None:
        """Move chunks of the tier, linked or aside, to a run; tail first."""
        self._queue(place)
        self.rings.move(place, handles)

    def enter(self, place: int, handles: Sequence[int]) -> None:
        """Newcomers join a run; tail first."""
        self._queue(place)
        self.rings.append(place, handles)

    def _queue(self, place: int) -> None:
        if not self._queued[place]:
            self._queued[place] = 1
            queue = self._log.queues[place]
            self._queues.append(queue, (place,))
            self._changed.add(queue)

    def abandon(self, place: int, queue: int) -> None:
        """A run belongs to another class from now on."""
        if self._queued[place]:
            self._changed.add(self._log.queues[place])
            self._queues.unlink((place,))
            self._queues.append(queue, (place,))
            self._changed.add(queue)
        self._log.queues[place] = queue

    def end(self, place: int) -> None:
        """A run's place is about to be given to another."""
        if self._queued[place]:
            self._queued[place] = 0
            self._queues.unlink((place,))
            queue = self._log.queues[place]
            self.rings.join(self._ancient + queue, place)
            self._ended_s[queue] = self._log.times[place]
            self._changed.add(queue)

    def worth(self, queue: int, age_s: float) -> float:
        """What a chunk is worth, by class, level and age."""
        interval = bisect_right(AGES, age_s) - 1
        return self._worths.table[queue // LEVELS][interval] * LEVEL_WORTH[queue % LEVELS]

    def worst_first(self, now_s: float) -> Iterator[tuple[float, int]]:
        """Worth and ring of runs, the smaller of each queue's two ends first. Some may have no chunks any more.

        Chunks of a run may be taken out after it was given, and no others.
        """
        self._look(now_s)
        ends, given = self._heap.copy(), None
        while ends:
            worth, _, ring, step = heappop(ends)
            yield worth, ring
            if given is None:
                given = {end[2] for end in self._heap}
            if ring >= self._ancient:
                queue = ring - self._ancient
            else:
                queue = self._log.queues[ring]
                self._offer_next(ring, step, now_s, ends, given)
            if self.rings.oldest(ring) < 0:
                self._changed.add(queue)

    def _look(self, now_s: float) -> None:
        """See what has changed, if anything."""
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._changed.update(self._ends)
        if self._changed:
            for queue in sorted(self._changed):
                self._look_at(queue, now_s)
            self._changed.clear()
            self._heap = [end for both in self._ends.values() for end in both]
            heapify(self._heap)

    def _look_at(self, queue: int, now_s: float) -> None:
        """Find and value the ends of a queue."""
        ends: list[_End] = []
        ancient = self._ancient + queue
        if self.rings.oldest(ancient) >= 0:
            time_s = self._ended_s[queue]
            ends.append((self.worth(queue, now_s - time_s), time_s, ancient, 0))
        while (oldest := self._queues.oldest(queue)) >= 0 and self.rings.oldest(oldest) < 0:
            self._unqueue(oldest)
        if oldest >= 0:
            while self.rings.oldest(newest := self._queues.newest(queue)) < 0:
                self._unqueue(newest)
            ends.append(self._end(queue, oldest, 1, now_s))
            if newest != oldest:
                ends.append(self._end(queue, newest, -1, now_s))
        if ends:
            self._ends[queue] = ends
        else:
            self._ends.pop(queue, None)

    def _end(self, queue: int, place: int, step: int, now_s: float) -> _End:
        time_s = self._log.times[place]
        return self.worth(queue, now_s - time_s), time_s, place, step

    def _unqueue(self, place: int) -> None:
        self._queues.unlink((place,))
        self._queued[place] = 0

    def _offer_next(self, place: int, step: int, now_s: float, ends: list[_End], given: set[int]) -> None:
        queue, follow = self._log.queues[place], self._queues.after if step > 0 else self._queues.before
        place = follow(place)
        while place >= 0 and place not in given and self.rings.oldest(place) < 0:
            place = follow(place)
        if place >= 0 and place not in given:
            heappush(ends, self._end(queue, place, step, now_s))
            given.add(place)
