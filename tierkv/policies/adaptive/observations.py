"""Processing of request observations: count chunks, assign them to runs, and feed the value model."""

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
from tierkv.policies.adaptive.order import EvictionOrder
from tierkv.policies.adaptive.residents import Residents
from tierkv.policies.adaptive.runs import NO_RUN, RunLog
from tierkv.policies.adaptive.value_model import ValueModel
from tierkv.policies.ghost import mark_of, marks_of
from tierkv.types.keys import Key
from tierkv.types.observation import RequestObservation, RequestPhase

PATH_CHUNKS_MAX = 2048
"""Longest processed part of a path in chunks, from the front."""

WHOLE_CHUNKS_MAX = 256
"""Longest path in chunks that is processed at once: 1 ms of work if all chunks were seen before and evicted."""
PIECE_CHUNKS = 128
"""Chunks per piece of a longer path: 0.5 ms of work each."""
OBSERVATION_CHUNKS = 256
"""Chunks processed in the call with the observation. Later verbs process the rest."""
PENDING_MAX = 256
"""Largest number of pending paths. Further paths are not processed."""

LEARN_EVERY = 2
"""Number of requests between two updates of a class: 0.1 ms of work each."""


@dataclass(slots=True)
class _Path:
    """A path of a request, and the state of its processing."""

    keys: tuple[Key, ...]
    piece: int
    """Number of chunks to process at once."""
    observation: RequestObservation
    level: int
    at: int = 0
    """Number of processed chunks."""
    new: int = 0
    """Number of chunks that the request is the first to have."""
    classes: bytes = b""
    """Result of :func:`classes_for`; empty before the first piece is processed."""
    run: int = NO_RUN
    """Number of the open run."""
    run_class: int = -1
    """Class of the open run."""
    parent: int = 0
    """Mark of the chunk before ``at``; 0 at the start."""
    previous_run: int = NO_RUN
    """Run that the last processed chunks belonged to until now."""
    previous_chunks: int = 0
    """Number of consecutive processed chunks that belonged to ``previous_run``."""


