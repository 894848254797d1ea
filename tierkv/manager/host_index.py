"""The host tier as the manager sees it: which chunk owns which slot, who holds it, who may be evicted.

A chunk is *held* by everybody who needs its slot to stay: a store or load job, a promotion in flight, a cascade that
reads it, a reservation. A READY chunk that nobody holds is evictable. A slot has one owner and a generation; it
returns to the free list only when its chunk is gone, so no late completion can touch another chunk's memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from tierkv.abc import EvictionPolicy
from tierkv.errors import InvariantError, require
from tierkv.manager.chunk_state import ChunkEvent, ChunkState, next_state
from tierkv.manager.contract import HOST
from tierkv.types.keys import Key
from tierkv.types.transfers import SlotRef

STORY_EVENTS_MAX = 4096
"""Events kept, over all chunks, to explain an illegal transition."""


class Waiter(Protocol):
    """Somebody who holds a chunk that is not readable yet."""

    def settled(self, *, readable: bool) -> None:
        """The chunk became readable, or never will."""


class Chunk:
    """One chunk that owns a slot. Fields are changed by :class:`HostIndex` only.

    origin: the tier its bytes came from. listed: the eviction policy knows it.
    """

    __slots__ = ("generation", "holders", "key", "listed", "origin", "raw_bytes", "slot", "state", "waiters")

    def __init__(  # noqa: PLR0913, PLR0917 - made in one place
        self, key: Key, slot: int, generation: int, raw_bytes: int, state: ChunkState, origin: str
    ) -> None:
        self.key = key
        self.slot = slot
        self.generation = generation
        self.raw_bytes = raw_bytes
        self.state = state
        self.origin = origin
        self.holders = 0
        self.listed = False
        self.waiters: list[Waiter] | None = None

    @property
    def ref(self) -> SlotRef:
        """The lease on its slot."""
        return SlotRef(self.slot, self.generation)


class HostIndex:
    """Slots, chunks and holds of the host tier. Sans-IO; every call O(1) amortised per chunk."""

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._by_key: dict[Key, Chunk] = {}
        self._by_slot: list[Chunk | None] = [None] * num_slots
        self._generations = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._story: deque[tuple[Key, ChunkEvent | None, ChunkState]] = deque(maxlen=STORY_EVENTS_MAX)

    @property
    def policy(self) -> EvictionPolicy:
        """In which order chunks leave."""
        return self._policy

    @property
    def num_slots(self) -> int:
        """Slots in all."""
        return len(self._by_slot)

    @property
    def free(self) -> int:
        """Slots that nobody owns."""
        return len(self._free)

    @property
    def room(self) -> int:
        """Slots that can be had now: free ones and those of evictable chunks."""
        return len(self._free) + len(self._policy)

    def __len__(self) -> int:
        """Chunks that are visible (STORING, PROMOTING or READY)."""
        return len(self._by_key)

    def get(self, key: Key) -> Chunk | None:
        """The visible chunk of a key."""
        return self._by_key.get(key)

    def owner(self, ref: SlotRef) -> Chunk | None:
        """The chunk that a lease names, visible or doomed; None if the lease is void."""
        chunk = self._by_slot[ref.slot]
        return chunk if chunk is not None and chunk.generation == ref.generation else None

    def resident_prefix(self, keys: Sequence[Key], start: int, stop: int) -> int:
        """How many of ``keys[start:stop]``, from the front, are READY. The hot path: one dict probe per key."""
        get, ready = self._by_key.get, ChunkState.READY
        for i in range(start, stop):
            chunk = get(keys[i])
            if chunk is None or chunk.state is not ready:
                return i - start
        return max(0, stop - start)

    def admit(self, key: Key, raw_bytes: int, state: ChunkState, origin: str = HOST) -> tuple[Chunk, Key | None]:
        """Give ``key`` a slot, held once by the caller; evicts one chunk if no slot is free.

        The caller has made sure that ``room`` is at least 1 and that ``key`` is not visible.

        Returns:
            The chunk, and the key that was evicted for it, if any.
        """
        evicted: Key | None = None
        if not self._free:
            evicted = self._policy.evict()
            if evicted is None:
                raise InvariantError("admit() was called without room")
            self._apply(self._by_key[evicted], ChunkEvent.EVICTED)
        slot = self._free.pop()
        chunk = Chunk(key, slot, self._generations[slot], raw_bytes, state, origin)
        chunk.holders = 1
        self._by_key[key] = self._by_slot[slot] = chunk
        self._story.append((key, None, state))
        return chunk, evicted

    def hold(self, chunk: Chunk) -> None:
        """Keep the chunk's slot until :meth:`release`."""
        if chunk.holders == 0 and chunk.state is ChunkState.READY:
            self._policy.hold(chunk.key)
        chunk.holders += 1

    def hold_present(self, keys: Iterable[Key], chunks_max: int) -> list[Chunk]:
        """Hold those of ``keys`` that are visible, at most ``chunks_max``, in one go."""
        get, ready, hold = self._by_key.get, ChunkState.READY, self._policy.hold
        held: list[Chunk] = []
        for key in keys:
            if len(held) >= chunks_max:
                break
            chunk = get(key)
            if chunk is not None:
                if chunk.holders == 0 and chunk.state is ready:
                    hold(key)
                chunk.holders += 1
                held.append(chunk)
        return held

    def release(self, chunk: Chunk) -> None:
        """Undo one hold. The last one makes a READY chunk evictable and lets a DOOMED one go."""
        if chunk.holders <= 0:
            raise InvariantError(
                f"chunk {chunk.key.hex()} was released more often than held. Its story: {self.story(chunk.key)}"
            )
        chunk.holders -= 1
        if chunk.holders:
            return
        if chunk.state is ChunkState.READY:
            if chunk.listed:
                self._policy.release(chunk.key)
            else:
                chunk.listed = True
                self._policy.add(chunk.key)
        elif chunk.state is ChunkState.DOOMED:
            self._apply(chunk, ChunkEvent.RELEASED)

    def settle(self, chunk: Chunk, event: ChunkEvent) -> bool:
        """The I/O that filled the slot ended: STORED, ARRIVED or FAILED. The filler's hold stays to be released.

        Returns:
            Whether the chunk is READY now.
        """
        was_visible = chunk.state is not ChunkState.DOOMED
        self._apply(chunk, event)
        if chunk.state is ChunkState.READY:
            self._tell_waiters(chunk, readable=True)
            return True
        if was_visible:
            del self._by_key[chunk.key]
        self._tell_waiters(chunk, readable=False)
        return False

    @staticmethod
    def _tell_waiters(chunk: Chunk, *, readable: bool) -> None:
        if chunk.waiters is not None:
            waiters, chunk.waiters = chunk.waiters, None
            for waiter in waiters:
                waiter.settled(readable=readable)

    def drop(self, chunk: Chunk) -> None:
        """Make a visible chunk invisible now; its slot is free once nobody holds it."""
        if chunk.state is ChunkState.DOOMED:
            return
        if chunk.listed:
            self._policy.remove(chunk.key)
        del self._by_key[chunk.key]
        self._apply(chunk, ChunkEvent.DROPPED)
        self._tell_waiters(chunk, readable=False)
        if chunk.holders == 0:
            self._apply(chunk, ChunkEvent.RELEASED)

    def touch(self, keys: Iterable[Key]) -> None:
        """Recency only; give the tail of a prefix first (S54)."""
        self._policy.touch(keys)

    def visible(self) -> list[Chunk]:
        """All visible chunks."""
        return list(self._by_key.values())

    def story(self, key: Key) -> str:
        """What happened to a key lately, oldest first."""
        lines = [
            f"{'admitted' if event is None else event.value} -> {state.value}"
            for known, event, state in self._story
            if known == key
        ]
        return "; ".join(lines) or "nothing remembered"

    def _apply(self, chunk: Chunk, event: ChunkEvent) -> None:
        state = next_state(chunk.state, event, lambda: self.story(chunk.key))
        if state is ChunkState.GONE:
            if chunk.state is ChunkState.READY:
                del self._by_key[chunk.key]
            self._by_slot[chunk.slot] = None
            self._generations[chunk.slot] += 1
            self._free.append(chunk.slot)
        chunk.state = state
        self._story.append((chunk.key, event, state))

    def validate(self) -> None:
        """Check every invariant of the slots.

        Raises:
            InvariantError: one is broken; names it.
        """
        owners = [chunk for chunk in self._by_slot if chunk is not None]
        require(len(owners) + len(self._free) == self.num_slots, "slots free + owned differ from capacity")
        require(len(set(self._free)) == len(self._free), "a slot is free twice")
        evictable = 0
        for chunk in owners:
            what = f"chunk {chunk.key.hex()} ({chunk.state.value}, {chunk.holders} holders)"
            visible = self._by_key.get(chunk.key) is chunk
            require(visible == (chunk.state is not ChunkState.DOOMED), f"{what}: visible is {visible}")
            require(chunk.holders > 0 or chunk.state is ChunkState.READY, f"{what}: nobody holds it")
            evictable += chunk.state is ChunkState.READY and not chunk.holders
        require(evictable == len(self._policy), f"{evictable} chunks are evictable, the policy has {len(self._policy)}")
