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
    def release_after_write(self, handles: Sequence[int]) -> None: ...
    def remove(self, handles: Sequence[int]) -> None: ...
    def evict(self, count: int, held: Container[int]) -> list[int]: ...
    def known(self) -> list[int]: ...


class Aside:
    """Keys that were skipped while held: out of their queue until they are used, or put back at the front."""

    def __init__(self) -> None:
        self.queues: dict[int, list[int]] = {}

    def take_first(self, queue: list[int], held: Container[int]) -> int | None:
        """The first of a queue that is not held. Those before it are aside from now on."""
        while queue:
            handle = queue.pop(0)
            if handle not in held:
                return handle
            self.queues[handle] = queue
        return None

    def release_after_write(self, handles: Sequence[int]) -> None:
        """In their order."""
        for handle in reversed(handles):
            if handle in self.queues:
                self.queues.pop(handle).insert(0, handle)

    def is_of(self, handle: int, queue: list[int]) -> bool:
        """Whether a handle is in a queue, or aside from it."""
        return handle in queue or self.queues.get(handle) is queue

    def size(self, queue: list[int]) -> int:
        """Of a queue, with those that are aside."""
        return len(queue) + sum(other is queue for other in self.queues.values())

    def take_out(self, handle: int, queue: list[int]) -> None:
        """Of a queue, or from aside."""
        if self.queues.pop(handle, None) is None:
            queue.remove(handle)


class NaiveLru:
    """One list, the least recently used first."""

    def __init__(self, chunks_max: int) -> None:
        self.order: list[int] = []
        self.aside = Aside()
        self.release_after_write = self.aside.release_after_write

    def known(self) -> list[int]:
        return [*self.order, *self.aside.queues]

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        self.order += handles

    def touch(self, handles: Sequence[int]) -> None:
        self.remove(handles)
        self.order += handles

    release = touch

    def remove(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self.aside.take_out(handle, self.order)

    def evict(self, count: int, held: Container[int]) -> list[int]:
        found = (self.aside.take_first(self.order, held) for _ in range(count))
        return [victim for victim in found if victim is not None]


class NaiveArc:
    """The paper's four lists."""

    def __init__(self, chunks_max: int) -> None:
        self.room = chunks_max
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.aside = Aside()
        self.release_after_write = self.aside.release_after_write
        self.b1, self.b2 = NaiveGhosts(chunks_max), NaiveGhosts(chunks_max)
        self.p = 0.0
        self.key: dict[int, Key] = {}
        self.used: set[int] = set()

    def known(self) -> list[int]:
        return self.t1 + self.t2 + [*self.aside.queues]

    def ring(self, handle: int) -> list[int]:
        return self.t1 if self.aside.is_of(handle, self.t1) else self.t2

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
        while self.aside.size(self.t1) + len(self.b1) > self.room and len(self.b1):
            self.b1.drop_oldest()
        while len(self.known()) + len(self.b1) + len(self.b2) > 2 * self.room and len(self.b2):
            self.b2.drop_oldest()

    def touch(self, handles: Sequence[int]) -> None:
        for handle in handles:
            if self.ring(handle) is self.t1 and handle not in self.used:
                self.used.add(handle)
                self.release([handle])
            else:
                self.remove([handle])
                self.t2.append(handle)

    def release(self, handles: Sequence[int]) -> None:
        for handle in handles:
            ring = self.ring(handle)
            self.aside.take_out(handle, ring)
            ring.append(handle)

    def remove(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self.aside.take_out(handle, self.ring(handle))

    def evict(self, count: int, held: Container[int]) -> list[int]:
        victims = []
        for _ in range(count):
            rings = (self.t1, self.t2) if self.aside.size(self.t1) > self.p else (self.t2, self.t1)
            found = ((self.aside.take_first(ring, held), ring) for ring in rings)
            victim, ring = next((victim, ring) for victim, ring in found if victim is not None)
            (self.b1 if ring is self.t1 else self.b2).push(self.key[victim])
            victims.append(victim)
        return victims


class NaiveS3Fifo:
    """The paper's two queues and its ghosts. Who is met while held stands aside until released."""

    def __init__(self, chunks_max: int, looks_max: int) -> None:
        self.room, self.looks_max = chunks_max, looks_max
        self.small: list[int] = []
        self.main: list[int] = []
        self.aside = Aside()
        self.release_after_write = self.aside.release_after_write
        self.ghosts = NaiveGhosts(chunks_max - chunks_max // 10)
        self.key: dict[int, Key] = {}
        self.uses: dict[int, int] = {}

    def known(self) -> list[int]:
        return [*self.small, *self.main, *self.aside.queues]

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
            if handle in self.aside.queues:
                self.aside.queues.pop(handle).append(handle)

    def remove(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self.aside.take_out(handle, self.small if handle in self.small else self.main)

    def evict(self, count: int, held: Container[int]) -> list[int]:
        victims: list[int] = []
        ghosts: list[Key] = []
        looks = self.looks_max
        while len(victims) < count:
            small_max = max(1, self.room // 10)
            from_small = bool(self.small) and (self.aside.size(self.small) >= small_max or not self.main)
            queue = self.small if from_small else self.main
            handle = queue.pop(0)
            if handle in held:
                self.aside.queues[handle] = queue
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
        self.aside = Aside()
        self.release_after_write = self.aside.release_after_write
        self.uses = 0

    def known(self) -> list[int]:
        return [*chain.from_iterable(self.rings), *self.aside.queues]

    def count(self, handle: int) -> int:
        return next(count for count, ring in enumerate(self.rings) if self.aside.is_of(handle, ring))

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        self.rings[0] += handles
        self.room = max(self.room, len(self.known()))

    def touch(self, handles: Sequence[int]) -> None:
        for handle in handles:
            count = self.count(handle)
            self.aside.take_out(handle, self.rings[count])
            self.rings[min(count + 1, 15)].append(handle)
        self.uses += len(handles)
        if self.uses > 2 * self.room:
            aside = {handle: self.count(handle) // 2 for handle in self.aside.queues}
            self.rings = [a + b for a, b in zip(self.rings[::2], self.rings[1::2], strict=True)] + [[]] * 8
            self.rings = [list(ring) for ring in self.rings]
            self.aside.queues.update({handle: self.rings[count] for handle, count in aside.items()})
            self.uses = 0

    def release(self, handles: Sequence[int]) -> None:
        for handle in handles:
            ring = self.rings[self.count(handle)]
            self.aside.take_out(handle, ring)
            ring.append(handle)

    def remove(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self.aside.take_out(handle, self.rings[self.count(handle)])

    def evict(self, count: int, held: Container[int]) -> list[int]:
        victims: list[int] = []
        for ring in self.rings:
            while len(victims) < count and (handle := self.aside.take_first(ring, held)) is not None:
                victims.append(handle)
        return victims