class RequestTracker:
    """Counts the requests per chunk, and assigns each request's chunks to runs of their classes."""

    def __init__(
        self, log: RunLog, values: ValueModel, order: EvictionOrder, memory: Memory, residents: Residents
    ) -> None:
        self._log = log
        self._values = values
        self._order = order
        self._memory = memory
        self._residents = residents
        self.now_s = 0.0
        """Time of the latest observation in seconds."""
        self._count = 0
        self.has_observed = False
        """Whether any request was observed."""
        self._pending: deque[_Path] = deque()

    def open_run(self, queue: int) -> int:
        """Start a run now, in a queue (class and level), and return its number."""
        self._order.end_run(self._log.next_place)
        return self._log.open(self.now_s, queue)

    def observe_request(self, observation: RequestObservation) -> None:
        """Queue the paths of a request for processing, and process the first of them."""
        self.now_s = max(self.now_s, observation.now_s)
        self._log.advance_ages(self.now_s, self._values)
        level = level_of(observation.hints)
        for keys in observation.paths:
            if keys and len(self._pending) < PENDING_MAX:
                piece = len(keys) if len(keys) <= WHOLE_CHUNKS_MAX else PIECE_CHUNKS
                self._pending.append(_Path(keys[:PATH_CHUNKS_MAX], piece, observation, level))
        self.process_pending(OBSERVATION_CHUNKS)
        if observation.phase is RequestPhase.ARRIVED:
            self.has_observed = True
            self._count += 1
            if self._count % LEARN_EVERY == 0:
                self._values.learn(self.now_s)

    def process_pending(self, chunks: int = PIECE_CHUNKS) -> None:
        """Process up to ``chunks`` chunks of pending paths, rounded up to whole pieces."""
        pending = self._pending
        while pending and chunks > 0:
            path = pending[0]
            if path.observation.phase is RequestPhase.FINISHED:
                chunks -= self._finished(path)
                pending.popleft()
                continue
            chunks -= self._process_piece(path)
            if path.at == len(path.keys):
                pending.popleft()
                self._arrived(path)

    def _arrived(self, path: _Path) -> None:
        """Finish a path whose chunks are all processed."""
        self._leave_run(path.previous_run, path.previous_chunks)
        if path.new and (place := self._log.place(path.previous_run)) >= 0:
            self._abandon(place)

    def _process_piece(self, path: _Path) -> int:
        """Process the next piece of a path and return its number of chunks."""
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
        self._process_seen(path, marks[: deepest + 1], handles, seen, runs)
        self._process_new(path, marks[deepest + 1 :])
        memory.bound_newcomers()
        path.at += len(marks)
        return len(marks)

    def _classify(self, path: _Path, seen: list[int], deepest: int) -> None:
        """Determine the classes of a path's chunks; ``seen`` and ``deepest`` belong to its first piece."""
        if len(seen) == len(path.keys):
            path.new, seen_by = seen.count(0), seen[deepest] if deepest >= 0 else 0
        else:
            path.new, seen_by = self._new_in_long(path.keys)
        path.classes = classes_for(path.new, path.observation.hints, follows=0 < seen_by < PUBLIC_SEEN_MIN)

    def _new_in_long(self, keys: tuple[Key, ...]) -> tuple[int, int]:
        """Number of new chunks of a long path, and number of requests that had the chunk before them.

        A binary search. It assumes that all chunks before a seen chunk were seen as well.
        """
        known, new, seen_by = 0, len(keys), 0
        while known < new:
            middle = (known + new) // 2
            seen = self._times_seen(mark_of(keys[middle]))
            if seen:
                known, seen_by = middle + 1, seen
            else:
                new = middle
        return len(keys) - known, seen_by

    def _times_seen(self, mark: int) -> int:
        """Number of requests that had a chunk in their path."""
        handle = self._residents.find(mark)
        if handle >= 0:
            return self._residents.seen[handle]
        note = self._memory.get(mark)
        return 0 if note is None else note[0]

    def _process_seen(
        self, path: _Path, marks: list[int], handles: list[int], seen: list[int], runs: list[int]
    ) -> None:
        """Process chunks down to the deepest seen one. ``seen`` and ``runs`` describe chunks not in the tier."""
        residents, log, classes = self._residents, self._log, path.classes
        all_seen, all_runs, parents = residents.seen, residents.runs, residents.parents
        parent = path.parent
        for at, mark in enumerate(marks):
            handle = handles[at]
            was = all_runs[handle] if handle >= 0 else runs[at]
            if was:
                if was != path.previous_run:
                    self._leave_run(path.previous_run, path.previous_chunks)
                    path.previous_run, path.previous_chunks = was, 0
                path.previous_chunks += 1
            times = min(seen[at] + 1, SEEN_MAX)
            if classes[times] != path.run_class:
                self._begin_run(path, classes[times])
            run = path.run
            log.alive[run % log.size] += 1
            if handle >= 0:
                all_seen[handle], all_runs[handle] = times, run
                if parent and not parents[handle]:
                    parents[handle] = parent
                    residents.link_parents((handle,))
            else:
                self._memory.add_newcomer(mark, (times, run, parent))
            parent = mark
        path.parent = parent

    def _process_new(self, path: _Path, marks: list[int]) -> None:
        """Process new chunks at the end of a piece. The last chunk of the path has a class of its own."""
        if not marks:
            return
        number = path.classes[1]
        is_end = path.at + path.piece >= len(path.keys)
        body = marks[:-1] if is_end else marks
        if body:
            self._add_new(path, body, number)
        if is_end:
            self._add_new(path, marks[-1:], tail_class(number))

    def _add_new(self, path: _Path, marks: list[int], number: int) -> None:
        if number != path.run_class:
            self._begin_run(path, number)
        self._log.alive[path.run % self._log.size] += len(marks)
        self._memory.add_newcomers(marks, path.run, path.parent)
        path.parent = marks[-1]

    def _begin_run(self, path: _Path, number: int) -> None:
        path.run_class = number
        path.run = self.open_run(number * LEVELS + path.level)

    def _leave_run(self, number: int, chunks: int) -> None:
        """Report reused chunks of a run, which belong to another run now."""
        log = self._log
        if (place := log.place(number)) >= 0:
            self._values.reused(log.queues[place] // LEVELS, self.now_s - log.times[place], chunks)
            log.alive[place] = max(0, log.alive[place] - chunks)

    def _abandon(self, place: int) -> None:
        """Reclassify the rest of a run after a request continued from its middle with new chunks."""
        number, level = divmod(self._log.queues[place], LEVELS)
        if self._log.alive[place] and is_private(number):
            self._order.reclassify(place, ABANDONED * LEVELS + level)

    def _finished(self, path: _Path) -> int:
        """Add the chunks that the request computed after its arrival; return the number of processed chunks.

        All chunks before a known chunk were in the path at arrival.
        """
        new: list[int] = []
        for key in reversed(path.keys):
            mark = mark_of(key)
            if self._times_seen(mark):
                path.parent = mark
                break
            new.append(mark)
        if new:
            observation = path.observation
            self._add_new(path, new[::-1], classes_for(sum(observation.new_chunks), observation.hints)[1])
            self._memory.bound_newcomers()
        return len(new) + 1
