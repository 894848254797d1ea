"""Host tier: slots, the chunks that own them, the pins on them, and eviction.

Every user of a chunk *pins* its slot: a store or load job, a promotion in flight, a write to a lower tier, a
reservation. A READY chunk without pins is evictable. A slot has one owner and a generation. It is free again only when
its chunk is gone, so no late completion can touch the memory of another chunk.

Pins are of two kinds: use (or filling) of a chunk, and writes to lower tiers. The end of a write does not count as
use: the eviction order is the one that there would be without the write.

A READY chunk is *demoting* when the policy has chosen it as a victim and it is still being written to a lower tier. It
is readable until the write ends. Any other use in the meantime cancels the demotion.

The eviction policy knows exactly the READY chunks that are not demoting. It is not informed of pins: it gets the
column of pins when it chooses victims. Every method takes a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet

from tierkv.abc import AdmissionPolicy, EvictionPolicy, WriteAwarePolicy
from tierkv.errors import InvariantError, require
from tierkv.manager.contract import HOST
from tierkv.manager.host.chunk import Evicted, Filled
from tierkv.manager.host.chunk_state import CODES, STATES, TRANSITIONS, ChunkEvent, ChunkState
from tierkv.manager.host.slot_table import SlotTable
from tierkv.manager.host.waiters import Waiters
from tierkv.policies.quotas import TenantPolicy
from tierkv.structures.key_table import PAGE_KEYS, SHARD_BYTE, IdPool, new_shards
from tierkv.types.keys import Key

_READY, _DOOMED = CODES[ChunkState.READY], CODES[ChunkState.DOOMED]
_EVICTED = CODES[TRANSITIONS[ChunkState.READY, ChunkEvent.EVICTED]]
_FILLING = {ChunkEvent.STORED: ChunkState.STORING, ChunkEvent.ARRIVED: ChunkState.PROMOTING}

_GENERATIONS = 1 << 32


class HostTier:
    """Admission, pins and eviction of chunks in the host tier. Sans-IO; every call O(1) amortised per chunk."""

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        self.num_slots = num_slots
        self.slots = SlotTable(num_slots)
        """Columns by slot, with every question about chunks and slots."""
        self.waiters = Waiters()
        """Objects that wait for chunks to become readable."""
        self.policy = policy
        """Policy that decides the eviction order."""
        self._gate = policy if isinstance(policy, AdmissionPolicy) else None
        self._tenants = policy if isinstance(policy, TenantPolicy) else None
        self._release_after_write = (
            policy.release_after_write if isinstance(policy, WriteAwarePolicy) else policy.release
        )
        self._free = IdPool(num_slots)
        self._evictable = 0
        self._demoting: set[int] = set()  # a few: bounded by the writes in flight

    def __len__(self) -> int:
        """Number of visible chunks."""
        return len(self.slots)

    @property
    def room(self) -> int:
        """Number of slots available now: free ones and those of evictable chunks."""
        return len(self._free) + self._evictable

    @property
    def free(self) -> int:
        """Number of slots without a chunk."""
        return len(self._free)

    @property
    def demoting(self) -> AbstractSet[int]:
        """Slots of chunks that are being written to a lower tier and evicted afterwards."""
        return self._demoting

    @property
    def has_quotas(self) -> bool:
        """Whether the policy keeps quotas of tenants."""
        return self._tenants is not None

    def refused(self, keys: Sequence[Key]) -> Collection[int]:
        """Positions of those ``keys`` that the policy does not admit."""
        return () if self._gate is None else self._gate.refuse(keys, len(self._free))

    def ready_slots(self, leases: Iterable[tuple[int, int]]) -> list[int]:
        """Slots of those ``leases`` (slot, generation) whose chunks are READY and not demoting."""
        table, demoting = self.slots, self._demoting
        generations, states = table.generations, table.states
        slots = [slot for slot, generation in leases if generations[slot] == generation and states[slot] == _READY]
        if table.stale or demoting:
            slots = [slot for slot in slots if slot not in demoting and not table.is_stale(slot)]
        return slots

    # -- pins --------------------------------------------------------------------------------------------------------

    def pin(self, slots: Iterable[int]) -> None:
        """Keep the slots until :meth:`unpin`. Costs next to nothing: the policy is not informed."""
        if self._demoting:
            slots = tuple(slots)
            self.cancel_demotions(slots)
        pins = self.slots.pins
        for slot in slots:
            count = pins[slot]
            if not count:  # only READY chunks can be without pins
                self._evictable -= 1
            pins[slot] = count + 1

    def unpin(self, slots: Iterable[int]) -> None:
        """Undo one pin of each slot, in this order (tail first, S54).

        A READY chunk without further pins is evictable, as the most recently used; the slot of a DOOMED one is free.

        Raises:
            InvariantError: a slot has no pin.
        """
        table = self.slots
        if table.stale:
            slots = tuple(slots)
            self._drop_stale(slots)
        pins, states, write_pins = table.pins, table.states, table.write_pins
        used: list[int] = []
        idle = 0
        for slot in slots:
            count = pins[slot] - 1
            if count < 0:
                raise self._not_pinned(slot)
            pins[slot] = count
            if not count:
                if states[slot] == _READY:
                    used.append(slot)
                    idle += 1
                else:
                    self._free_doomed([slot])
            elif write_pins[slot] == count and states[slot] == _READY:
                used.append(slot)
        if used:
            self._evictable += idle
            self.policy.release(used)

    def pin_to_write(self, slots: Iterable[int]) -> None:
        """Keep the slots for a write to a lower tier until :meth:`unpin_written`. Does not cancel demotions."""
        pins, write_pins = self.slots.pins, self.slots.write_pins
        for slot in slots:
            count = pins[slot]
            if not count:
                self._evictable -= 1
            pins[slot] = count + 1
            write_pins[slot] += 1

    def unpin_written(self, slots: Sequence[int]) -> None:
        """Undo one write pin of each slot, in this order. Does not count as use.

        Raises:
            InvariantError: one of them has no write pin.
        """
        table = self.slots
        if table.stale:
            self._drop_stale(slots)
        pins, states, write_pins = table.pins, table.states, table.write_pins
        idle: list[int] = []
        for slot in slots:
            if not write_pins[slot]:
                raise self._not_pinned(slot)
            write_pins[slot] -= 1
            count = pins[slot] - 1
            pins[slot] = count
            if not count:
                if states[slot] == _READY:
                    idle.append(slot)
                else:
                    self._free_doomed([slot])
        if idle:
            self._evictable += len(idle)
            self._release_after_write(idle)

    def _not_pinned(self, slot: int) -> InvariantError:
        key = self.slots.keys[slot]
        return InvariantError(
            f"chunk {key.hex()} was unpinned too often. Transitions: {self.slots.transitions_of(key)}"
        )

    def touch(self, keys: Iterable[Key]) -> None:
        """Count a use of those chunks that are READY; the tail of a prefix comes first (S54)."""
        shards, states = self.slots.shards, self.slots.states
        slots = [shards[key[SHARD_BYTE]].get(key) for key in keys]
        ready = [slot for slot in slots if slot is not None and states[slot] == _READY]
        if self._demoting:
            self.cancel_demotions(ready)
        self.policy.touch(ready)

    # -- admission and filling ---------------------------------------------------------------------------------------

    def admit(self, keys: Sequence[Key], state: ChunkState, origin: str = HOST) -> list[int]:
        """Give each key a slot, pinned once by the caller, to be filled.

        The caller has made room before, and checked that no key is visible.

        Raises:
            InvariantError: there are fewer free slots.
        """
        if len(keys) > len(self._free):
            raise InvariantError(f"admit() was called for {len(keys)} chunks, without room")
        slots = self._free.take(len(keys))
        table = self.slots
        # One number for the whole batch differs from those of all previous owners of these slots.
        table.newest_generation = generation = (table.newest_generation + 1) % _GENERATIONS
        code, pages, shards = CODES[state], table.keys.pages, table.shards
        states, pins, generations = table.states, table.pins, table.generations
        for key, slot in zip(keys, slots, strict=True):
            generations[slot] = generation
            pages[slot // PAGE_KEYS][slot % PAGE_KEYS] = key
            shards[key[SHARD_BYTE]][key] = slot
            states[slot] = code
            pins[slot] = 1
        table.filling.update(slots)
        if origin != HOST:
            table.origins.update(dict.fromkeys(slots, origin))
        table.log.note(None, state, keys)
        return slots

    def filled(self, slots: Sequence[int], event: ChunkEvent) -> Filled:
        """End I/O that filled these slots (STORED or ARRIVED), and its pins. Slots of DOOMED chunks become free.

        Returns:
            The chunks that are READY now, in the order of ``slots``.
        """
        table = self.slots
        if table.stale:
            self._drop_stale(slots)
        before = CODES[_FILLING[event]]
        after = CODES[TRANSITIONS[_FILLING[event], event]]
        states, pins, pages = table.states, table.pins, table.keys.pages
        done = [slot for slot in slots if states[slot] == before]
        if len(done) < len(slots):
            for slot in slots:
                if states[slot] != before:
                    self._end_filling_doomed(slot, event)
        keys = [pages[slot // PAGE_KEYS][slot % PAGE_KEYS] for slot in done]
        idle = 0
        for slot in done:
            states[slot] = after
            left = pins[slot] - 1
            pins[slot] = left
            if not left:
                idle += 1
        table.filling.difference_update(done)
        self._evictable += idle
        self.policy.add(done, keys)
        table.log.note(event, STATES[after], keys)
        if event is ChunkEvent.ARRIVED:
            for slot in done:
                table.origins.pop(slot, None)
        if self.waiters.by_slot:
            self.waiters.settle(done, readable=True)
        return Filled(done, keys)

    def failed(self, slots: Iterable[int]) -> None:
        """End I/O that should have filled these slots and failed, and its pins."""
        table = self.slots
        for slot in slots:
            if table.stale:
                self._drop_stale((slot,))
            if table.states[slot] == _DOOMED:
                self._end_filling_doomed(slot, ChunkEvent.FAILED)
                continue
            key = table.keys[slot]
            table.transition((slot,), ChunkEvent.FAILED)
            table.filling.remove(slot)
            del table.shards[key[SHARD_BYTE]][key]
            self.waiters.settle((slot,), readable=False)
            self.unpin((slot,))

    def _end_filling_doomed(self, slot: int, event: ChunkEvent) -> None:
        """End the I/O that fills the slot of a chunk that was dropped meanwhile."""
        self.slots.transition((slot,), event)
        self.slots.filling.discard(slot)
        self.unpin((slot,))

    # -- eviction ----------------------------------------------------------------------------------------------------

    def evict_for(self, count: int) -> Evicted | None:
        """Evict as many chunks as needed so that ``count`` slots are free.

        Returns:
            The evicted chunks; None if there are not enough victims now: then nothing has changed.
        """
        short = count - len(self._free)
        if short <= 0:
            return Evicted((), [])
        victims = self._choose(short)
        return self._evict(victims) if victims else None

    def evict_over_quota(self) -> Evicted:
        """Evict some chunks of tenants that are over their quotas."""
        victims = () if self._tenants is None else self._tenants.trim(self.slots.pins)
        self._evictable -= len(victims)
        return self._evict(victims) if victims else Evicted((), [])

    def _choose(self, count: int) -> Sequence[int]:
        """Take ``count`` victims from the policy; none if there are not enough now."""
        victims = self.policy.evict(count, self.slots.pins) if count <= self._evictable else ()
        self._evictable -= len(victims)
        return victims

    def _evict(self, victims: Sequence[int]) -> Evicted:
        table = self.slots
        table.removals += 1
        if table.stale:
            victims = self._without_stale(victims)
        states, pages, shards = table.states, table.keys.pages, table.shards
        evicted = [pages[slot // PAGE_KEYS][slot % PAGE_KEYS] for slot in victims]
        for key, slot in zip(evicted, victims, strict=True):
            if shards[key[SHARD_BYTE]].pop(key, None) != slot:  # the policy knows only READY chunks
                raise InvariantError(
                    f"slot {slot} was chosen as a victim, but is not readable. Transitions: {table.transitions_of(key)}"
                )
            states[slot] = _EVICTED
        self._free.give_back(victims)
        table.log.note(ChunkEvent.EVICTED, STATES[_EVICTED], evicted)
        return Evicted(victims, evicted)

    # -- demotion ----------------------------------------------------------------------------------------------------

    def begin_demotions(self, count: int) -> list[int]:
        """Take up to ``count`` victims from the policy; they are demoting now, each pinned by the caller."""
        return self._begin_demotions(self._choose(min(count, self._evictable)))

    def begin_quota_demotions(self) -> list[int]:
        """Begin to demote some chunks of tenants that are over their quotas, each pinned by the caller."""
        victims = () if self._tenants is None else self._tenants.trim(self.slots.pins)
        self._evictable -= len(victims)
        return self._begin_demotions(victims)

    def _begin_demotions(self, victims: Sequence[int]) -> list[int]:
        table = self.slots
        if table.stale:
            victims = self._without_stale(victims)
        for slot in victims:
            table.pins[slot] = table.write_pins[slot] = 1
        self._demoting.update(victims)
        return list(victims)

    def end_demotions(self, slots: Sequence[int]) -> Evicted:
        """End the writes of these slots, as :meth:`unpin_written`, and evict those that are demoting and unpinned."""
        table = self.slots
        if table.stale:
            self._drop_stale(slots)
        gone = [slot for slot in slots if slot in self._demoting and table.pins[slot] == 1]
        for slot in gone:
            table.pins[slot] = table.write_pins[slot] = 0
        self._demoting.difference_update(gone)
        self.unpin_written([slot for slot in slots if table.pins[slot]])
        return self._evict(gone) if gone else Evicted((), [])

    def cancel_demotions(self, slots: Iterable[int]) -> None:
        """Give those of ``slots`` that are demoting back to the policy: they will not be evicted after the write."""
        if not self._demoting.isdisjoint(slots):
            kept = list(self._demoting.intersection(slots))
            self._demoting.difference_update(kept)
            self.policy.add(kept, [self.slots.keys[slot] for slot in kept])

    # -- drop and reset ----------------------------------------------------------------------------------------------

    def drop(self, slots: Sequence[int]) -> None:
        """Make visible chunks invisible now; each slot is free once it has no pins."""
        table = self.slots
        if table.stale:
            self._drop_stale(slots)
        table.removals += 1
        visible = [slot for slot in slots if table.states[slot] != _DOOMED]
        for slot in visible:
            key = table.keys[slot]
            del table.shards[key[SHARD_BYTE]][key]
        self._doom(visible)

    def _doom(self, slots: Sequence[int]) -> None:
        """Drop chunks that no table of keys names any more."""
        states, pins = self.slots.states, self.slots.pins
        ready = [slot for slot in slots if states[slot] == _READY]
        if ready:
            self.policy.remove([slot for slot in ready if slot not in self._demoting])
            self._demoting.difference_update(ready)
            self._evictable -= sum(not pins[slot] for slot in ready)
        self.slots.transition(slots, ChunkEvent.DROPPED)
        if self.waiters.by_slot:
            self.waiters.settle(slots, readable=False)
        self._free_doomed([slot for slot in slots if not pins[slot]])

    def _free_doomed(self, slots: list[int]) -> None:
        """Free the slots of DOOMED chunks that have no pins any more."""
        table = self.slots
        table.transition(slots, ChunkEvent.RELEASED)
        for slot in slots:
            table.keys[slot] = Key(b"")
            if table.origins:
                table.origins.pop(slot, None)
        self._free.give_back(slots)

    def reset(self) -> None:
        """Make every chunk invisible at once, by replacing the tables of keys only.

        The chunks are stale now (see :class:`SlotTable`). Each is dropped when a call touches its slot, or by
        :meth:`sweep`.
        """
        table = self.slots
        table.removals += 1
        table.stale += [shard for shard in table.shards if shard]
        table.shards = new_shards()

    def sweep(self, chunks_max: int) -> None:
        """Drop up to ``chunks_max`` stale chunks."""
        stale = self.slots.stale
        while stale and chunks_max > 0:
            shard = stale[-1]
            slots = [shard.popitem()[1] for _ in range(min(len(shard), chunks_max))]
            self._drop_stale(slots)
            chunks_max -= len(slots)
            if not shard:
                stale.pop()

    def _drop_stale(self, slots: Iterable[int]) -> None:
        """Drop those of ``slots`` whose chunks are stale."""
        is_stale = self.slots.is_stale
        self._doom([slot for slot in dict.fromkeys(slots) if is_stale(slot)])

    def _without_stale(self, victims: Sequence[int]) -> list[int]:
        """Victims that are not stale. The slots of the stale ones become free; their eviction is not reported."""
        stale = [slot for slot in victims if self.slots.is_stale(slot)]
        self.slots.transition(stale, ChunkEvent.DROPPED)
        gone = set(stale)
        kept = [slot for slot in victims if slot not in gone]
        self._free_doomed(stale)
        return kept

    # -- check -------------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every invariant of the slots. O(slots).

        Raises:
            InvariantError: one is broken; names it.
        """
        table = self.slots
        owned = [slot for slot in range(self.num_slots) if table.states[slot]]
        require(len(owned) + len(self._free) == self.num_slots, "slots free + owned differ from capacity")
        require(len(set(self._free)) == len(list(self._free)), "a slot is free twice")
        evictable = known = 0
        for slot in owned:
            key, code, pins = table.keys[slot], table.states[slot], table.pins[slot]
            what = f"chunk {key.hex()} ({STATES[code].value}, {pins} pins)"
            require(pins > 0 or code == _READY, f"{what}: it has no pins")
            demoting = slot in self._demoting
            write_pins = table.write_pins[slot]
            require(write_pins <= pins, f"{what}: {write_pins} of its pins are for writes")
            require(not demoting or (code == _READY and write_pins > 0), f"{what}: it is demoting without a write")
            known += code == _READY and not demoting
            evictable += code == _READY and not pins
            if not table.is_stale(slot):
                named = table.find(key)
                require((named == slot) == (code != _DOOMED), f"{what}, slot {slot}: its key names slot {named}")
            filling = slot in table.filling
            require(filling == (STATES[code] in _FILLING.values()) or code == _DOOMED, f"{what}: filling is {filling}")
            require(pins >= filling, f"{what}: the I/O that fills it does not pin it")
        require(evictable == self._evictable, f"{evictable} chunks are evictable, {self._evictable} are counted")
        require(known == len(self.policy), f"{known} chunks were added to the policy, it has {len(self.policy)}")
        named = len(table)
        require(named <= len(owned), f"{named} keys are visible, {len(owned)} slots are owned")
