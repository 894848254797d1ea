"""Who holds the chunk in a slot, and what becomes of it when nobody does any more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from tierkv.abc import EvictionPolicy, WriteAwarePolicy
from tierkv.errors import InvariantError
from tierkv.manager.host.chunk_state import CODES, ChunkEvent, ChunkState
from tierkv.manager.host.slot_table import SlotTable
from tierkv.structures.key_table import SHARD_BYTE, IdPool, column, new_shards
from tierkv.types.keys import Key

_READY, _DOOMED = CODES[ChunkState.READY], CODES[ChunkState.DOOMED]


class SlotPins(SlotTable):
    """Holds, and what they keep from going. :mod:`tierkv.manager.host.host_tier` says who comes, and who leaves for it.

    Two kinds of holds: of those that use a chunk, or fill its slot; and of writes to tiers below. The end of a write is
    no use: the order in which chunks leave is what it would be without the write.
    """

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        super().__init__(num_slots)
        self._policy = policy
        self._release_after_write = (
            policy.release_after_write if isinstance(policy, WriteAwarePolicy) else policy.release
        )
        self._free = IdPool(num_slots)
        self._evictable = 0
        self._leaving: set[int] = set()  # a few, under the bound of what is written at once
        self._writers = column("H", num_slots)  # how many of a slot's holders are writes below

    @property
    def policy(self) -> EvictionPolicy:
        """In which order chunks leave."""
        return self._policy

    @property
    def leaving(self) -> AbstractSet[int]:
        """The slots of chunks that are being written below, to be evicted then."""
        return self._leaving

    # -- holds -------------------------------------------------------------------------------------------------------

    def hold(self, slots: Iterable[int]) -> None:
        """Keep the slots until :meth:`release`. The policy does not hear of it: holds cost next to nothing."""
        if self._leaving:
            slots = tuple(slots)
            self.stay(slots)
        holders = self._holders
        for slot in slots:
            count = holders[slot]
            if not count:  # only READY chunks can have nobody
                self._evictable -= 1
            holders[slot] = count + 1

    def release(self, slots: Iterable[int]) -> None:
        """Undo one hold of each, in this order (tail first, S54).

        The last one makes a READY chunk evictable, as the most recently used, and lets a DOOMED one go.
        """
        if self._stale:
            slots = tuple(slots)
            self._doom_stale(slots)
        holders, states, writers = self._holders, self._states, self._writers
        used: list[int] = []
        idle = 0
        for slot in slots:
            count = holders[slot] - 1
            if count < 0:
                raise self._not_held(slot)
            holders[slot] = count
            if not count:
                if states[slot] == _READY:
                    used.append(slot)
                    idle += 1
                else:
                    self._go([slot])
            elif writers[slot] == count and states[slot] == _READY:
                used.append(slot)
        if used:
            self._evictable += idle
            self._policy.release(used)

    def hold_to_write(self, slots: Iterable[int]) -> None:
        """Keep the slots for a write below until :meth:`end_writes`: from another chunk, but no chunk from leaving."""
        holders, writers = self._holders, self._writers
        for slot in slots:
            count = holders[slot]
            if not count:
                self._evictable -= 1
            holders[slot] = count + 1
            writers[slot] += 1

    def end_writes(self, slots: Sequence[int]) -> None:
        """Undo one hold of a write of each, in this order. That is no use."""
        if self._stale:
            self._doom_stale(slots)
        holders, states, writers = self._holders, self._states, self._writers
        idle: list[int] = []
        for slot in slots:
            if not writers[slot]:
                raise self._not_held(slot)
            writers[slot] -= 1
            count = holders[slot] - 1
            holders[slot] = count
            if not count:
                if states[slot] == _READY:
                    idle.append(slot)
                else:
                    self._go([slot])
        if idle:
            self._evictable += len(idle)
            self._release_after_write(idle)

    def is_written(self, slot: int) -> bool:
        """Whether a write below holds a slot."""
        return self._writers[slot] > 0

    def _not_held(self, slot: int) -> InvariantError:
        key = self._keys[slot]
        return InvariantError(f"chunk {key.hex()} was released too often. Transitions: {self.transitions_of(key)}")

    def touch(self, keys: Iterable[Key]) -> None:
        """A request used these; give the tail of a prefix first (S54). What is not readable here is passed over."""
        shards = self._slots
        slots = [shards[key[SHARD_BYTE]].get(key) for key in keys]
        ready = [slot for slot in slots if slot is not None and self._states[slot] == _READY]
        if self._leaving:
            self.stay(ready)
        self._policy.touch(ready)

    def stay(self, slots: Iterable[int]) -> None:
        """Those of ``slots`` that are leaving stay."""
        if not self._leaving.isdisjoint(slots):
            staying = list(self._leaving.intersection(slots))
            self._leaving.difference_update(staying)
            self._policy.add(staying, [self._keys[slot] for slot in staying])

    # -- going -------------------------------------------------------------------------------------------------------

    def drop(self, slots: Sequence[int]) -> None:
        """Make visible chunks invisible now; a slot is free once nobody holds it."""
        if self._stale:
            self._doom_stale(slots)
        self.removals += 1
        visible = [slot for slot in slots if self._states[slot] != _DOOMED]
        for slot in visible:
            key = self._keys[slot]
            del self._slots[key[SHARD_BYTE]][key]
        self._doom(visible)

    def _doom(self, slots: Sequence[int]) -> None:
        """Drop chunks that no table names any more."""
        states, holders = self._states, self._holders
        ready = [slot for slot in slots if states[slot] == _READY]
        if ready:
            self._policy.remove([slot for slot in ready if slot not in self._leaving])
            self._leaving.difference_update(ready)
            self._evictable -= sum(not holders[slot] for slot in ready)
        self._transition(slots, ChunkEvent.DROPPED)
        if self._waiters:
            self._tell_waiters(slots, readable=False)
        self._go([slot for slot in slots if not holders[slot]])

    def _go(self, slots: list[int]) -> None:
        """Doomed chunks that nobody holds any more."""
        self._transition(slots, ChunkEvent.RELEASED)
        for slot in slots:
            self._keys[slot] = Key(b"")
            if self._origins:
                self._origins.pop(slot, None)
        self._free.give_back(slots)

    # -- reset -------------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Make every chunk invisible at once. The price is paid later: see :meth:`sweep`.

        Nothing but the tables of keys is replaced. A chunk of before is *stale*: no table names its slot any more. It
        is dropped for good when somebody comes to its slot, or the sweep does.
        """
        self.removals += 1
        self._stale += [shard for shard in self._slots if shard]
        self._slots = new_shards()

    def sweep(self, chunks_max: int) -> None:
        """Drop up to so many of the chunks that a reset left behind."""
        while self._stale and chunks_max > 0:
            shard = self._stale[-1]
            slots = [shard.popitem()[1] for _ in range(min(len(shard), chunks_max))]
            self._doom_stale(slots)
            chunks_max -= len(slots)
            if not shard:
                self._stale.pop()

    def _doom_stale(self, slots: Iterable[int]) -> None:
        """Those of ``slots`` whose chunks are of before a reset are dropped."""
        self._doom([slot for slot in dict.fromkeys(slots) if self._is_stale(slot)])

    def _without_stale(self, victims: Sequence[int]) -> list[int]:
        """Victims that are not of before a reset; the others' slots are free now, and nobody needs to hear of them."""
        stale = [slot for slot in victims if self._is_stale(slot)]
        self._transition(stale, ChunkEvent.DROPPED)
        gone = set(stale)
        kept = [slot for slot in victims if slot not in gone]
        self._go(stale)
        return kept
