"""The host tier as the manager sees it: which chunk owns which slot, who holds it, who may be evicted.

A chunk is *held* by everybody who needs its slot to stay: a store or load job, a promotion in flight, a cascade that
reads it, a reservation. A READY chunk that nobody holds is evictable. A slot has one owner and a generation; it
is free again only when its chunk is gone, so no late completion can touch another chunk's memory.

A READY chunk is *leaving* when the policy has chosen it as a victim and it is still being written below. It is readable
until then, and stays if anybody else comes to want it.

All is kept in columns by slot (see :mod:`tierkv.structures.key_table`), and every verb takes a batch. The eviction
policy knows exactly the READY chunks that are not leaving. It is not told who holds them: it is given the column of
holders when it chooses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from tierkv.abc import AdmissionPolicy, EvictionPolicy
from tierkv.errors import InvariantError, require
from tierkv.manager.contract import HOST
from tierkv.manager.host.chunk import Evicted, Filled
from tierkv.manager.host.chunk_state import CODES, STATES, TRANSITIONS, ChunkEvent, ChunkState
from tierkv.manager.host.slot_pins import SlotPins
from tierkv.policies.quotas import TenantPolicy
from tierkv.structures.key_table import PAGE_KEYS, SHARD_BYTE
from tierkv.types.keys import Key

_READY, _DOOMED = CODES[ChunkState.READY], CODES[ChunkState.DOOMED]
_EVICTED = CODES[TRANSITIONS[ChunkState.READY, ChunkEvent.EVICTED]]
_FILLING = {ChunkEvent.STORED: ChunkState.STORING, ChunkEvent.ARRIVED: ChunkState.PROMOTING}

_GENERATIONS = 1 << 32


class HostTier(SlotPins):
    """Slots, chunks and holds of the host tier. Sans-IO; every call O(1) amortised per chunk."""

    def __init__(self, num_slots: int, policy: EvictionPolicy) -> None:
        super().__init__(num_slots, policy)
        self._gate = policy if isinstance(policy, AdmissionPolicy) else None
        self._tenants = policy if isinstance(policy, TenantPolicy) else None

    @property
    def room(self) -> int:
        """Slots that can be had now: free ones and those of evictable chunks."""
        return len(self._free) + self._evictable

    @property
    def free(self) -> int:
        """Slots without a chunk."""
        return len(self._free)

    def staying(self, leases: Iterable[tuple[int, int]]) -> list[int]:
        """The slots of those ``leases``, each a slot and its generation, whose chunks are READY and not leaving."""
        generations, states, leaving = self._generations, self._states, self._leaving
        here = [slot for slot, generation in leases if generations[slot] == generation and states[slot] == _READY]
        if self._stale or leaving:
            here = [slot for slot in here if slot not in leaving and not self._is_stale(slot)]
        return here

    def held_once(self, slots: Iterable[int]) -> Iterator[int]:
        """Those of ``slots`` that one hold keeps."""
        holders = self._holders
        return (slot for slot in slots if holders[slot] == 1)

    def refused(self, keys: Sequence[Key]) -> Collection[int]:
        """Which of ``keys`` the policy does not let in, as positions."""
        return () if self._gate is None else self._gate.refuse(keys, len(self._free))

    # -- coming and going --------------------------------------------------------------------------------------------

    def make_room(self, count: int) -> list[Key] | None:
        """Evict as many chunks as it takes that ``count`` slots are free.

        Returns:
            The keys that were evicted; None if that cannot be done now: then nothing has changed.
        """
        evicted = self.evict_for(count)
        return None if evicted is None else evicted.keys

    def evict_for(self, count: int) -> Evicted | None:
        """The same; returns the slots that became free too."""
        short = count - len(self._free)
        if short <= 0:
            return Evicted((), [])
        victims = self._choose(short)
        return self._evict(victims) if victims else None

    @property
    def has_quotas(self) -> bool:
        """Whether tenants may be over their quotas."""
        return self._tenants is not None

    def trim(self) -> Evicted:
        """Evict some chunks of tenants that are over their quotas."""
        victims = () if self._tenants is None else self._tenants.trim(self._holders)
        self._evictable -= len(victims)
        return self._evict(victims) if victims else Evicted((), [])

    def _choose(self, count: int) -> Sequence[int]:
        """So many victims, whom the policy knows no more; none if that cannot be done now."""
        victims = self._policy.evict(count, self._holders) if count <= self._evictable else ()
        self._evictable -= len(victims)
        return victims

    def _evict(self, victims: Sequence[int]) -> Evicted:
        self.removals += 1
        if self._stale:
            victims = self._without_stale(victims)
        states, pages, shards = self._states, self._keys.pages, self._slots
        evicted = [pages[slot // PAGE_KEYS][slot % PAGE_KEYS] for slot in victims]
        for key, slot in zip(evicted, victims, strict=True):
            if shards[key[SHARD_BYTE]].pop(key, None) != slot:  # READY chunks only are known to the policy
                raise InvariantError(
                    f"slot {slot} was chosen as a victim, but is not readable. {self.transitions_of(key)}"
                )
            states[slot] = _EVICTED
        self._free.give_back(victims)
        self._log.note(ChunkEvent.EVICTED, STATES[_EVICTED], evicted)
        return Evicted(victims, evicted)

    def admit(self, keys: Sequence[Key], state: ChunkState, origin: str = HOST) -> list[int]:
        """Give each key a slot, held once by the caller, to be filled.

        The caller has made room, and sure that no key is visible.

        Raises:
            InvariantError: there are not so many free slots.
        """
        if len(keys) > len(self._free):
            raise InvariantError(f"admit() was called for {len(keys)} chunks, without room")
        slots = self._free.take(len(keys))
        # One number for the whole batch tells its chunks from all that owned the slots before.
        self._generation = generation = (self._generation + 1) % _GENERATIONS
        code, pages, shards = CODES[state], self._keys.pages, self._slots
        states, holders, generations = self._states, self._holders, self._generations
        for key, slot in zip(keys, slots, strict=True):
            generations[slot] = generation
            pages[slot // PAGE_KEYS][slot % PAGE_KEYS] = key
            shards[key[SHARD_BYTE]][key] = slot
            states[slot] = code
            holders[slot] = 1
        self._filling.update(slots)
        if origin != HOST:
            self._origins.update(dict.fromkeys(slots, origin))
        self._log.note(None, state, keys)
        return slots

    def filled(self, slots: Sequence[int], event: ChunkEvent) -> Filled:
        """The I/O that fills these slots went well (STORED or ARRIVED), and its hold ends.

        Those that were given up meanwhile let their slots go.

        Returns:
            The chunks that are READY now, in the order in which they were named.
        """
        if self._stale:
            self._doom_stale(slots)
        before = CODES[_FILLING[event]]
        after = CODES[TRANSITIONS[_FILLING[event], event]]
        states, holders, pages = self._states, self._holders, self._keys.pages
        done = [slot for slot in slots if states[slot] == before]
        if len(done) < len(slots):
            for slot in slots:
                if states[slot] != before:
                    self._ended_for_nobody(slot, event)
        keys = [pages[slot // PAGE_KEYS][slot % PAGE_KEYS] for slot in done]
        idle = 0
        for slot in done:
            states[slot] = after
            left = holders[slot] - 1
            holders[slot] = left
            if not left:
                idle += 1
        self._filling.difference_update(done)
        self._evictable += idle
        self._policy.add(done, keys)
        self._log.note(event, STATES[after], keys)
        if event is ChunkEvent.ARRIVED:
            for slot in done:
                self._origins.pop(slot, None)
        if self._waiters:
            self._tell_waiters(done, readable=True)
        return Filled(done, keys)

    def failed(self, slots: Iterable[int]) -> None:
        """The I/O that fills these slots went wrong, and its hold ends."""
        for slot in slots:
            if self._stale:
                self._doom_stale((slot,))
            if self._states[slot] == _DOOMED:
                self._ended_for_nobody(slot, ChunkEvent.FAILED)
                continue
            key = self._keys[slot]
            self._transition((slot,), ChunkEvent.FAILED)
            self._filling.remove(slot)
            del self._slots[key[SHARD_BYTE]][key]
            self._tell_waiters((slot,), readable=False)
            self.release((slot,))

    def _ended_for_nobody(self, slot: int, event: ChunkEvent) -> None:
        """The I/O that fills a slot ended after its chunk was given up."""
        self._transition((slot,), event)
        self._filling.discard(slot)
        self.release((slot,))

    # -- leaving -----------------------------------------------------------------------------------------------------

    def begin_leaving(self, count: int) -> list[int]:
        """Up to so many chunks that the policy would evict next, each held by the caller; they are leaving now."""
        return self._begin_leaving(self._choose(min(count, self._evictable)))

    def begin_trimming(self) -> list[int]:
        """The same for some chunks of tenants that are over their quotas."""
        victims = () if self._tenants is None else self._tenants.trim(self._holders)
        self._evictable -= len(victims)
        return self._begin_leaving(victims)

    def _begin_leaving(self, victims: Sequence[int]) -> list[int]:
        if self._stale:
            victims = self._without_stale(victims)
        for slot in victims:
            self._holders[slot] = self._writers[slot] = 1
        self._leaving.update(victims)
        return list(victims)

    def end_leaving(self, slots: Sequence[int]) -> Evicted:
        """:meth:`end_writes`; those that were leaving, and that nobody else holds, are evicted."""
        if self._stale:
            self._doom_stale(slots)
        gone = [slot for slot in slots if slot in self._leaving and self._holders[slot] == 1]
        for slot in gone:
            self._holders[slot] = self._writers[slot] = 0
        self._leaving.difference_update(gone)
        self.end_writes([slot for slot in slots if self._holders[slot]])
        return self._evict(gone) if gone else Evicted((), [])

    # -- check -------------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every invariant of the slots. Walks over all of them.

        Raises:
            InvariantError: one is broken; names it.
        """
        owned = [slot for slot in range(self.num_slots) if self._states[slot]]
        require(len(owned) + len(self._free) == self.num_slots, "slots free + owned differ from capacity")
        require(len(set(self._free)) == len(list(self._free)), "a slot is free twice")
        evictable = known = 0
        for slot in owned:
            key, code, holders = self._keys[slot], self._states[slot], self._holders[slot]
            what = f"chunk {key.hex()} ({STATES[code].value}, {holders} holders)"
            require(holders > 0 or code == _READY, f"{what}: nobody holds it")
            leaving = slot in self._leaving
            writers = self._writers[slot]
            require(writers <= holders, f"{what}: {writers} write it")
            require(not leaving or (code == _READY and writers > 0), f"{what}: it is leaving, and nobody writes it")
            known += code == _READY and not leaving
            evictable += code == _READY and not holders
            if not self._is_stale(slot):
                named = self.find(key)
                require((named == slot) == (code != _DOOMED), f"{what}, slot {slot}: its key names slot {named}")
            filling = slot in self._filling
            require(filling == (STATES[code] in _FILLING.values()) or code == _DOOMED, f"{what}: filling is {filling}")
            require(holders >= filling, f"{what}: the I/O that fills it does not hold it")
        require(evictable == self._evictable, f"{evictable} chunks are evictable, {self._evictable} are counted")
        require(known == len(self._policy), f"{known} chunks were told to the policy, it has {len(self._policy)}")
        named = len(self)
        require(named <= len(owned), f"{named} keys are visible, {len(owned)} slots are owned")
