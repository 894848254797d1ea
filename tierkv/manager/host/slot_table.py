"""The columns of the host tier, and every question to them. :mod:`tierkv.manager.host.host_tier` changes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import repeat

from tierkv.manager.contract import HOST
from tierkv.manager.host.chunk import Chunk, Waiter
from tierkv.manager.host.chunk_state import CHUNK_STATES, CODES, STATES, ChunkEvent, ChunkState, ChunkTransitionLog
from tierkv.structures.key_table import PAGE_KEYS, SHARD_BYTE, KeyColumn, column, new_shards, shards_len
from tierkv.types.keys import Key
from tierkv.types.transfers import SlotRef

_GONE, _READY, _DOOMED = CODES[ChunkState.GONE], CODES[ChunkState.READY], CODES[ChunkState.DOOMED]
_make_ref = partial(tuple.__new__, SlotRef)


class SlotTable:
    """What is known of every slot: a number stands for it in all columns."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        # Key -> slot of the visible chunks, and the slots that I/O is filling, for somebody or (DOOMED) for nobody.
        self._slots = new_shards()
        self._filling: set[int] = set()
        # What was there before a reset. A chunk is *stale* when it was in one of them, and no table of now names its
        # slot.
        self._stale: list[dict[Key, int]] = []
        self._keys = KeyColumn(num_slots)
        self._states = bytearray(num_slots)
        self._holders = column("I", num_slots)
        self._generations = column("I", num_slots)
        # Of few slots at a time: where their bytes come from, who waits for them.
        self._origins: dict[int, str] = {}
        self._generation = 0  # of what was admitted last
        self.removals = 0
        """Grows when a chunk stops being readable: what was found before may not be true any more."""
        self._found: tuple[tuple[Key, ...], list[int], int] = ((), [], 0)
        self._waiters: dict[int, list[Waiter]] = {}
        self._log = ChunkTransitionLog()

    def __len__(self) -> int:
        """Chunks that are visible (STORING, PROMOTING or READY)."""
        return shards_len(self._slots)

    def find(self, key: Key) -> int | None:
        """The slot of a visible chunk."""
        return self._slots[key[SHARD_BYTE]].get(key)

    def is_readable(self, key: Key) -> bool | None:
        """Whether a visible chunk is READY; None if there is no such chunk."""
        slot = self._slots[key[SHARD_BYTE]].get(key)
        return None if slot is None else self._states[slot] == _READY

    def state(self, slot: int) -> ChunkState:
        """The state of the chunk that owns a slot; GONE if none does."""
        return ChunkState.DOOMED if self._is_stale(slot) else STATES[self._states[slot]]

    def _is_stale(self, slot: int) -> bool:
        """Whether a chunk is of before a reset, and nobody has dropped it yet."""
        if not self._stale or self._states[slot] in (_GONE, _DOOMED):
            return False
        return self.find(self._keys[slot]) != slot

    def is_idle(self, slot: int) -> bool:
        """Whether the chunk in a slot is READY and nobody holds it."""
        return self.state(slot) is ChunkState.READY and not self._holders[slot]

    def is_ready(self, slot: int, generation: int) -> bool:
        """Whether a slot still has the owner that was told from others by ``generation``, and that chunk is READY."""
        here = self._generations[slot] == generation and self._states[slot] == _READY
        return here and not (self._stale and self._is_stale(slot))

    def key(self, slot: int) -> Key:
        """The key of the chunk that owns a slot."""
        return self._keys.pages[slot // PAGE_KEYS][slot % PAGE_KEYS]

    def generation(self, slot: int) -> int:
        """What tells this owner of a slot from those before it."""
        return self._generations[slot]

    def origin(self, slot: int) -> str:
        """The tier that a chunk's bytes come from, while they are on their way."""
        return self._origins.get(slot, HOST)

    def origin_of(self, key: Key) -> str:
        """The same of a visible chunk by its key."""
        slot = self.find(key)
        return HOST if slot is None else self.origin(slot)

    def refs(self, slots: Sequence[int]) -> tuple[SlotRef, ...]:
        """The leases on these slots."""
        generations = self._generations
        return tuple(map(_make_ref, zip(slots, [generations[slot] for slot in slots], strict=True)))

    def newest_refs(self, slots: Sequence[int]) -> tuple[SlotRef, ...]:
        """The same, of what was admitted last."""
        return tuple(map(_make_ref, zip(slots, repeat(self._generation))))

    def leased(self, refs: Iterable[SlotRef]) -> list[int]:
        """The slots of those leases that are not void (S21)."""
        generations, states = self._generations, self._states
        return [slot for slot, generation in refs if generations[slot] == generation and states[slot]]

    def being_stored(self, refs: Iterable[SlotRef]) -> list[int]:
        """The slots of those leases that a store job is still filling, for somebody or for nobody (S21)."""
        generations, filling = self._generations, self._filling
        slots = [slot for slot, generation in refs if slot in filling and generations[slot] == generation]
        return [slot for slot in slots if slot not in self._origins] if self._origins else slots

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        """Those of ``keys`` that are not visible."""
        shards = self._slots
        return [key for key in keys if key not in shards[key[SHARD_BYTE]]]

    def get(self, key: Key) -> Chunk | None:
        """The visible chunk of a key, as it is now."""
        slot = self.find(key)
        return None if slot is None else self._chunk(slot)

    def owner(self, ref: SlotRef) -> Chunk | None:
        """The chunk that a lease names, visible or doomed, as it is now; None if the lease is void."""
        return self._chunk(ref.slot) if self.leased((ref,)) else None

    def visible(self) -> list[Chunk]:
        """All visible chunks, as they are now. Walks over all of them."""
        return [self._chunk(slot) for shard in self._slots for slot in shard.values()]

    def _chunk(self, slot: int) -> Chunk:
        return Chunk(
            self._keys[slot], slot, self._generations[slot], self.state(slot), self._holders[slot], self.origin(slot)
        )

    def ready_prefix(self, keys: tuple[Key, ...]) -> list[int]:
        """The slots of ``keys``, from the front, as far as they are READY; the caller leaves the list as it is.

        The hot path: one dict probe per key. A request asks how much is there, then reserves it: the second time the
        answer is remembered, and keys are compared only by identity.
        """
        found, slots, removals = self._found
        if removals == self.removals and found == keys:
            return slots
        slots = self._probe_prefix(keys)
        self._found = (keys[: len(slots)], slots, self.removals)
        return slots

    def _probe_prefix(self, keys: tuple[Key, ...]) -> list[int]:
        shards, filling = self._slots, self._filling
        try:
            slots = [shards[key[SHARD_BYTE]][key] for key in keys]
        except KeyError:
            pass
        else:
            if not filling or filling.isdisjoint(slots):
                return slots
        slots = []
        for key in keys:
            slot = shards[key[SHARD_BYTE]].get(key)
            if slot is None or slot in filling:
                break
            slots.append(slot)
        return slots

    def transitions_of(self, key: Key) -> str:
        """Latest transitions of a key, oldest first, as text for error messages."""
        return self._log.describe(key)

    # -- states and waiters ------------------------------------------------------------------------------------------

    def _transition(self, slots: Sequence[int], event: ChunkEvent) -> None:
        """Move chunks by the table, whatever their states.

        Raises:
            IllegalTransitionError: the table has no such row.
        """
        moved: dict[ChunkState, list[Key]] = {}
        for slot in slots:
            key = self._keys[slot]
            after = CHUNK_STATES.next(STATES[self._states[slot]], event, key, partial(self._log.describe, key))
            self._states[slot] = CODES[after]
            moved.setdefault(after, []).append(key)
        for after, keys in moved.items():
            self._log.note(event, after, keys)

    def wait_for(self, slot: int, waiter: Waiter) -> None:
        """Tell ``waiter`` when the chunk becomes readable, or never will."""
        self._waiters.setdefault(slot, []).append(waiter)

    def stop_waiting(self, slot: int, waiter: Waiter) -> bool:
        """Undo :meth:`wait_for`. Returns whether it was still waiting."""
        waiters = self._waiters.get(slot, [])
        if waiter not in waiters:
            return False
        waiters.remove(waiter)
        if not waiters:
            del self._waiters[slot]
        return True

    def is_waited_for(self, slot: int, waiter: Waiter) -> bool:
        """Whether ``waiter`` waits for the chunk in a slot."""
        return waiter in self._waiters.get(slot, ())

    def _tell_waiters(self, slots: Iterable[int], *, readable: bool) -> None:
        for slot in slots:
            for waiter in self._waiters.pop(slot, ()):
                waiter.settled(readable=readable)
