"""Columns of the host tier: one entry per slot, and the questions that they answer.

:class:`~tierkv.manager.host.host_tier.HostTier` is the only writer of the columns. Everything else reads them through
the methods below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat

from tierkv.manager.contract import HOST
from tierkv.manager.host.chunk import Chunk
from tierkv.manager.host.chunk_state import CHUNK_STATES, CODES, STATES, ChunkEvent, ChunkState, ChunkTransitionLog
from tierkv.structures.key_table import PAGE_KEYS, SHARD_BYTE, KeyColumn, column, new_shards, shards_len
from tierkv.types.keys import Key
from tierkv.types.transfers import SlotRef

_GONE, _READY, _DOOMED = CODES[ChunkState.GONE], CODES[ChunkState.READY], CODES[ChunkState.DOOMED]
_make_ref = partial(tuple.__new__, SlotRef)


class SlotTable:
    """Columns by slot, and the tables of keys. Sans-IO; every question is O(1) per slot or key.

    A chunk is *stale* when it was in the host tier before a reset and its slot has not been swept yet. No table of keys
    names the slot of a stale chunk any more.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.shards = new_shards()
        """Key -> slot of the visible chunks."""
        self.stale: list[dict[Key, int]] = []
        """Tables of keys from before a reset, until they are swept."""
        self.filling: set[int] = set()
        """Slots that I/O is filling, also of chunks that are DOOMED meanwhile."""
        self.keys = KeyColumn(num_slots)
        self.states = bytearray(num_slots)
        """Code of the state (:data:`CODES`)."""
        self.pins = column("I", num_slots)
        """Number of pins."""
        self.write_pins = column("H", num_slots)
        """Number of pins for writes to lower tiers."""
        self.generations = column("I", num_slots)
        """Number that differs between successive owners of a slot."""
        self.newest_generation = 0
        """Generation of the chunks that were admitted last."""
        self.origins: dict[int, str] = {}
        """Source tier of the chunks that are being read from one; a few at a time."""
        self.removals = 0
        """Grows when a chunk stops being readable: an earlier :meth:`ready_prefix` may not hold any more."""
        self.log = ChunkTransitionLog()
        self._found: tuple[tuple[Key, ...], list[int], int] = ((), [], 0)

    def __len__(self) -> int:
        """Number of visible chunks (STORING, PROMOTING or READY)."""
        return shards_len(self.shards)

    # -- one chunk ---------------------------------------------------------------------------------------------------

    def find(self, key: Key) -> int | None:
        """Slot of a visible chunk; None if there is none."""
        return self.shards[key[SHARD_BYTE]].get(key)

    def is_readable(self, key: Key) -> bool | None:
        """Whether a visible chunk is READY; None if there is no such chunk."""
        slot = self.shards[key[SHARD_BYTE]].get(key)
        return None if slot is None else self.states[slot] == _READY

    def state(self, slot: int) -> ChunkState:
        """State of the chunk that owns a slot; GONE if the slot is free."""
        return ChunkState.DOOMED if self.is_stale(slot) else STATES[self.states[slot]]

    def is_stale(self, slot: int) -> bool:
        """Whether the chunk in a slot is from before a reset and has not been dropped yet."""
        if not self.stale or self.states[slot] in (_GONE, _DOOMED):
            return False
        return self.find(self.keys[slot]) != slot

    def is_idle(self, slot: int) -> bool:
        """Whether the chunk in a slot is READY and has no pins."""
        return self.state(slot) is ChunkState.READY and not self.pins[slot]

    def is_ready(self, slot: int, generation: int) -> bool:
        """Whether a slot still has the owner of that generation, and this chunk is READY."""
        here = self.generations[slot] == generation and self.states[slot] == _READY
        return here and not (self.stale and self.is_stale(slot))

    def is_written(self, slot: int) -> bool:
        """Whether a write to a lower tier pins a slot."""
        return self.write_pins[slot] > 0

    def key(self, slot: int) -> Key:
        """Key of the chunk that owns a slot."""
        return self.keys.pages[slot // PAGE_KEYS][slot % PAGE_KEYS]

    def generation(self, slot: int) -> int:
        """Generation of the owner of a slot."""
        return self.generations[slot]

    def origin(self, slot: int) -> str:
        """Tier that a chunk is being read from; the host tier if it is not."""
        return self.origins.get(slot, HOST)

    def origin_of(self, key: Key) -> str:
        """Tier that the visible chunk of a key is being read from; the host tier if it is not."""
        slot = self.find(key)
        return HOST if slot is None else self.origin(slot)

    def transitions_of(self, key: Key) -> str:
        """Latest transitions of a key, oldest first, as text for error messages."""
        return self.log.describe(key)

    # -- batches -----------------------------------------------------------------------------------------------------

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        """Those of ``keys`` that are not visible."""
        shards = self.shards
        return [key for key in keys if key not in shards[key[SHARD_BYTE]]]

    def pinned_once(self, slots: Iterable[int]) -> Iterator[int]:
        """Those of ``slots`` that have exactly one pin."""
        pins = self.pins
        return (slot for slot in slots if pins[slot] == 1)

    def ready_prefix(self, keys: tuple[Key, ...]) -> list[int]:
        """Slots of the leading ``keys`` that are READY. The caller must not change the list.

        The hot path: one dict probe per key. A request asks for the length of its prefix and then reserves it. The
        second call returns the remembered answer, and compares keys only by identity.
        """
        found, slots, removals = self._found
        if removals == self.removals and found == keys:
            return slots
        slots = self._probe_prefix(keys)
        self._found = (keys[: len(slots)], slots, self.removals)
        return slots

    def _probe_prefix(self, keys: tuple[Key, ...]) -> list[int]:
        shards, filling = self.shards, self.filling
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

    # -- leases ------------------------------------------------------------------------------------------------------

    def refs(self, slots: Sequence[int]) -> tuple[SlotRef, ...]:
        """Leases on these slots."""
        generations = self.generations
        return tuple(map(_make_ref, zip(slots, [generations[slot] for slot in slots], strict=True)))

    def newest_refs(self, slots: Sequence[int]) -> tuple[SlotRef, ...]:
        """Leases on slots of the last batch that was admitted; cheaper than :meth:`refs`."""
        return tuple(map(_make_ref, zip(slots, repeat(self.newest_generation))))

    def leased(self, refs: Iterable[SlotRef]) -> list[int]:
        """Slots of those leases that are not void (S21)."""
        generations, states = self.generations, self.states
        return [slot for slot, generation in refs if generations[slot] == generation and states[slot]]

    def being_stored(self, refs: Iterable[SlotRef]) -> list[int]:
        """Slots of those leases that a store job is still filling, also of DOOMED chunks (S21)."""
        generations, filling = self.generations, self.filling
        slots = [slot for slot, generation in refs if slot in filling and generations[slot] == generation]
        return [slot for slot in slots if slot not in self.origins] if self.origins else slots

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def get(self, key: Key) -> Chunk | None:
        """Snapshot of the visible chunk of a key."""
        slot = self.find(key)
        return None if slot is None else self._chunk(slot)

    def owner(self, ref: SlotRef) -> Chunk | None:
        """Snapshot of the chunk that a lease names, visible or DOOMED; None if the lease is void."""
        return self._chunk(ref.slot) if self.leased((ref,)) else None

    def visible(self) -> list[Chunk]:
        """Snapshots of all visible chunks. O(chunks)."""
        return [self._chunk(slot) for shard in self.shards for slot in shard.values()]

    def _chunk(self, slot: int) -> Chunk:
        return Chunk(
            self.keys[slot], slot, self.generations[slot], self.state(slot), self.pins[slot], self.origin(slot)
        )

    # -- changes -----------------------------------------------------------------------------------------------------

    def transition(self, slots: Sequence[int], event: ChunkEvent) -> None:
        """Move chunks to the states after ``event``.

        Raises:
            IllegalTransitionError: the table has no row for the state of one of them.
        """
        moved: dict[ChunkState, list[Key]] = {}
        for slot in slots:
            key = self.keys[slot]
            after = CHUNK_STATES.next(STATES[self.states[slot]], event, key, partial(self.log.describe, key))
            self.states[slot] = CODES[after]
            moved.setdefault(after, []).append(key)
        for after, keys in moved.items():
            self.log.note(event, after, keys)
