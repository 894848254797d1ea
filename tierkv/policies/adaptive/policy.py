"""The policy itself: verbs in, victims and refusals out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby

from tierkv.policies.adaptive.classes import LEVEL_NORMAL, LEVELS, classes_for
from tierkv.policies.adaptive.memory import Memory, Note
from tierkv.policies.adaptive.order import LeavingOrder
from tierkv.policies.adaptive.residents import NOBODY, Residents
from tierkv.policies.adaptive.runs import NO_RUN, RunLog
from tierkv.policies.adaptive.sightings import Watcher
from tierkv.policies.adaptive.worths import Worths
from tierkv.policies.ghost import mark_of
from tierkv.policies.rings import PASSED_OVER_MAX, longer_bytes
from tierkv.types.hints import NO_HINTS
from tierkv.types.keys import Key
from tierkv.types.sighting import Sighting

CHUNKS_EXPECTED = 1 << 16
"""Where it is not known how many chunks there will be, memory is sized for so many."""

STRAY_QUEUE = classes_for(9, NO_HINTS)[1] * LEVELS + LEVEL_NORMAL
"""What a chunk counts as that came without a request having asked for it, as far as is known."""

PARKED_AT_ONCE_MAX = 2048
"""Chunks that one choice passes over because others build on them: a millisecond's work, once in a chunk's life."""

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
        self._worths = Worths()
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

    def sighted(self, sighting: Sighting) -> None:
        """A request arrived or finished: learn from it, and note what its chunks are from now on."""
        self._watcher.sighted(sighting)

    # -- coming and being used ---------------------------------------------------------------------------------------

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        """Chunks came; tail first."""
        if self._rings.make_room(handles):
            self._grow()
        runs, log = self._residents.runs, self._log
        for handle, key in zip(handles, keys, strict=True):
            mark = mark_of(key)
            self._residents.insert(handle, mark, self._memory.pop(mark) or _UNKNOWN)
        for handle in handles:
            if log.place(runs[handle]) < 0:
                runs[handle] = self._stray_run()
            self._states[handle] = _AT_HOME
        for place, batch in groupby(handles, lambda handle: log.place(runs[handle])):
            self._order.enter(place, tuple(batch))
        self._residents.adopt(handles)

    def touch(self, handles: Sequence[int]) -> None:
        """A request used these: they go to the run that they were last seen in."""
        runs, log, states = self._residents.runs, self._log, self._states
        for handle in handles:
            states[handle] = _AT_HOME
            if log.place(runs[handle]) < 0:
                runs[handle] = self._stray_run()
        for place, batch in groupby(handles, lambda handle: log.place(runs[handle])):
            self._order.put(place, tuple(batch))

    def release(self, handles: Sequence[int]) -> None:
        """A hold is a use."""
        self.touch(handles)

    def _stray_run(self) -> int:
        """The run of one more chunk that no request is known to have asked for at this time."""
        place = self._log.place(self._stray)
        if place < 0 or self._log.times[place] != self._watcher.now_s:
            self._stray = self._watcher.open_run(STRAY_QUEUE)
            place = self._log.place(self._stray)
        self._log.alive[place] += 1
        return self._stray

    # -- leaving -----------------------------------------------------------------------------------------------------

    def remove(self, handles: Sequence[int]) -> None:
        """Forget these, altogether."""
        self._rings.unlink(handles)
        for handle in handles:
            self._residents.take_out(handle)
            self._log.lost(self._residents.runs[handle])
        for handle in handles:
            self._without_child(self._residents.orphan(handle))

    def _without_child(self, handle: int) -> bool:
        """A chunk, or NOBODY, has no child any more: if it only waited for that, it leaves soon. Whether it does."""
        if handle == NOBODY or self._states[handle] != _PARKED:
            return False
        self._rings.move(self._order.leaving, (handle,))
        self._states[handle] = _AT_HOME
        return True

    def evict(self, count: int, holds: Sequence[int]) -> list[int]:
        """Forget and return those that are worth least."""
        victims: list[int] = []
        self._parks = PARKED_AT_ONCE_MAX
        left = self._take_from(self._order.leaving, victims, count, holds, PASSED_OVER_MAX)
        if len(victims) < count:
            for _, ring in self._order.worst_first(self._watcher.now_s):
                left = self._take_from(ring, victims, count, holds, left)
                if len(victims) == count or not left:
                    break
        if len(victims) < count and left:
            self._take_from(self._order.parked, victims, count, holds, left)
        if len(victims) < count:
            self._take_back(victims)
            return []
        residents = self._residents
        for handle in victims:
            residents.take_out(handle)
            note = (residents.seen[handle], residents.runs[handle], residents.parents[handle])
            self._memory.left(residents.marks[handle], note)
        return victims

    def _take_from(self, ring: int, victims: list[int], count: int, holds: Sequence[int], left: int) -> int:
        """Add chunks of a ring to the victims, deepest first, as many as are missing.

        left: how many held ones may be passed over; they are put aside. What has children is parked; when too many
        were by now, it leaves before them.

        Returns:
            How many may still be passed over; with none left there may be more victims in the ring.
        """
        rings, residents, may_park = self._rings, self._residents, ring != self._order.parked
        handle = rings.oldest(ring)
        while handle >= 0 and len(victims) < count and left:
            if holds[handle]:
                rings.put_aside(handle)
                left -= 1
            elif residents.children[handle] and may_park and self._parks:
                rings.move(self._order.parked, (handle,))
                self._states[handle] = _PARKED
                self._parks -= 1
            else:
                rings.unlink((handle,))
                self._states[handle] = _AT_HOME
                victims.append(handle)
                if self._without_child(residents.orphan(handle)) and ring != self._order.leaving:
                    left = self._take_from(self._order.leaving, victims, count, holds, left)
            handle = rings.oldest(ring)  # whatever was done with it, it is not here any more
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
        worths = self._worths_of(keys)
        best_first = sorted(range(len(keys)), key=lambda i: -worths[i])
        admitted = free
        for worth in self._worths_here(short):
            if worth > worths[best_first[admitted]]:
                break
            admitted += 1
        return set(best_first[admitted:])

    def _worths_of(self, keys: Sequence[Key]) -> list[float]:
        """What newcomers are worth, each at most as much as what it builds on: without that it is of no use."""
        log, now_s = self._log, self._watcher.now_s
        worths: list[float] = []
        parent, worth, run, run_worth = 0, 0.0, NO_RUN, self._order.worth(STRAY_QUEUE, 0.0)
        for key in keys:
            mark = mark_of(key)
            note = self._memory.get(mark) or _UNKNOWN
            if note[1] != run:
                run, place = note[1], log.place(note[1])
                queue, age_s = (STRAY_QUEUE, 0.0) if place < 0 else (log.queues[place], now_s - log.times[place])
                run_worth = self._order.worth(queue, age_s)
            worth = min(run_worth, worth) if worths and note[2] == parent else run_worth
            worths.append(worth)
            parent = mark
        return worths

    def _worths_here(self, count: int) -> list[float]:
        """What the ``count`` chunks that would leave first are worth, ascending; about: holds are not known."""
        worths: list[float] = []
        self._note_worths(self._order.leaving, 0.0, worths, count)
        if len(worths) < count:
            for worth, ring in self._order.worst_first(self._watcher.now_s):
                self._note_worths(ring, worth, worths, count)
                if len(worths) == count:
                    break
        return worths

    def _note_worths(self, ring: int, worth: float, worths: list[float], count: int) -> None:
        handle = self._rings.oldest(ring)
        while handle >= 0 and len(worths) < count:
            worths.append(worth)
            handle = self._rings.after(handle)
