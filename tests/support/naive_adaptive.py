"""The policy ``adaptive`` again, as plainly as it can be said: one object per chunk and run, everything searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tierkv.policies.adaptive.classes import (
    ABANDONED,
    LEVEL_NORMAL,
    LEVEL_WEIGHT,
    PUBLIC_SEEN_MIN,
    SEEN_MAX,
    classes_for,
    is_private,
    level_of,
    tail_class,
)
from tierkv.policies.adaptive.observations import LEARN_EVERY
from tierkv.policies.adaptive.value_model import AGES, ValueModel
from tierkv.types.hints import NO_HINTS
from tierkv.types.keys import Key
from tierkv.types.observation import RequestObservation, RequestPhase


@dataclass(eq=False)
class Run:
    """Neighbours of one class in one request's path."""

    time_s: float
    number: int
    level: int
    alive: int = 0
    interval: int = 0
    handles: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Chunk:
    """Known facts about a key."""

    key: Key
    seen: int
    run: Run
    parent: Key | None


class NaiveAdaptive:
    """The same verbs. Nothing is bounded."""

    def __init__(self) -> None:
        self.values = ValueModel()
        self.now_s = 0.0
        self.requests = 0
        self.known: dict[Key, Chunk] = {}
        self.runs: list[Run] = []
        self.queues: dict[tuple[int, int], list[Run]] = {}
        self.here: dict[int, Chunk] = {}
        self.parents: dict[Key, Key] = {}  # by chunk of the tier: its parent, if that was in the tier
        self.children: dict[Key, int] = {}
        self.parked: list[int] = []
        self.first_out: list[int] = []
        self.stray: Run | None = None

    def __len__(self) -> int:
        return len(self.here)

    def handle_of(self, key: Key | None) -> int | None:
        return next((handle for handle, chunk in self.here.items() if chunk.key == key), None)

    def open_run(self, number: int, level: int) -> Run:
        run = Run(self.now_s, number, level)
        self.runs.append(run)
        return run

    def stray_run(self) -> Run:
        if self.stray is None or self.stray.time_s != self.now_s:
            self.stray = self.open_run(classes_for(9, NO_HINTS)[1], LEVEL_NORMAL)
        self.stray.alive += 1
        return self.stray

    # -- observations ------------------------------------------------------------------------------------------------

    def observe_request(self, observation: RequestObservation) -> None:
        self.now_s = max(self.now_s, observation.now_s)
        for interval, begin_s in enumerate(AGES):
            for run in self.runs:
                if run.interval == interval and self.now_s - run.time_s >= begin_s:
                    run.interval += 1
                    if run.alive:
                        self.values.at_risk(run.number, interval, run.alive)
        for path in observation.paths:
            if observation.phase is RequestPhase.ARRIVED:
                self.arrived(path, observation)
        if observation.phase is RequestPhase.ARRIVED:
            self.requests += 1
            if self.requests % LEARN_EVERY == 0:
                self.values.learn(self.now_s)

    def arrived(self, path: Sequence[Key], observation: RequestObservation) -> None:
        old = [self.known.get(key) for key in path]
        new = sum(chunk is None for chunk in old)
        deepest = next((chunk for chunk in reversed(old) if chunk is not None), None)
        follows = deepest is not None and deepest.seen < PUBLIC_SEEN_MIN
        classes = classes_for(new, observation.hints, follows=follows)
        run, last, parent = None, None, None
        for key, chunk in zip(path, old, strict=True):
            seen = 1
            if chunk is not None:
                seen, last = min(chunk.seen + 1, SEEN_MAX), chunk.run
                self.values.reused(last.number, self.now_s - last.time_s, 1)
                last.alive -= 1
            number = classes[seen]
            if key == path[-1] and seen == 1:
                number = tail_class(number)
            if run is None or run.number != number:
                run = self.open_run(number, level_of(observation.hints))
            run.alive += 1
            if chunk is None:
                self.known[key] = Chunk(key, seen, run, parent)
            else:
                chunk.seen, chunk.run = seen, run
                if self.handle_of(key) is None:
                    chunk.parent = parent
                elif parent is not None and key not in self.parents:
                    self.link_parents(key, parent)
            parent = key
        if new and last is not None and last.alive and is_private(last.number):
            self.reclassify(last)

    def reclassify(self, run: Run) -> None:
        queue = self.queues.setdefault((run.number, run.level), [])
        run.number = ABANDONED
        if run in queue:
            queue.remove(run)
            self.queues.setdefault((ABANDONED, run.level), []).append(run)

    # -- coming and being used ---------------------------------------------------------------------------------------

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        for handle, key in zip(handles, keys, strict=True):
            if key not in self.known:
                self.known[key] = Chunk(key, 1, self.stray_run(), None)
            self.here[handle] = self.known[key]
            self.children[key] = 0
            self.move_to_run(handle)
        for key in keys:
            self.link_parents(key, self.known[key].parent)

    def link_parents(self, key: Key, parent: Key | None) -> None:
        """A chunk counts with its parent, if that is in the tier."""
        if parent is not None and self.handle_of(parent) is not None:
            self.parents[key] = parent
            self.children[parent] += 1

    def move_to_run(self, handle: int) -> None:
        self.take_out(handle)
        run = self.here[handle].run
        queue = self.queues.setdefault((run.number, run.level), [])
        if run not in queue:
            queue.append(run)
        run.handles.append(handle)

    def take_out(self, handle: int) -> None:
        for handles in (self.parked, self.first_out, *(run.handles for run in self.runs)):
            if handle in handles:
                handles.remove(handle)

    def touch(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self.move_to_run(handle)

    release = touch

    def release_after_write(self, handles: Sequence[int]) -> None:
        linked = [*self.parked, *self.first_out, *(handle for run in self.runs for handle in run.handles)]
        for handle in reversed(handles):
            if handle not in linked:
                self.first_out.insert(0, handle)

    # -- leaving -----------------------------------------------------------------------------------------------------

    def remove(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self.take_out(handle)
            chunk = self.here.pop(handle)
            chunk.run.alive -= 1
            del self.known[chunk.key]
            self.unlink_parent(chunk.key)

    def unlink_parent(self, key: Key) -> None:
        """Unlink an evicted chunk; its parent is evicted soon after if it is parked and this was its last child."""
        parent = self.parents.pop(key, None)
        handle = self.handle_of(parent)
        if parent is None or handle is None or not self.children[parent]:
            return
        self.children[parent] -= 1
        if handle in self.parked and not self.children[parent]:
            self.parked.remove(handle)
            self.first_out.append(handle)

    def value_of(self, run: Run) -> float:
        age_s = self.now_s - run.time_s
        interval = max(i for i, begin_s in enumerate(AGES) if age_s >= begin_s)
        value = self.values.table[run.number][interval]
        if age_s >= AGES[-1]:
            value = value * AGES[-1] / age_s
        return value * LEVEL_WEIGHT[run.level]

    def lowest_first(self) -> list[Run]:
        """All runs that have chunks: again and again the one that is worth less of the ends of all queues."""
        for queue in self.queues.values():
            while queue and not queue[0].handles:
                del queue[0]
            while queue and not queue[-1].handles:
                del queue[-1]
        left = [[run for run in queue if run.handles] for queue in self.queues.values()]
        order: list[Run] = []
        while any(left):
            ends = [end for queue in left if queue for end in (queue[0], queue[-1])]
            worst = min(ends, key=lambda run: (self.value_of(run), run.time_s, self.runs.index(run)))
            order.append(worst)
            for queue in left:
                if worst in queue:
                    queue.remove(worst)
        return order

    def evict(self, count: int, pins: Sequence[int]) -> list[int]:
        victims: list[int] = []
        self.choose(self.first_out, victims, count, pins)
        for run in self.lowest_first():
            self.choose(run.handles, victims, count, pins)
        self.choose(self.parked, victims, count, pins)
        return victims

    def choose(self, handles: list[int], victims: list[int], count: int, pins: Sequence[int]) -> None:
        while handles and len(victims) < count:
            handle = handles.pop(0)
            if pins[handle]:
                continue  # aside, until it is released or used
            key = self.here[handle].key
            if self.children[key] and handles is not self.parked:
                self.parked.append(handle)
                continue
            victims.append(handle)
            del self.here[handle]
            self.known[key].parent = self.parents.get(key)
            self.unlink_parent(key)
            if handles is not self.first_out:
                self.choose(self.first_out, victims, count, pins)

    # -- letting in --------------------------------------------------------------------------------------------------

    def refuse(self, keys: Sequence[Key], free: int) -> set[int]:
        short = len(keys) - free
        if short <= 0 or not self.requests:
            return set()
        values = [self.value_of(self.known[key].run) for key in keys]
        for i in range(1, len(keys)):
            if self.known[keys[i]].parent == keys[i - 1]:
                values[i] = min(values[i], values[i - 1])
        here = [0.0] * len(self.first_out) + [self.value_of(run) for run in self.lowest_first() for _ in run.handles]
        order = sorted(range(len(keys)), key=lambda i: (-values[i], i))
        for value in here[:short]:
            if value > values[order[free]]:
                break
            free += 1
        return set(order[free:])
