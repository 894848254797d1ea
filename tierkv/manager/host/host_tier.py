"""Host tier: slots, the chunks that own them, the pins on them, and eviction.

Every user of a chunk *pins* its slot: a store or load job, a promotion in flight, a write to a lower tier, a
passage. A READY chunk without pins is evictable. A slot has one owner and a generation. It is free again only when
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

from tierkv.abc import AdmissionPolicy, EvictionPolicy
from tierkv.errors import InvariantError
from tierkv.manager.host.checks import check_slots
from tierkv.manager.host.chunk import Evicted, Filled
from tierkv.manager.host.chunk_state import CODES, FILLING, STATES, TRANSITIONS, ChunkEvent, ChunkState
from tierkv.manager.host.dropping import ChunkDropping
from tierkv.manager.host.slot_table import GENERATIONS, SlotTable
from tierkv.manager.host.waiters import Waiters
from tierkv.policies.eviction_list import EvictionList
from tierkv.structures.key_table import SHARD_BYTE, IdPool
from tierkv.types.cache_events import HOST
from tierkv.types.keys import Key

_READY, _DOOMED = CODES[ChunkState.READY], CODES[ChunkState.DOOMED]
_EVICTED = CODES[TRANSITIONS[ChunkState.READY, ChunkEvent.EVICTED]]


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
        self.listed = EvictionList(policy, self.slots.key, self.slots.ranks)
        """Chunks that the policy knows: READY, and not demoting."""
        self.has_quotas = self.listed.tenants is not None
        """Whether the policy keeps quotas of tenants."""
        self._gate = policy if isinstance(policy, AdmissionPolicy) else None
        self._free = IdPool(num_slots)
        self.dropping = ChunkDropping(self.slots, self._free, self.listed, self.waiters)
        """Removal of chunks that are not evicted."""

    def __len__(self) -> int:
        """Number of visible chunks."""
        return len(self.slots)

    @property
    def room(self) -> int:
        """Number of slots available now: free ones and those of evictable chunks."""
        return self._free.left + self.listed.evictable

    @property
    def free(self) -> int:
        """Number of slots without a chunk."""
        return self._free.left

    def refused(self, keys: Sequence[Key]) -> Collection[int]:
        """Positions of those ``keys`` that the policy does not admit."""
        return () if self._gate is None else self._gate.refuse(keys, self._free.left)

    def ready_slots(self, leases: Iterable[tuple[int, int]]) -> list[int]:
        """Slots of those ``leases`` (slot, generation) whose chunks are READY and not demoting."""
        slots, demoting = self.slots.ready(leases), self.slots.demoting
        return [slot for slot in slots if slot not in demoting] if demoting else slots

    # -- pins --------------------------------------------------------------------------------------------------------

    def pin(self, slots: Iterable[int]) -> None:
        """Keep the slots until :meth:`unpin`. Costs next to nothing: the policy is not informed."""
        slots, pins, listed = tuple(slots), self.slots.pins, self.listed
        if self.slots.demoting:
            self.cancel_demotions(slots)
        if self.slots.pin_idle(slots):  # only READY chunks can be without pins
            listed.evictable -= len(slots)
            return
        for slot in slots:
            count = pins[slot]
            if not count:
                listed.evictable -= 1
            pins[slot] = count + 1

    def pin_readable(self, key: Key) -> int | None:
        """Pin the chunk of a key if it is READY. Returns its slot; None: there is no such chunk."""
        table = self.slots
        shard = table.shards[key[SHARD_BYTE]]
        if key not in shard or table.states[slot := shard[key]] != _READY:
            return None
        if slot in table.demoting:
            self.cancel_demotions((slot,))
        count = table.pins[slot]
        if not count:
            self.listed.evictable -= 1
        table.pins[slot] = count + 1
        return slot

    def unpin(self, slots: Iterable[int]) -> None:
        """Undo one pin of each slot, in this order (tail first, S54).

        A READY chunk without further pins is evictable, as the most recently used; the slot of a DOOMED one is free.

        Raises:
            InvariantError: a slot has no pin.
        """
        table, slots = self.slots, tuple(slots)
        if table.unswept:
            self.dropping.drop_stale(slots)
        if table.end_last_pins(slots, _READY):
            self.listed.evictable += len(slots)
            self.policy.release(slots)
            return
        pins, states, write_pins = table.pins, table.states, table.write_pins
        for slot in slots:
            count = pins[slot] - 1
            if count < 0:
                raise self._not_pinned(slot)
            pins[slot] = count
        ended = [*dict.fromkeys(slots[::-1])][::-1]  # each slot once, at its last position
        used = [slot for slot in ended if write_pins[slot] == pins[slot] and states[slot] == _READY]
        gone = [slot for slot in ended if not pins[slot] and states[slot] != _READY]
        if used:
            self.listed.evictable += [pins[slot] for slot in used].count(0)
            self.policy.release(used)
        if gone:
            self.dropping.free_doomed(gone)

    def pin_to_write(self, slots: Iterable[int]) -> None:
        """Keep the slots for a write to a lower tier until :meth:`unpin_written`. Does not cancel demotions."""
        pins, write_pins, listed = self.slots.pins, self.slots.write_pins, self.listed
        for slot in slots:
            count = pins[slot]
            if not count:
                listed.evictable -= 1
            pins[slot] = count + 1
            write_pins[slot] += 1

    def unpin_written(self, slots: Sequence[int]) -> None:
        """Undo one write pin of each slot, in this order. Does not count as use.

        Raises:
            InvariantError: one of them has no write pin.
        """
        table = self.slots
        if table.unswept:
            self.dropping.drop_stale(slots)
        pins, states, write_pins = table.pins, table.states, table.write_pins
        idle: list[int] = []
        gone: list[int] = []
        for slot in slots:
            if not write_pins[slot]:
                raise self._not_pinned(slot)
            write_pins[slot] -= 1
            count = pins[slot] - 1
            pins[slot] = count
            if not count:
                (idle if states[slot] == _READY else gone).append(slot)
        if idle:
            self.listed.evictable += len(idle)
            self.listed.release_after_write(idle)
        if gone:
            self.dropping.free_doomed(gone)

    def _not_pinned(self, slot: int) -> InvariantError:
        key = self.slots.keys[slot]
        return InvariantError(
            f"chunk {key.hex()} was unpinned too often. Transitions: {self.slots.transitions_of(key)}"
        )

    def touch(self, keys: Iterable[Key]) -> None:
        """Count a use of those chunks that are READY; the tail of a prefix comes first (S54)."""
        states = self.slots.states
        ready = [slot for slot in self.slots.find_all(keys) if slot is not None and states[slot] == _READY]
        if self.slots.demoting:
            self.cancel_demotions(ready)
        self.policy.touch(ready)

    # -- admission and filling ---------------------------------------------------------------------------------------

    def split_offered(self, keys: Collection[Key]) -> tuple[list[Key], list[int]]:
        """Return those of ``keys`` that a store can add, in order, and the slots of the others.

        A chunk that a tier is read for can be stored once nothing waits for the read: it may fail, or never begin.
        """
        table, missing = self.slots, self.slots.missing(keys)
        if len(missing) == len(keys):
            return missing, []
        present = [slot for slot in map(table.find, keys) if slot is not None]
        given_up = {slot for slot in table.fills.read_among(present) if not self.waiters.has_any((slot,))}
        if given_up:
            present = [slot for slot in present if slot not in given_up]
            missing = [key for key in keys if (slot := table.find(key)) is None or slot in given_up]
        return missing, present

    def admit(self, keys: Sequence[Key], state: ChunkState, origin: str = HOST, ranks: Sequence[int] = ()) -> list[int]:
        """Give each key a slot, pinned once by the caller, to be filled.

        The caller has made room before, and checked that no key is visible, unless :meth:`split_offered` returned it:
        then the read is dropped, and its slot is free at its end. ranks: one per chunk; empty: unknown.

        Raises:
            InvariantError: there are fewer free slots.
        """
        if len(keys) > self._free.left:
            raise InvariantError(f"admit() was called for {len(keys)} chunks, without room")
        table = self.slots
        if table.fills.num_reading and (given_up := [slot for slot in map(table.find, keys) if slot is not None]):
            self.drop(given_up)
        slots = self._free.take(len(keys))
        # One number for the whole batch differs from those of all previous owners of these slots.
        table.newest_generation = (table.newest_generation + 1) % GENERATIONS
        table.new_generations += 1
        table.begin_filling(slots, CODES[state], ranks)
        owners, shards = table.keys, table.shards
        for key, slot in zip(keys, slots, strict=True):
            owners[slot] = key
            shards[key[SHARD_BYTE]][key] = slot
        table.fills.begin(slots, origin)
        table.log.note(None, state, keys)
        return slots

    def filled(self, slots: Sequence[int], event: ChunkEvent) -> Filled:
        """End I/O that filled these slots (STORED or ARRIVED), and its pins. Slots of DOOMED chunks become free.

        Returns:
            The chunks that are READY now, in the order of ``slots``.
        """
        table = self.slots
        if table.unswept:
            self.dropping.drop_stale(slots)
        before = CODES[FILLING[event]]
        after = CODES[TRANSITIONS[FILLING[event], event]]
        done, idle = table.end_filling(slots, before, after)
        if len(done) < len(slots):
            filled = set(done)
            self._end_filling_doomed([slot for slot in slots if slot not in filled], event)
        keys = list(table.keys_of(done))
        table.fills.end(done)
        self.listed.evictable += idle
        self.listed.order.add(done, keys, list(map(table.ranks.__getitem__, done)))
        table.log.note(event, STATES[after], keys)
        if self.waiters.by_slot:
            self.waiters.settle(done, readable=True)
        return Filled(done, keys)

    def failed(self, slots: Sequence[int]) -> None:
        """End I/O that should have filled these slots and failed, and its pins."""
        table = self.slots
        if table.unswept:
            self.dropping.drop_stale(slots)
        lost = [slot for slot in slots if table.states[slot] != _DOOMED]
        if len(lost) < len(slots):
            self._end_filling_doomed([slot for slot in slots if table.states[slot] == _DOOMED], ChunkEvent.FAILED)
        if not lost:
            return
        table.transition(lost, ChunkEvent.FAILED)
        table.fills.end(lost)
        for slot in lost:
            key = table.keys[slot]
            del table.shards[key[SHARD_BYTE]][key]
        self.waiters.settle(lost, readable=False)
        self.unpin(lost)

    def _end_filling_doomed(self, slots: Sequence[int], event: ChunkEvent) -> None:
        """End the I/O that fills slots of chunks that were dropped meanwhile."""
        self.slots.transition(slots, event)
        self.slots.fills.end(slots)
        self.unpin(slots)

    # -- eviction ----------------------------------------------------------------------------------------------------

    def continue_prefix(self, slots: Sequence[int | None], ranks: Sequence[int]) -> None:
        """Rank visible chunks anew, in prefix order, because a request continues them; the head is the most recent."""
        table = self.slots
        found = [(slot, rank) for slot, rank in zip(slots, ranks, strict=True) if slot is not None]
        for slot, rank in found if any(ranks) else ():
            table.ranks[slot] = rank
        ready = [slot for slot, _ in found if table.states[slot] == _READY]
        if table.demoting:
            self.cancel_demotions(ready)
        self.listed.order.mark(ready, [table.ranks[slot] for slot in ready])
        self.policy.release(ready[::-1])

    def evict_for_tail(self, count: int, rank: int) -> Evicted:
        """Evict up to as many chunks as needed so that ``count`` slots are free, but none that would be evicted later.

        rank: of the first of the chunks that need the slots; those of its own request are kept for it.
        """
        short = min(count - self._free.left, self.listed.evictable)
        victims = self.listed.evict(short, self.slots.pins, rank)
        return self._evict(victims) if victims else Evicted((), [])

    def evict_for(self, count: int) -> Evicted | None:
        """Evict as many chunks as needed so that ``count`` slots are free.

        Returns:
            The evicted chunks; None if there are not enough victims now: then nothing has changed.
        """
        short = count - self._free.left
        if short <= 0:
            return Evicted((), [])
        victims = self.listed.evict(short, self.slots.pins)
        return self._evict(victims) if victims else None

    def evict_over_quota(self) -> Evicted:
        """Evict some chunks of tenants that are over their quotas."""
        victims = self.listed.evict_over_quota(self.slots.pins)
        return self._evict(victims) if victims else Evicted((), [])

    def _evict(self, victims: Sequence[int]) -> Evicted:
        table = self.slots
        table.removals += 1
        if table.unswept:
            victims = self.dropping.without_stale(victims)
        states, shards = table.states, table.shards
        evicted = list(table.keys_of(victims))
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
        return self._begin_demotions(self.listed.evict(min(count, self.listed.evictable), self.slots.pins))

    def begin_quota_demotions(self) -> list[int]:
        """Begin to demote some chunks of tenants that are over their quotas, each pinned by the caller."""
        return self._begin_demotions(self.listed.evict_over_quota(self.slots.pins))

    def _begin_demotions(self, victims: Sequence[int]) -> list[int]:
        table = self.slots
        if table.unswept:
            victims = self.dropping.without_stale(victims)
        for slot in victims:
            table.pins[slot] = table.write_pins[slot] = 1
        table.demoting.update(victims)
        return list(victims)

    def end_demotions(self, slots: Sequence[int]) -> Evicted:
        """End the writes of these slots, as :meth:`unpin_written`, and evict those that are demoting and unpinned."""
        table = self.slots
        if table.unswept:
            self.dropping.drop_stale(slots)
        gone = [slot for slot in slots if slot in table.demoting and table.pins[slot] == 1]
        for slot in gone:
            table.pins[slot] = table.write_pins[slot] = 0
        table.demoting.difference_update(gone)
        self.unpin_written([slot for slot in slots if table.pins[slot]])
        return self._evict(gone) if gone else Evicted((), [])

    def cancel_demotions(self, slots: Iterable[int]) -> None:
        """Give those of ``slots`` that are demoting back to the policy: they will not be evicted after the write."""
        table = self.slots
        if not table.demoting.isdisjoint(slots):
            kept = list(table.demoting.intersection(slots))
            table.demoting.difference_update(kept)
            self.listed.order.add(kept, [table.keys[slot] for slot in kept], [table.ranks[slot] for slot in kept])

    # -- drop and reset ----------------------------------------------------------------------------------------------

    def drop(self, slots: Sequence[int]) -> Sequence[Key]:
        """Make visible chunks invisible now; each slot is free once it has no pins. Returns their keys."""
        return self.dropping.drop(slots)

    def reset(self) -> None:
        """Make every chunk invisible at once, whatever their number: see :class:`~.dropping.ChunkDropping`."""
        self.dropping.reset()

    # -- check -------------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every invariant of the slots. O(slots).

        Raises:
            InvariantError: one is broken; names it.
        """
        check_slots(self.slots, self._free, self.listed)
