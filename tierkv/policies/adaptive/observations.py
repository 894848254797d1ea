"""What is learned from requests as a whole."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

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
from tierkv.policies.adaptive.memory import Memory
from tierkv.policies.adaptive.order import LeavingOrder
from tierkv.policies.adaptive.residents import Residents
from tierkv.policies.adaptive.runs import NO_RUN, RunLog
from tierkv.policies.adaptive.value_model import ValueModel
from tierkv.policies.ghost import mark_of, marks_of
from tierkv.types.keys import Key
from tierkv.types.observation import RequestObservation, RequestPhase

PATH_CHUNKS_MAX = 2048
"""Of a longer path only so much is looked at, from the front."""

WHOLE_CHUNKS_MAX = 256
"""A path of so many chunks is looked at in one go: a millisecond's work, where all of them were seen and have left."""
PIECE_CHUNKS = 128
"""Longer ones are looked at in pieces, half a millisecond's work each."""
OBSERVATION_CHUNKS = 256
"""When so many chunks were looked at in the call that told of a request, the rest waits for later calls."""
WAITING_MAX = 256
"""Paths that wait; beyond it the newest are not looked at."""

LEARN_EVERY = 2
"""Requests after which one class is brought up to date: a tenth of a millisecond's work."""


@dataclass(slots=True)
class _Path:
    """A path of a request, and how far it was looked at.

    piece: chunks that are looked at in one go. at: chunks that were.
    new, classes: as for :func:`classes_for`, and what that says; no classes: not known yet.
    run, of: the run that is open, and its class. parent: the mark before ``at``.
    before, again: the run that chunks were in so far, and how many of it in a row.
    """

    keys: tuple[Key, ...]
    piece: int
    observation: RequestObservation
    level: int
    at: int = 0
    new: int = 0
    classes: bytes = b""
    run: int = NO_RUN
    of: int = -1
    parent: int = 0
    before: int = NO_RUN
    again: int = 0


