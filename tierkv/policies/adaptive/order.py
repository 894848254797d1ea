"""Eviction order: a queue of runs per class and level, and a ring of chunks per run, deepest chunk first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from tierkv.policies.adaptive.classes import LEVEL_WEIGHT, LEVELS
from tierkv.policies.adaptive.runs import QUEUES, RunLog
from tierkv.policies.adaptive.value_model import ValueModel
from tierkv.structures.rings import Rings

REFRESH_EVERY_S = 1.0
"""Seconds for which the values of unchanged queue ends are reused. Every age interval is at least five times longer."""

_End = tuple[float, float, int, int]  # value, time, ring, and step to the next run: 1 younger, -1 older, 0 none


class EvictionOrder:
    """Chunks of the tier by run, and runs by value.

    A run ends when its place in the log is taken over. Its chunks join the *ancient* chunks of its queue, which share
    one ring and one age.

    Two rings belong to no queue. Chunks that were passed over because other chunks of the tier continue their prefix
    are *parked*. When the last of those is evicted, they move to the ring *first out*.
    """

    def __init__(self, log: RunLog, values: ValueModel, chunks_max: int | None) -> None:
        self._log = log
        self._values = values
        self._ancient = log.size
        self.parked = log.size + QUEUES
        """Number of the ring of parked chunks."""
        self.first_out = log.size + QUEUES + 1
        """Number of the ring of chunks that are evicted before all others."""
        self.rings = Rings(log.size + QUEUES + 2, chunks_max)
        self._queues = Rings(QUEUES, log.size)
        self._queued = bytearray(log.size)
        self._ends: dict[int, list[_End]] = {}
        self._heap: list[_End] = []
        self._changed: set[int] = set()
        self._refreshed_s = 0.0
        self._ended_s = [0.0] * QUEUES  # time of the youngest ancient chunks

    def move_to_run(self, place: int, handles: Sequence[int]) -> None:
        """Move chunks of the tier, linked or set aside, to a run; tail first."""
        self._queue(place)
        self.rings.move(place, handles)

    def append_to_run(self, place: int, handles: Sequence[int]) -> None:
        """Append new chunks to a run; tail first."""
        self._queue(place)
        self.rings.append(place, handles)

    def insert_before(self, place: int, handles: Sequence[int], newer: int) -> None:
        """Insert new chunks of a run, tail first, just before the chunk ``newer`` of the same run."""
        self._queue(place)
        self.rings.insert(handles, newer)

    def _queue(self, place: int) -> None:
        if not self._queued[place]:
            self._queued[place] = 1
            queue = self._log.queues[place]
            self._queues.append(queue, (place,))
            self._changed.add(queue)

    def reclassify(self, place: int, queue: int) -> None:
        """Move a run to another queue."""
        if self._queued[place]:
            self._changed.add(self._log.queues[place])
            self._queues.unlink((place,))
            self._queues.append(queue, (place,))
            self._changed.add(queue)
        self._log.queues[place] = queue

    def end_run(self, place: int) -> None:
        """End the run at a place that is about to be taken over."""
        if self._queued[place]:
            self._queued[place] = 0
            self._queues.unlink((place,))
            queue = self._log.queues[place]
            self.rings.join(self._ancient + queue, place)
            self._ended_s[queue] = self._log.times[place]
            self._changed.add(queue)

    def value_of(self, queue: int, age_s: float) -> float:
        """Value of a chunk by queue (class and level) and age."""
        return self._values.value(queue // LEVELS, age_s) * LEVEL_WEIGHT[queue % LEVELS]

    def lowest_first(self, now_s: float) -> Iterator[tuple[float, int]]:
        """Yield value and ring of runs, lowest value first; of each queue, the end with the lower value first.

        Some runs may have no chunks left. The caller may remove chunks of a run after it was yielded, and no others.
        """
        self._refresh(now_s)
        ends, given = self._heap.copy(), None
        while ends:
            value, _, ring, step = heappop(ends)
            yield value, ring
            if given is None:
                given = {end[2] for end in self._heap}
            if ring >= self._ancient:
                queue = ring - self._ancient
            else:
                queue = self._log.queues[ring]
                self._push_next(ring, step, now_s, ends, given)
            if self.rings.oldest(ring) < 0:
                self._changed.add(queue)

    def _refresh(self, now_s: float) -> None:
        """Refresh the ends of changed queues."""
        if now_s - self._refreshed_s >= REFRESH_EVERY_S:
            self._refreshed_s = now_s
            self._changed.update(self._ends)
        if self._changed:
            for queue in sorted(self._changed):
                self._refresh_queue(queue, now_s)
            self._changed.clear()
            self._heap = [end for both in self._ends.values() for end in both]
            heapify(self._heap)

    def _refresh_queue(self, queue: int, now_s: float) -> None:
        """Find the ends of a queue and compute their values."""
        ends: list[_End] = []
        ancient = self._ancient + queue
        if self.rings.oldest(ancient) >= 0:
            time_s = self._ended_s[queue]
            ends.append((self.value_of(queue, now_s - time_s), time_s, ancient, 0))
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
        return self.value_of(queue, now_s - time_s), time_s, place, step

    def _unqueue(self, place: int) -> None:
        self._queues.unlink((place,))
        self._queued[place] = 0

    def _push_next(self, place: int, step: int, now_s: float, ends: list[_End], given: set[int]) -> None:
        queue, follow = self._log.queues[place], self._queues.after if step > 0 else self._queues.before
        place = follow(place)
        while place >= 0 and place not in given and self.rings.oldest(place) < 0:
            place = follow(place)
        if place >= 0 and place not in given:
            heappush(ends, self._end(queue, place, step, now_s))
            given.add(place)
