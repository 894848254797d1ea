"""What is learned from requests as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.policies.adaptive.classes import (
    ABANDONED,
    LEVELS,
    PUBLIC_SEEN_MIN,
    SEEN_MAX,
    classes_for,
    is_private,
    level_of,
    tail_class,
)
from tierkv.policies.adaptive.memory import Memory, Note
from tierkv.policies.adaptive.order import LeavingOrder
from tierkv.policies.adaptive.residents import Residents
from tierkv.policies.adaptive.runs import NO_RUN, RunLog
from tierkv.policies.adaptive.worths import Worths
from tierkv.policies.ghost import mark_of
from tierkv.types.sighting import Sighting, SightingEvent

PATH_CHUNKS_MAX = 2048
"""Of a longer path only so much is looked at, from the front: a few milliseconds' work."""

LEARN_EVERY = 2
"""Requests after which one class is brought up to date: a tenth of a millisecond's work."""


class Watcher:
    """Counts how often chunks are seen, and gives each request's chunks to runs of their classes."""

    def __init__(self, log: RunLog, worths: Worths, order: LeavingOrder, memory: Memory, residents: Residents) -> None:
        self._log = log
        self._worths = worths
        self._order = order
        self._memory = memory
        self._residents = residents
        self.now_s = 0.0
        """The latest time that was told."""
        self._count = 0
        self.has_seen = False
        """Whether any request was ever told of."""

    def open_run(self, queue: int) -> int:
        """Begin a run of a class and level, now; its number."""
        self._order.end(self._log.next_place)
        return self._log.open(self.now_s, queue)

    def sighted(self, sighting: Sighting) -> None:
        """A request arrived or finished."""
        self.now_s = max(self.now_s, sighting.now_s)
        self._log.grow_older(self.now_s, self._worths)
        level = level_of(sighting.hints)
        for path in sighting.paths:
            marks = [mark_of(key) for key in path[:PATH_CHUNKS_MAX]]
            if sighting.event is SightingEvent.ARRIVED:
                self._arrived(marks, sighting, level)
            else:
                self._finished(marks, sighting, level)
        if sighting.event is SightingEvent.ARRIVED:
            self.has_seen = True
            self._count += 1
            if self._count % LEARN_EVERY == 0:
                self._worths.learn(self.now_s)

    def _arrived(self, marks: Sequence[int], sighting: Sighting, level: int) -> None:
        residents, memory, log = self._residents, self._memory, self._log
        handles = [residents.find(mark) for mark in marks]
        notes = [memory.pop(mark) if handle < 0 else None for mark, handle in zip(marks, handles, strict=True)]
        new = sum(handle < 0 and note is None for handle, note in zip(handles, notes, strict=True))
        deepest = max((i for i, handle in enumerate(handles) if handle >= 0 or notes[i] is not None), default=-1)
        follows = deepest >= 0 and self._seen(handles[deepest], notes[deepest]) < PUBLIC_SEEN_MIN
        classes = classes_for(new, sighting.hints, follows=follows)
        number, current, parent = 0, -1, 0
        before, again = 0, 0  # the run that chunks were in so far, and how many of it in a row
        for mark, handle, note in zip(marks, handles, notes, strict=True):
            was = residents.runs[handle] if handle >= 0 else note[1] if note is not None else NO_RUN
            if was not in (before, NO_RUN):
                self._left_run(before, again)
                before, again = was, 0
            again += was != NO_RUN
            seen = min(self._seen(handle, note) + 1, SEEN_MAX)
            its_class = classes[seen]
            if mark == marks[-1] and seen == 1:
                its_class = tail_class(its_class)
            if its_class != current:
                current = its_class
                number = self.open_run(current * LEVELS + level)
            log.alive[number % log.size] += 1
            if handle >= 0:
                residents.seen[handle], residents.runs[handle] = seen, number
                if parent and not residents.parents[handle]:
                    residents.parents[handle] = parent
                    residents.adopt((handle,))
            else:
                memory.expect(mark, (seen, number, parent))
            parent = mark
        self._left_run(before, again)
        if new and (place := log.place(before)) >= 0:
            self._abandon(place)

    def _seen(self, handle: int, note: Note | None) -> int:
        """How often a chunk was seen: one of the tier, one that is remembered, or one that is new."""
        return self._residents.seen[handle] if handle >= 0 else 0 if note is None else note[0]

    def _left_run(self, number: int, chunks: int) -> None:
        """Chunks of a run were seen again, and belong to another now."""
        log = self._log
        if (place := log.place(number)) >= 0:
            self._worths.reused(log.queues[place] // LEVELS, self.now_s - log.times[place], chunks)
            log.alive[place] = max(0, log.alive[place] - chunks)

    def _abandon(self, place: int) -> None:
        """The rest of a run that a request went through in part, and then somewhere new."""
        number, level = divmod(self._log.queues[place], LEVELS)
        if self._log.alive[place] and is_private(number):
            self._order.abandon(place, ABANDONED * LEVELS + level)

    def _finished(self, marks: Sequence[int], sighting: Sighting, level: int) -> None:
        """What the request computed itself was in no path when it arrived."""
        residents, memory, log = self._residents, self._memory, self._log
        number, parent = 0, 0
        for mark in marks:
            if residents.find(mark) < 0 and memory.get(mark) is None:
                if not number:
                    number = self.open_run(classes_for(sum(sighting.new_chunks), sighting.hints)[1] * LEVELS + level)
                log.alive[number % log.size] += 1
                memory.expect(mark, (1, number, parent))
            parent = mark