class Watcher:
    """Counts how often chunks are seen, and gives each request's chunks to runs of their classes."""

    def __init__(
        self, log: RunLog, worths: ValueModel, order: LeavingOrder, memory: Memory, residents: Residents
    ) -> None:
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
        self._waiting: deque[_Path] = deque()

    def open_run(self, queue: int) -> int:
        """Begin a run of a class and level, now; its number."""
        self._order.end(self._log.next_place)
        return self._log.open(self.now_s, queue)

    def observe_request(self, observation: RequestObservation) -> None:
        """A request arrived or finished."""
        self.now_s = max(self.now_s, observation.now_s)
        self._log.grow_older(self.now_s, self._worths)
        level = level_of(observation.hints)
        for keys in observation.paths:
            if keys and len(self._waiting) < WAITING_MAX:
                piece = len(keys) if len(keys) <= WHOLE_CHUNKS_MAX else PIECE_CHUNKS
                self._waiting.append(_Path(keys[:PATH_CHUNKS_MAX], piece, observation, level))
        self.go_on(OBSERVATION_CHUNKS)
        if observation.phase is RequestPhase.ARRIVED:
            self.has_seen = True
            self._count += 1
            if self._count % LEARN_EVERY == 0:
                self._worths.learn(self.now_s)

    def go_on(self, chunks: int = PIECE_CHUNKS) -> None:
        """Look at so many more chunks of paths that wait, if any do; rounded up to whole pieces."""
        waiting = self._waiting
        while waiting and chunks > 0:
            path = waiting[0]
            if path.observation.phase is RequestPhase.FINISHED:
                chunks -= self._finished(path)
                waiting.popleft()
                continue
            chunks -= self._look_at_piece(path)
            if path.at == len(path.keys):
                waiting.popleft()
                self._arrived(path)

    def _arrived(self, path: _Path) -> None:
        """All of a path was looked at."""
        self._left_run(path.before, path.again)
        if path.new and (place := self._log.place(path.before)) >= 0:
            self._abandon(place)

    def _look_at_piece(self, path: _Path) -> int:
        """The next chunks of a path; how many."""
        residents, memory = self._residents, self._memory
        marks = marks_of(path.keys[path.at : path.at + path.piece])
        handles = residents.find_all(marks)
        seen, runs = [residents.seen[handle] if handle >= 0 else 0 for handle in handles], [0] * len(marks)
        missing = [at for at, handle in enumerate(handles) if handle < 0]
        for at, note in zip(missing, memory.pop_all([marks[at] for at in missing]), strict=True):
            if note is not None:
                seen[at], runs[at], _ = note
        deepest = len(marks) - 1
        while deepest >= 0 and not seen[deepest]:
            deepest -= 1
        if not path.classes:
            self._classify(path, seen, deepest)
        self._see_again(path, marks[: deepest + 1], handles, seen, runs)
        self._see_new(path, marks[deepest + 1 :])
        memory.settle()
        path.at += len(marks)
        return len(marks)

    def _classify(self, path: _Path, seen: list[int], deepest: int) -> None:
        """Find out what classes the chunks of a path have. seen, deepest: of its first piece."""
        if len(seen) == len(path.keys):
            path.new, seen_by = seen.count(0), seen[deepest] if deepest >= 0 else 0
        else:
            path.new, seen_by = self._new_in_long(path.keys)
        path.classes = classes_for(path.new, path.observation.hints, follows=0 < seen_by < PUBLIC_SEEN_MIN)

    def _new_in_long(self, keys: tuple[Key, ...]) -> tuple[int, int]:
        """How many chunks of a long path are new, and how often the one before them was seen.

        It is taken for granted that those before a chunk that was seen were seen as well.
        """
        known, new, seen_by = 0, len(keys), 0
        while known < new:
            middle = (known + new) // 2
            seen = self._seen(mark_of(keys[middle]))
            if seen:
                known, seen_by = middle + 1, seen
            else:
                new = middle
        return len(keys) - known, seen_by

    def _seen(self, mark: int) -> int:
        """How often a chunk was seen."""
        handle = self._residents.find(mark)
        if handle >= 0:
            return self._residents.seen[handle]
        note = self._memory.get(mark)
        return 0 if note is None else note[0]

    def _see_again(self, path: _Path, marks: list[int], handles: list[int], seen: list[int], runs: list[int]) -> None:
        """Chunks down to the deepest that was seen before. seen, runs: what is remembered of those not in the tier."""
        residents, log, classes = self._residents, self._log, path.classes
        all_seen, all_runs, parents = residents.seen, residents.runs, residents.parents
        parent = path.parent
        for at, mark in enumerate(marks):
            handle = handles[at]
            was = all_runs[handle] if handle >= 0 else runs[at]
            if was:
                if was != path.before:
                    self._left_run(path.before, path.again)
                    path.before, path.again = was, 0
                path.again += 1
            times = min(seen[at] + 1, SEEN_MAX)
            if classes[times] != path.of:
                self._begin_run(path, classes[times])
            run = path.run
            log.alive[run % log.size] += 1
            if handle >= 0:
                all_seen[handle], all_runs[handle] = times, run
                if parent and not parents[handle]:
                    parents[handle] = parent
                    residents.adopt((handle,))
            else:
                self._memory.expect(mark, (times, run, parent))
            parent = mark
        path.parent = parent

    def _see_new(self, path: _Path, marks: list[int]) -> None:
        """Chunks that nobody saw before, at the end of a piece. The last one of the path is of a class of its own."""
        if not marks:
            return
        number = path.classes[1]
        is_end = path.at + path.piece >= len(path.keys)
        body = marks[:-1] if is_end else marks
        if body:
            self._see_new_of(path, body, number)
        if is_end:
            self._see_new_of(path, marks[-1:], tail_class(number))

    def _see_new_of(self, path: _Path, marks: list[int], number: int) -> None:
        if number != path.of:
            self._begin_run(path, number)
        self._log.alive[path.run % self._log.size] += len(marks)
        self._memory.expect_new(marks, path.run, path.parent)
        path.parent = marks[-1]

    def _begin_run(self, path: _Path, number: int) -> None:
        path.of = number
        path.run = self.open_run(number * LEVELS + path.level)

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

    def _finished(self, path: _Path) -> int:
        """What the request computed itself was in no path when it arrived; how many chunks were looked at.

        All before a chunk that is known were in that path.
        """
        new: list[int] = []
        for key in reversed(path.keys):
            mark = mark_of(key)
            if self._seen(mark):
                path.parent = mark
                break
            new.append(mark)
        if new:
            observation = path.observation
            self._see_new_of(path, new[::-1], classes_for(sum(observation.new_chunks), observation.hints)[1])
            self._memory.settle()
        return len(new) + 1
