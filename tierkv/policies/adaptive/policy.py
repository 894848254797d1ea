"""The policy itself: verbs in, victims and refusals out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, islice

from tierkv.policies.adaptive.classes import LEVEL_NORMAL, LEVELS, classes_for
from tierkv.policies.adaptive.memory import Memory, Note
from tierkv.policies.adaptive.observations import Watcher
from tierkv.policies.adaptive.order import LeavingOrder
from tierkv.policies.adaptive.residents import NOBODY, Residents
from tierkv.policies.adaptive.runs import NO_RUN, RunLog
from tierkv.policies.adaptive.value_model import ValueModel
from tierkv.policies.ghost import marks_of
from tierkv.structures.rings import PASSED_OVER_MAX, longer_bytes
from tierkv.types.hints import NO_HINTS
from tierkv.types.keys import Key
from tierkv.types.observation import RequestObservation

CHUNKS_EXPECTED = 1 << 16
"""Where it is not known how many chunks there will be, memory is sized for so many."""

STRAY_QUEUE = classes_for(9, NO_HINTS)[1] * LEVELS + LEVEL_NORMAL
"""What a chunk counts as that came without a request having asked for it, as far as is known."""

PARKED_AT_ONCE_MAX = 1024
"""Chunks that one choice passes over because others build on them: half a millisecond, once in its life."""

_AT_HOME, _PARKED = 0, 1
_UNKNOWN: Note = (1, NO_RUN, 0)


class AdaptivePolicy:
    """Keeps what comes back soonest for the room it takes. See :class:`tierkv.abc.EvictionPolicy`.

    The victim is the deepest chunk of the run that is worth least, at its class and age; of each class only the oldest
    and the youngest run are looked at. If the youngest would lose, a newcomer of its kind is not let in.

    Until it is told of requests, it is least recently used.
    """

    def __init__(self, chunks_max: int | None = None) -> None:
        expected = chunks_max or CHUNKS_EXPECTED
        self._log = RunLog(expected)
        self._worths = ValueModel()
        self._order = LeavingOrder(self._log, self._worths, chunks_max)
        self._rings = self._order.rings
        self._memory = Memory(expected, self._log.lost)
        self._residents = Residents()
        self._states = bytearray()
        self._watcher = Watcher(self._log, self._worths, self._order, self._memory, self._residents)
        self._stray = NO_RUN
        self._parks = 0
        self._grow()

    def _grow(self) -> None:
        self._residents.grow(self._rings.length)
        longer_bytes(self._states, self._rings.length)

    def __len__(self) -> int:
        """How many handles are known, held or not."""
        return len(self._residents)

    def observe_request(self, observation: RequestObservation) -> None:
        """A request arrived or finished: learn from it, and note what its chunks are from now on."""
        self._watcher.observe_request(observation)

    # -- coming and being used ---------------------------------------------------------------------------------------

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        """Chunks came; tail first."""
        if self._rings.make_room(handles):
            self._grow()
        self._watcher.go_on()
        marks = marks_of(keys)
        self._residents.insert(handles, marks, (note or _UNKNOWN for note in self._memory.pop_all(marks)))
        for place, batch in self._by_run(handles):
            self._order.enter(place, batch)
        self._residents.adopt(handles)

    def touch(self, handles: Sequence[int]) -> None:
        """A request used these: they go to the run that they were last seen in."""
        self._watcher.go_on()
        for place, batch in self._by_run(handles):
            self._order.put(place, batch)

    def release(self, handles: Sequence[int]) -> None:
        """A hold is a use."""
        self.touch(handles)

    def release_after_write(self, handles: Sequence[int]) -> None:
        """Those that were passed over leave first of all: it was their turn."""
        for handle in reversed(handles):
            if self._rings.is_aside(handle):
                self._rings.prepend(self._order.leaving, handle)
                self._states[handle] = _AT_HOME

    def _by_run(self, handles: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """Places of runs, each with neighbours of it, who are at home there from now on.

        What was done with one must be done before the next is asked for, which may end a run.
        """
        runs, states = self._residents.runs, self._states
        for number, neighbours in groupby(handles, runs.__getitem__):
            batch = tuple(neighbours)
            place = self._log.place(number)
            if place < 0:
                stray = self._stray_run(len(batch))
                place = self._log.place(stray)
                for handle in batch:
                    runs[handle] = stray
            for handle in batch:
                states[handle] = _AT_HOME
            yield place, batch

    def _stray_run(self, chunks: int) -> int:
        """The run of so many more chunks that no request is known to have asked for at this time."""
        place = self._log.place(self._stray)
        if place < 0 or self._log.times[place] != self._watcher.now_s:
            self._stray = self._watcher.open_run(STRAY_QUEUE)
            place = self._log.place(self._stray)
        self._log.alive[place] += chunks
        return self._stray

    # -- leaving -----------------------------------------------------------------------------------------------------

    def remove(self, handles: Sequence[int]) -> None:
        """Forget these, altogether."""
        self._rings.unlink(handles)
        self._residents.take_out(handles)
        self._log.lost([self._residents.runs[handle] for handle in handles])
        for handle in handles:
            self._without_child(self._residents.orphan(handle))

    def _without_child(self, handle: int) -> bool:
        """A chunk, or NOBODY, has no child any more: if it only waited for that, it leaves soon. Whether it does."""
        if handle == NOBODY or self._states[handle] != _PARKED:
            return False
        self._rings.move(self._order.leaving, (handle,))
        self._states[handle] = _AT_HOME
        return True

    def evict(self, count: int, pins: Sequence[int]) -> list[int]:
        """Forget and return those that are worth least."""
        victims: list[int] = []
        self._parks = PARKED_AT_ONCE_MAX
        left = self._take_from(self._order.leaving, victims, count, pins, PASSED_OVER_MAX)
        if len(victims) < count:
            for _, ring in self._order.worst_first(self._watcher.now_s):
                left = self._take_from(ring, victims, count, pins, left)
                if len(victims) == count or not left:
                    break
        if len(victims) < count and left:
            self._take_from(self._order.parked, victims, count, pins, left)
        if len(victims) < count:
            self._take_back(victims)
            return []
        residents = self._residents
        residents.take_out(victims)
        seen, runs, parents, marks = residents.seen, residents.runs, residents.parents, residents.marks
        notes = [(seen[handle], runs[handle], parents[handle]) for handle in victims]
        self._memory.left([marks[handle] for handle in victims], notes)
        return victims

    def _take_from(self, ring: int, victims: list[int], count: int, pins: Sequence[int], left: int) -> int:
        """Add chunks of a ring to the victims, deepest first, as many as are missing.

        left: how many held ones may be passed over; they are put aside. What has children is parked; when too many
        were by now, it leaves before them.

        Returns:
            How many may still be passed over; with none left there may be more victims in the ring.
        """
        rings, orphan, children = self._rings, self._residents.orphan, self._residents.children
        following, previous, states, end = rings.next, rings.previous, self._states, ~ring
        may_park = ring != self._order.parked
        while (handle := following[end]) >= 0 and len(victims) < count and left:
            if pins[handle]:
                rings.put_aside(handle)
                left -= 1
            elif children[handle] and may_park and self._parks:
                rings.move(self._order.parked, (handle,))
                states[handle] = _PARKED
                self._parks -= 1
            else:
                after = following[handle]
                following[end], previous[after] = after, end
                states[handle] = _AT_HOME
                victims.append(handle)
                childless = orphan(handle, after)
                if childless != NOBODY and self._without_child(childless) and ring != self._order.leaving:
                    left = self._take_from(self._order.leaving, victims, count, pins, left)
        return left

    def _take_back(self, victims: Sequence[int]) -> None:
        """Not enough were found: these do not leave now, but first of all next time."""
        for handle in reversed(victims):
            self._rings.prepend(self._order.leaving, handle)
        self._residents.adopt(victims)

    # -- letting in --------------------------------------------------------------------------------------------------

    def refuse(self, keys: Sequence[Key], free: int) -> Collection[int]:
        """Those that would leave before any of those that are here."""
        short = len(keys) - free
        if short <= 0 or not self._watcher.has_seen:
            return ()
        self._watcher.go_on()
        worths = self._worths_of(keys)
        best_first = sorted(range(len(keys)), key=[-worth for worth in worths].__getitem__)
        admitted = free
        for worth in islice(self._worths_here(), short):
            if worth > worths[best_first[admitted]]:
                break
            admitted += 1
        return set(best_first[admitted:])

    def _worths_of(self, keys: Sequence[Key]) -> list[float]:
        """What newcomers are worth, each at most as much as what it builds on: without that it is of no use."""
        log, now_s = self._log, self._watcher.now_s
        worths: list[float] = []
        parent, worth, run, run_worth = 0, 0.0, NO_RUN, self._order.worth(STRAY_QUEUE, 0.0)
        for mark in marks_of(keys):
            note = self._memory.get(mark) or _UNKNOWN
            if note[1] != run:
                run, place = note[1], log.place(note[1])
                queue, age_s = (STRAY_QUEUE, 0.0) if place < 0 else (log.queues[place], now_s - log.times[place])
                run_worth = self._order.worth(queue, age_s)
            worth = min(run_worth, worth) if worths and note[2] == parent else run_worth
            worths.append(worth)
            parent = mark
        return worths

    def _worths_here(self) -> Iterator[float]:
        """What chunks are worth, those first that would leave first; about: holds are not known."""
        following = self._rings.next
        handle = self._rings.oldest(self._order.leaving)
        while handle >= 0:
            yield 0.0
            handle = following[handle]
        for worth, ring in self._order.worst_first(self._watcher.now_s):
            handle = self._rings.oldest(ring)
            while handle >= 0:
                yield worth
                handle = following[handle]
