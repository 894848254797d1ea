"""Textbook policies: lists and dicts, one handle at a time, nothing bounded. What the fast ones must agree with.

Each knows the rules of the interface: room is made before a newcomer is known, and the request that brings a chunk is
the first that uses it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import chain
from typing import Protocol

from naive_ghosts import NaiveGhosts

from tierkv.types.keys import Key


class NaivePolicy(Protocol):
    """The verbs, with the set of those that are held."""

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None: ...
    def touch(self, handles: Sequence[int]) -> None: ...
    def release(self, handles: Sequence[int]) -> None: ...
    def remove(self, handles: Sequence[int]) -> None: ...
    def evict(self, count: int, held: Container[int]) -> list[int]: ...
    def known(self) -> list[int]: ...


class NaiveLru:
    """One list, the least recently used first."""

    def __init__(self, chunks_max: int) -> None:
        self.order: list[int] = []

    def known(self) -> list[int]:
        return self.order

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        self.order += handles

    def touch(self, handles: Sequence[int]) -> None:
        self.remove(handles)
        self.order += handles

    release = touch

    def remove(self, handles: Sequence[int]) -> None:
        self.order = [handle for handle in self.order if handle not in handles]

    def evict(self, count: int, held: Container[int]) -> list[int]:
        victims = [handle for handle in self.order if handle not in held][:count]
        self.remove(victims)
        return victims


class NaiveArc:
    """The paper's four lists."""

    def __init__(self, chunks_max: int) -> None:
        self.room = chunks_max
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1, self.b2 = NaiveGhosts(chunks_max), NaiveGhosts(chunks_max)
        self.p = 0.0
        self.key: dict[int, Key] = {}
        self.used: set[int] = set()

    def known(self) -> list[int]:
        return self.t1 + self.t2

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        for handle, key in zip(handles, keys, strict=True):
            self.key[handle] = key
            self.used.discard(handle)
            one, two = len(self.b1), len(self.b2)
            if self.b1.pop(key) is not None:
                self.p = min(self.p + max(1, two / one), self.room)
                self.t2.append(handle)
            elif self.b2.pop(key) is not None:
                self.p = max(self.p - max(1, one / two), 0)
                self.t2.append(handle)
            else:
                self.t1.append(handle)
        self.room = self.b1.ghosts_max = self.b2.ghosts_max = max(self.room, len(self.known()))
        while len(self.t1) + len(self.b1) > self.room and len(self.b1):
            self.b1.drop_oldest()
        while len(self.known()) + len(self.b1) + len(self.b2) > 2 * self.room and len(self.b2):
            self.b2.drop_oldest()

    def touch(self, handles: Sequence[int]) -> None:
        for handle in handles:
            if handle in self.t1 and handle not in self.used:
                self.used.add(handle)
                self.release([handle])
            else:
                self.remove([handle])
                self.t2.append(handle)

    def release(self, handles: Sequence[int]) -> None:
        for handle in handles:
            ring = self.t1 if handle in self.t1 else self.t2
            ring.remove(handle)
            ring.append(handle)

    def remove(self, handles: Sequence[int]) -> None:
        for handle in handles:
            (self.t1 if handle in self.t1 else self.t2).remove(handle)

    def evict(self, count: int, held: Container[int]) -> list[int]:
        victims = []
        for _ in range(count):
            once, often = ([handle for handle in ring if handle not in held] for ring in (self.t1, self.t2))
            from_once = bool(once) and (len(self.t1) > self.p or not often)
            ring, ghosts, victim = (self.t1, self.b1, once[0]) if from_once else (self.t2, self.b2, often[0])
            ring.remove(victim)
            ghosts.push(self.key[victim])
            victims.append(victim)
        return victims


class NaiveS3Fifo:
    """The paper's two queues and its ghosts. Who is met while held stands aside until released."""

    def __init__(self, chunks_max: int, looks_max: int) -> None:
        self.room, self.looks_max = chunks_max, looks_max
        self.small: list[int] = []
        self.main: list[int] = []
        self.aside: dict[int, list[int]] = {}
        self.ghosts = NaiveGhosts(chunks_max - chunks_max // 10)
        self.key: dict[int, Key] = {}
        self.uses: dict[int, int] = {}

    def known(self) -> list[int]:
        return [*self.small, *self.main, *self.aside]

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        for handle, key in zip(handles, keys, strict=True):
            self.key[handle] = key
            self.uses[handle] = -1  # until the request that brought it has used it
            (self.small if self.ghosts.pop(key) is None else self.main).append(handle)
        self.room = max(self.room, len(self.known()))
        self.ghosts.ghosts_max = self.room - self.room // 10

    def touch(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self.uses[handle] = min(self.uses[handle] + 1, 3)

    def release(self, handles: Sequence[int]) -> None:
        for handle in handles:
            if handle in self.aside:
                self.aside.pop(handle).append(handle)

    def remove(self, handles: Sequence[int]) -> None:
        for handle in handles:
            if self.aside.pop(handle, None) is None:
                (self.small if handle in self.small else self.main).remove(handle)

    def evict(self, count: int, held: Container[int]) -> list[int]:
        victims: list[int] = []
        ghosts: list[Key] = []
        looks = self.looks_max
        while len(victims) < count:
            size = len(self.small) + sum(queue is self.small for queue in self.aside.values())
            from_small = bool(self.small) and (size >= max(1, self.room // 10) or not self.main)
            queue = self.small if from_small else self.main
            handle = queue.pop(0)
            if handle in held:
                self.aside[handle] = queue
            elif looks and self.uses[handle] > (1 if from_small else 0):
                looks -= 1
                self.uses[handle] = 0 if from_small else self.uses[handle] - 1
                self.main.append(handle)
            else:
                victims.append(handle)
                ghosts += [self.key[handle]] if from_small else []
        for key in ghosts:
            self.ghosts.push(key)
        return victims


class NaiveLfu:
    """Counts, and the order of use among equals."""

    def __init__(self, chunks_max: int) -> None:
        self.room = chunks_max
        self.rings: list[list[int]] = [[] for _ in range(16)]
        self.uses = 0

    def known(self) -> list[int]:
        return list(chain.from_iterable(self.rings))

    def count(self, handle: int) -> int:
        return next(count for count, ring in enumerate(self.rings) if handle in ring)

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        self.rings[0] += handles
        self.room = max(self.room, len(self.known()))

    def touch(self, handles: Sequence[int]) -> None:
        for handle in handles:
            count = self.count(handle)
            self.rings[count].remove(handle)
            self.rings[min(count + 1, 15)].append(handle)
        self.uses += len(handles)
        if self.uses > 2 * self.room:
            self.rings = [a + b for a, b in zip(self.rings[::2], self.rings[1::2], strict=True)] + [[]] * 8
            self.rings = [list(ring) for ring in self.rings]
            self.uses = 0

    def release(self, handles: Sequence[int]) -> None:
        for handle in handles:
            ring = self.rings[self.count(handle)]
            ring.remove(handle)
            ring.append(handle)

    def remove(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self.rings[self.count(handle)].remove(handle)

    def evict(self, count: int, held: Container[int]) -> list[int]:
        victims = [handle for handle in self.known() if handle not in held][:count]
        self.remove(victims)
        return victims
