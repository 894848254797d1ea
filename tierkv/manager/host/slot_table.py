"""Columns of the host tier: one entry per slot, and the questions that they answer.

:class:`~tierkv.manager.host.host_tier.HostTier` is the only writer of the columns. Everything else reads them through
the methods below.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat

from tierkv.manager.host.chunk import Chunk
from tierkv.manager.host.chunk_state import CHUNK_STATES, CODES, STATES, ChunkEvent, ChunkState, ChunkTransitionLog
from tierkv.manager.host.fills import Fills
from tierkv.structures.columns import column, key_column, run_of
from tierkv.structures.key_table import SHARD_BYTE, Shards, new_shards, shards_len
from tierkv.types.cache_events import HOST
from tierkv.types.keys import Key
from tierkv.types.transfers import SlotRef

_GONE, _READY, _DOOMED = CODES[ChunkState.GONE], CODES[ChunkState.READY], CODES[ChunkState.DOOMED]
_NOT_VISIBLE = (_GONE, _DOOMED)
_PIN = array("I", (1,))
_PIN_BYTES = _PIN.tobytes()
_make_ref = partial(tuple.__new__, SlotRef)

GENERATIONS = 1 << 32
"""Number of generations; the last one is followed by 0."""

OLD_KEYS, OLD_SHARDS = 4, 4
"""Keys of each shard, and empty shards, that one call of :meth:`SlotTable.free_old_keys` frees."""


class SlotTable:
    """Columns by slot, and the tables of keys. Sans-IO; every question is O(1) per slot or key.

    A chunk is *stale* when it was admitted before the latest reset and has not been dropped yet: its generation is
    older than the reset. No table of keys names the slot of a stale chunk any more.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.shards = new_shards()
        """Key -> slot of the visible chunks."""
        self.unswept = 0
        """Slots below this number may have stale chunks; 0: there are none."""
        self._old_tables: list[Shards] = []  # from before resets; nothing reads them
        self.fills = Fills(num_slots)
        """Slots that I/O is filling, also of chunks that are DOOMED meanwhile."""
        self.demoting: set[int] = set()
        """Slots of READY chunks that are written to a lower tier and evicted afterwards; bounded by the writes."""
        self.keys = key_column(num_slots)
        self.states = bytearray(num_slots)
        """Code of the state (:data:`CODES`)."""
        self.pins = column("I", num_slots)
        """Number of pins."""
        self.write_pins = column("H", num_slots)
        """Number of pins for writes to lower tiers."""
        self.generations = column("I", num_slots)
        """Number that differs between successive owners of a slot."""
        self.ranks = column("Q", num_slots)
        """Rank of the chunk in its prompt; 0: unknown. :mod:`tierkv.policies.prefix_order` reads and renews it."""
        self.newest_generation = 0
        """Generation of the chunks that were admitted last."""
        self.new_generations = 0
        """Number of generations since the latest reset."""
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

    def find_all(self, keys: Iterable[Key]) -> list[int | None]:
        """Slot of each visible chunk; None for a key that has none."""
        shards = self.shards  # "in" is no call, and get() is one per key
        return [shard[key] if key in (shard := shards[key[SHARD_BYTE]]) else None for key in keys]

    def is_readable(self, key: Key) -> bool | None:
        """Whether a visible chunk is READY; None if there is no such chunk."""
        slot = self.shards[key[SHARD_BYTE]].get(key)
        return None if slot is None else self.states[slot] == _READY

    def state(self, slot: int) -> ChunkState:
        """State of the chunk that owns a slot; GONE if the slot is free."""
        return ChunkState.DOOMED if self.unswept and self.is_stale(slot) else STATES[self.states[slot]]

    def is_stale(self, slot: int) -> bool:
        """Whether the chunk in a slot is from before a reset and has not been dropped yet."""
        return bool(self.unswept and self.stale_among((slot,)))

    def is_idle(self, slot: int) -> bool:
        """Whether the chunk in a slot is READY and has no pins."""
        return self.state(slot) is ChunkState.READY and not self.pins[slot]

    def is_ready(self, slot: int, generation: int) -> bool:
        """Whether a slot still has the owner of that generation, and this chunk is READY."""
        here = self.generations[slot] == generation and self.states[slot] == _READY
        return here and not (self.unswept and self.is_stale(slot))

    def is_written(self, slot: int) -> bool:
        """Whether a write to a lower tier pins a slot."""
        return self.write_pins[slot] > 0

    def key(self, slot: int) -> Key:
        """Key of the chunk that owns a slot."""
        key: Key = self.keys[slot]
        return key

    def generation(self, slot: int) -> int:
        """Generation of the owner of a slot."""
        return self.generations[slot]

    def origin_of(self, key: Key) -> str:
        """Tier that the visible chunk of a key is being read from; the host tier if it is not."""
        slot = self.find(key)
        return HOST if slot is None else self.fills.source(slot)

    def transitions_of(self, key: Key) -> str:
        """Latest transitions of a key, oldest first, as text for error messages."""
        return self.log.describe(key)

    # -- batches -----------------------------------------------------------------------------------------------------

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        """Those of ``keys`` that are not visible."""
        shards = self.shards
        return [key for key in keys if key not in shards[key[SHARD_BYTE]]]

    def stale_among(self, slots: Iterable[int]) -> list[int]:
        """Those of ``slots`` whose chunks are stale, each once. None of them is if :attr:`unswept` is 0."""
        newest, new, generations, states = self.newest_generation, self.new_generations, self.generations, self.states
        return [
            slot
            for slot in dict.fromkeys(slots)
            if (newest - generations[slot]) % GENERATIONS >= new and states[slot] not in _NOT_VISIBLE
        ]

    def in_state(self, slots: Iterable[int], state: ChunkState) -> set[int]:
        """Those of ``slots`` whose chunks are in a state; see :meth:`state`."""
        if self.unswept:
            return {slot for slot in slots if self.state(slot) is state}
        code, states = CODES[state], self.states
        return {slot for slot in slots if states[slot] == code}

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
        slots = self.ready_run(keys)
        self._found = (keys[: len(slots)], slots, self.removals)
        return slots

    def ready_run(self, keys: tuple[Key, ...]) -> list[int]:
        """Slots of the leading ``keys`` that are READY; the answer is not remembered."""
        shards, fills = self.shards, self.fills
        try:
            slots = [shards[key[SHARD_BYTE]][key] for key in keys]
        except KeyError as missing:  # names the first one
            slots = [shards[key[SHARD_BYTE]][key] for key in keys[: keys.index(missing.args[0])]]
        count = fills.num_leading_idle(slots)
        return slots if count == len(slots) else slots[:count]

    # -- leases ------------------------------------------------------------------------------------------------------

    def keys_of(self, slots: Iterable[int]) -> tuple[Key, ...]:
        """Keys of the chunks that own these slots."""
        keys = self.keys
        return tuple([keys[slot] for slot in slots])

    def ranks_of(self, slots: Iterable[int]) -> tuple[int, ...]:
        """Ranks of the chunks that own these slots."""
        return tuple(map(self.ranks.__getitem__, slots))

    def refs(self, slots: Sequence[int]) -> tuple[SlotRef, ...]:
        """Leases on these slots."""
        return tuple(map(_make_ref, zip(slots, map(self.generations.__getitem__, slots), strict=True)))

    def newest_refs(self, slots: Sequence[int]) -> tuple[SlotRef, ...]:
        """Leases on slots of the last batch that was admitted; cheaper than :meth:`refs`."""
        return tuple(map(_make_ref, zip(slots, repeat(self.newest_generation))))

    def leased(self, refs: Iterable[SlotRef]) -> list[int]:
        """Slots of those leases that are not void (S21)."""
        generations, states = self.generations, self.states
        return [slot for slot, generation in refs if generations[slot] == generation and states[slot]]

    def ready(self, refs: Iterable[tuple[int, int]]) -> list[int]:
        """Slots of those leases whose chunks are READY."""
        generations, states = self.generations, self.states
        slots = [slot for slot, generation in refs if generations[slot] == generation and states[slot] == _READY]
        return [slot for slot in slots if not self.is_stale(slot)] if self.unswept else slots

    def being_stored(self, refs: Iterable[SlotRef]) -> list[int]:
        """Slots of those leases that a store job is still filling, also of DOOMED chunks (S21)."""
        generations = self.generations
        return self.fills.stored_among([slot for slot, generation in refs if generations[slot] == generation])

    def being_read(self, slots: Iterable[int]) -> frozenset[Key]:
        """Keys of the chunks that a lower tier is being read for, into some of these slots."""
        return frozenset([self.key(slot) for slot in self.fills.read_among(slots)])

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
            self.keys[slot], slot, self.generations[slot], self.state(slot), self.pins[slot], self.fills.source(slot)
        )

    # -- changes -----------------------------------------------------------------------------------------------------

    def begin_filling(self, slots: Sequence[int], code: int, ranks: Sequence[int] = ()) -> None:
        """Give slots to chunks of the newest generation in a state, pinned once. ranks: one per chunk; empty: unknown.

        Slots of one batch mostly follow one another, up or down. Then each column is written at once.
        """
        run, generation, pins = run_of(slots), self.newest_generation, self.pins
        if run is not None:
            count, up = len(slots), slots[0] == run.start
            self.generations[run] = array("I", (generation,)) * count
            self.states[run] = bytes((code,)) * count
            pins[run] = _PIN * count
            self.ranks[run] = array("Q", (ranks if up else ranks[::-1]) or bytes(8 * count))
            return
        for slot, rank in zip(slots, ranks or repeat(0), strict=False):
            self.generations[slot] = generation
            self.states[slot] = code
            pins[slot] = 1
            self.ranks[slot] = rank

    def pin_idle(self, slots: Sequence[int]) -> bool:
        """Pin slots once, if they follow one another and none has a pin. Returns whether it did."""
        run, count = run_of(slots), len(slots)
        if run is None or self.pins[run].tobytes() != bytes(len(_PIN_BYTES) * count):
            return False
        self.pins[run] = _PIN * count
        return True

    def end_last_pins(self, slots: Sequence[int], code: int) -> bool:
        """End the pins of slots that follow one another, if each has one, and that state. Returns whether it did."""
        run, count = run_of(slots), len(slots)
        if run is None or self.pins[run].tobytes() != _PIN_BYTES * count or self.states[run].count(code) != count:
            return False
        self.pins[run] = array("I", bytes(len(_PIN_BYTES) * count))
        return True

    def end_filling(self, slots: Sequence[int], before: int, after: int) -> tuple[list[int], int]:
        """Move those of ``slots`` in the state ``before`` to another one, with one pin less.

        Returns:
            These slots, and how many of them have no pin left.
        """
        states, pins, count = self.states, self.pins, len(slots)
        if (run := run_of(slots)) is not None and self.end_last_pins(slots, before):
            states[run] = bytes((after,)) * count
            return list(slots), count
        done, idle = [slot for slot in slots if states[slot] == before], 0
        for slot in done:
            states[slot] = after
            left = pins[slot] - 1
            pins[slot] = left
            idle += not left
        return done, idle

    def forget_all(self) -> None:
        """Make every chunk invisible. To free a million keys at once takes too long, so they are kept for a while."""
        if len(self) > OLD_KEYS * len(self.shards):
            self._old_tables.append(self.shards)
        self.shards = new_shards()

    def free_old_keys(self) -> None:
        """Free some keys that :meth:`forget_all` has kept.

        They come from all shards alike, the latest first. The keys of one shard are scattered over the memory of all:
        if one shard went after the other, the last one would return all the memory to the system at once.
        """
        if not self._old_tables:
            return
        shards = self._old_tables[-1]
        for shard in shards:
            for _ in range(min(OLD_KEYS, len(shard))):
                shard.popitem()
        for _ in range(OLD_SHARDS):
            if shards and not shards[-1]:
                shards.pop()
        if not shards:
            self._old_tables.pop()

    def transition(self, slots: Sequence[int], event: ChunkEvent) -> None:
        """Move chunks to the states after ``event``.

        Raises:
            IllegalTransitionError: the table has no row for the state of one of them.
        """
        states = self.states
        codes = bytes([states[slot] for slot in slots])
        for code in dict.fromkeys(codes):  # usually one
            alike = slots
            if codes.count(code) < len(codes):
                alike = [slot for slot, found in zip(slots, codes, strict=True) if found == code]
            first = self.keys[alike[0]]
            after = CHUNK_STATES.next(STATES[code], event, first, partial(self.log.describe, first))
            code_after = CODES[after]
            for slot in alike:
                states[slot] = code_after
            self.log.note(event, after, self.keys_of(alike))
