"""Policy ``adaptive``: verbs of the eviction policy, on top of the other modules of the package."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, islice

from tierkv.policies.adaptive.classes import LEVEL_NORMAL, LEVELS, classes_for
from tierkv.policies.adaptive.memory import Memory, Note
from tierkv.policies.adaptive.observations import RequestTracker
from tierkv.policies.adaptive.order import EvictionOrder
from tierkv.policies.adaptive.residents import NO_HANDLE, Residents
from tierkv.policies.adaptive.runs import NO_RUN, RunLog
from tierkv.policies.adaptive.value_model import ValueModel
from tierkv.policies.ghost import marks_of
from tierkv.structures.columns import longer_bytes
from tierkv.structures.rings import PASSED_OVER_MAX
from tierkv.types.hints import NO_HINTS
from tierkv.types.keys import Key
from tierkv.types.observation import RequestObservation

CHUNKS_EXPECTED = 1 << 16
"""Number of chunks that the memory is sized for where the size of the tier is unknown."""

STRAY_QUEUE = classes_for(9, NO_HINTS)[1] * LEVELS + LEVEL_NORMAL
"""Queue of stray chunks: chunks stored without an observed request."""

PARKED_AT_ONCE_MAX = 1024
"""Largest number of chunks that one choice parks: 0.5 ms of work, mostly once per chunk."""

_IN_RUN, _PARKED = 0, 1
_UNKNOWN: Note = (1, NO_RUN, 0)


class AdaptivePolicy:
    """Eviction policy that keeps the chunks with the most expected reuses per second of keeping.

    The victim is the deepest chunk of the run with the lowest value. Only the oldest and the youngest run of each class
    are compared. A new chunk with a lower value than the chunk to be evicted for it is refused.

    Without observations the policy is least recently used.
    """

    def __init__(self, chunks_max: int | None = None) -> None:
        expected = chunks_max or CHUNKS_EXPECTED
        self._log = RunLog(expected)
        self._values = ValueModel()
        self._order = EvictionOrder(self._log, self._values, chunks_max)
        self._rings = self._order.rings
        self._memory = Memory(expected, self._log.drop_chunks)
        self._residents = Residents()
        self._states = bytearray()
        self._tracker = RequestTracker(self._log, self._values, self._order, self._memory, self._residents)
        self._stray = NO_RUN
        self._parks_left = 0
        self._stop = NO_HANDLE
        self._grow()

    def _grow(self) -> None:
        self._residents.grow(self._rings.length)
        longer_bytes(self._states, self._rings.length)

    def __len__(self) -> int:
        """Number of known handles, pinned or not."""
        return len(self._residents)

    def observe_request(self, observation: RequestObservation) -> None:
        """Learn from a request, and assign its chunks to their new runs."""
        self._tracker.observe_request(observation)

    # -- additions and uses -------------------------------------------------------------------------------------------

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        """Add chunks; tail first."""
        self._insert(handles, keys)
        for place, batch in self._by_run(handles):
            self._order.append_to_run(place, batch)
        self._residents.link_parents(handles)

    def add_behind(self, handles: Sequence[int], keys: Sequence[Key], behind: int) -> None:
        """Add chunks before ``behind`` in its run; those of other runs as :meth:`add`. Stray chunks join its run."""
        self._insert(handles, keys)
        runs, run = self._residents.runs, self._residents.runs[behind]
        place = self._log.place(run)
        for handle in handles if place >= 0 else ():
            if self._log.place(runs[handle]) < 0:
                runs[handle] = run
                self._log.alive[place] += 1
        is_apart = self._rings.is_aside(behind) or self._states[behind] != _IN_RUN
        for other, batch in self._by_run(handles):
            if other == place and not is_apart:
                self._order.insert_before(place, batch, behind)
            else:
                self._order.append_to_run(other, batch)
        self._residents.link_parents(handles)

    def _insert(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        """Enter new chunks in the columns, with what is remembered of them."""
        if self._rings.make_room(handles):
            self._grow()
        self._tracker.process_pending()
        marks = marks_of(keys)
        self._residents.insert(handles, marks, (note or _UNKNOWN for note in self._memory.pop_all(marks)))

    def touch(self, handles: Sequence[int]) -> None:
        """Move used chunks to the run that they were last seen in."""
        self._tracker.process_pending()
        for place, batch in self._by_run(handles):
            self._order.move_to_run(place, batch)

    def release(self, handles: Sequence[int]) -> None:
        """Treat the end of the last pin as a use."""
        self.touch(handles)

    def release_after_write(self, handles: Sequence[int]) -> None:
        """Move chunks that a choice passed over to the ring *first out*."""
        for handle in reversed(handles):
            if self._rings.is_aside(handle):
                self._rings.prepend(self._order.first_out, handle)
                self._states[handle] = _IN_RUN

    def _by_run(self, handles: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield places of runs, each with consecutive handles that belong to it.

        The caller must move the handles before it takes the next item, which may end a run.
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
                states[handle] = _IN_RUN
            yield place, batch

    def _stray_run(self, chunks: int) -> int:
        """Run for stray chunks of the present time, with ``chunks`` more chunks."""
        place = self._log.place(self._stray)
        if place < 0 or self._log.times[place] != self._tracker.now_s:
            self._stray = self._tracker.open_run(STRAY_QUEUE)
            place = self._log.place(self._stray)
        self._log.alive[place] += chunks
        return self._stray

    # -- evictions -----------------------------------------------------------------------------------------------------

    def remove(self, handles: Sequence[int]) -> None:
        """Forget chunks without remembering them."""
        self._rings.unlink(handles)
        self._residents.remove(handles)
        self._log.drop_chunks([self._residents.runs[handle] for handle in handles])
        for handle in handles:
            self._unpark_childless(self._residents.unlink_parent(handle))

    def _unpark_childless(self, handle: int) -> bool:
        """Move a chunk without children to the ring *first out* if it is parked. Return whether it was."""
        if handle == NO_HANDLE or self._states[handle] != _PARKED:
            return False
        self._rings.move(self._order.first_out, (handle,))
        self._states[handle] = _IN_RUN
        return True

    def evict(self, count: int, pins: Sequence[int]) -> list[int]:
        """Forget and return the chunks with the lowest value."""
        return self._evict(count, count, pins, NO_HANDLE)

    def evict_before(self, count: int, pins: Sequence[int], stop: int) -> list[int]:
        """Forget and return up to ``count`` chunks with the lowest value, until ``stop`` is the next one."""
        return self._evict(count, 1, pins, stop)

    def _evict(self, count: int, least: int, pins: Sequence[int], stop: int) -> list[int]:
        self._stop = stop
        victims: list[int] = []
        self._parks_left = PARKED_AT_ONCE_MAX
        left = self._collect_victims(self._order.first_out, victims, count, pins, PASSED_OVER_MAX)
        if len(victims) < count:
            for _, ring in self._order.lowest_first(self._tracker.now_s):
                left = self._collect_victims(ring, victims, count, pins, left)
                if len(victims) == count or not left:
                    break
        if len(victims) < count and left:
            self._collect_victims(self._order.parked, victims, count, pins, left)
        if len(victims) < least:
            self._restore_victims(victims)
            return []
        residents = self._residents
        residents.remove(victims)
        seen, runs, parents, marks = residents.seen, residents.runs, residents.parents, residents.marks
        notes = [(seen[handle], runs[handle], parents[handle]) for handle in victims]
        self._memory.add_evicted([marks[handle] for handle in victims], notes)
        return victims

    def _collect_victims(self, ring: int, victims: list[int], count: int, pins: Sequence[int], left: int) -> int:
        """Add chunks of a ring to the victims, deepest first, until there are ``count``.

        Pinned chunks are set aside. Chunks with children are parked, until this choice has parked too many. Further
        chunks with children become victims.

        Args:
            ring: number of the ring.
            victims: list to extend.
            count: number of victims needed in total.
            pins: number of pins by handle.
            left: number of pinned chunks that may still be passed over.

        Returns:
            The remaining number of pinned chunks that may be passed over. At 0 the search ends: it took too long, or
            the chunk is next before which this choice has to end.
        """
        rings, unlink_parent, children = self._rings, self._residents.unlink_parent, self._residents.children
        following, previous, states, end = rings.next, rings.previous, self._states, ~ring
        may_park = ring != self._order.parked
        while (handle := following[end]) >= 0 and len(victims) < count and left:
            if handle == self._stop:
                return 0
            if pins[handle]:
                rings.put_aside(handle)
                left -= 1
            elif children[handle] and may_park and self._parks_left:
                rings.move(self._order.parked, (handle,))
                states[handle] = _PARKED
                self._parks_left -= 1
            else:
                after = following[handle]
                following[end], previous[after] = after, end
                states[handle] = _IN_RUN
                victims.append(handle)
                childless = unlink_parent(handle, after)
                if childless != NO_HANDLE and self._unpark_childless(childless) and ring != self._order.first_out:
                    left = self._collect_victims(self._order.first_out, victims, count, pins, left)
        return left

    def _restore_victims(self, victims: Sequence[int]) -> None:
        """Put victims of an incomplete choice into the ring *first out*, in front."""
        for handle in reversed(victims):
            self._rings.prepend(self._order.first_out, handle)
        self._residents.link_parents(victims)

    # -- admission ---------------------------------------------------------------------------------------------------

    def refuse(self, keys: Sequence[Key], free: int) -> Collection[int]:
        """Refuse new chunks with a lower value than the chunks that would be evicted for them."""
        short = len(keys) - free
        if short <= 0 or not self._tracker.has_observed:
            return ()
        self._tracker.process_pending()
        values = self._new_values(keys)
        best_first = sorted(range(len(keys)), key=[-value for value in values].__getitem__)
        admitted = free
        for value in islice(self._resident_values(), short):
            if value > values[best_first[admitted]]:
                break
            admitted += 1
        return set(best_first[admitted:])

    def _new_values(self, keys: Sequence[Key]) -> list[float]:
        """Values of new chunks. A chunk is useless without its parent, so its value is at most that of the parent."""
        log, now_s = self._log, self._tracker.now_s
        values: list[float] = []
        parent, value, run, run_value = 0, 0.0, NO_RUN, self._order.value_of(STRAY_QUEUE, 0.0)
        for mark in marks_of(keys):
            note = self._memory.get(mark) or _UNKNOWN
            if note[1] != run:
                run, place = note[1], log.place(note[1])
                queue, age_s = (STRAY_QUEUE, 0.0) if place < 0 else (log.queues[place], now_s - log.times[place])
                run_value = self._order.value_of(queue, age_s)
            value = min(run_value, value) if values and note[2] == parent else run_value
            values.append(value)
            parent = mark
        return values

    def _resident_values(self) -> Iterator[float]:
        """Values of chunks in the tier, in approximate eviction order: pins are ignored."""
        following = self._rings.next
        handle = self._rings.oldest(self._order.first_out)
        while handle >= 0:
            yield 0.0
            handle = following[handle]
        for value, ring in self._order.lowest_first(self._tracker.now_s):
            handle = self._rings.oldest(ring)
            while handle >= 0:
                yield value
                handle = following[handle]
