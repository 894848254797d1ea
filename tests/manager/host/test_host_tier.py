"""Slots and chunks of the host tier, against a model that is obviously right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierkv.errors import InvariantError
from tierkv.manager.host.chunk import Chunk
from tierkv.manager.host.chunk_state import ChunkEvent, ChunkState
from tierkv.manager.host.dropping import SLOTS_PER_KEY
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.host.slot_table import GENERATIONS, OLD_KEYS
from tierkv.manager.step_budget import StepBudget
from tierkv.policies.lru import LruPolicy
from tierkv.structures.key_table import SHARD_BYTE, shards_len
from tierkv.types.cache_events import HOST
from tierkv.types.keys import Key, make_key
from tierkv.types.transfers import SlotRef

SLOTS = 5
EVENT = {ChunkState.STORING: ChunkEvent.STORED, ChunkState.PROMOTING: ChunkEvent.ARRIVED}


def named(name: str) -> Key:
    """Key of a chunk with a readable name."""
    return make_key(name.encode(), 0)


keys = st.sampled_from([named(letter) for letter in "abcdefgh"])
batches = st.lists(keys, min_size=1, max_size=3, unique=True)
picks = st.integers(0, 50)


class HostMachine(RuleBasedStateMachine):
    """Every history of admissions, I/O, holds, drops and resets, in batches.

    The model: which lease each visible key has, in the order in which chunks may be evicted; leases that I/O fills;
    and lists of holds, of writes and of other uses. A slot is free only when no list has its lease. A write does not
    change the eviction order: a chunk that was passed over because of it is the next victim when it has ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host = HostTier(SLOTS, LruPolicy(SLOTS))
        self.visible: dict[Key, SlotRef] = {}
        self.order: list[SlotRef] = []
        self.filling: dict[SlotRef, ChunkState] = {}
        self.holds: list[SlotRef] = []
        self.writes: list[SlotRef] = []
        self.passed_over: set[SlotRef] = set()
        self.given: set[SlotRef] = set()

    def evictable(self) -> list[SlotRef]:
        return [ref for ref in self.order if ref not in self.holds and ref not in self.writes]

    @rule(batch=batches, promoting=st.booleans())
    def admit(self, batch: list[Key], promoting: bool) -> None:
        batch = self.host.slots.missing(batch)
        room, free = self.host.room, self.host.free
        evicted = self.host.evict_for(len(batch))
        if evicted is None:
            assert len(batch) > room, "there was room"
            assert self.host.free == free, "refused is refused: nothing has left (S18)"
            return
        victims = self.evictable()[: max(0, len(batch) - free)]
        names = {ref: key for key, ref in self.visible.items()}
        assert evicted.keys == [names[ref] for ref in victims if ref in names]
        for ref in victims:
            self.passed_over.update(self.order[: self.order.index(ref)])
            self.order.remove(ref)
            self.visible.pop(names.get(ref, named("nobody")), None)
        state = ChunkState.PROMOTING if promoting else ChunkState.STORING
        refs = self.host.slots.refs(self.host.admit(batch, state, "disk" if promoting else "host"))
        assert not self.given.intersection(refs), "a lease is given out twice"
        self.given.update(refs)
        self.visible.update(zip(batch, refs, strict=True))
        self.filling.update(dict.fromkeys(refs, state))

    @precondition(lambda self: self.filling)
    @rule(number=picks, count=st.integers(1, 3), well=st.booleans())
    def fill(self, number: int, count: int, well: bool) -> None:
        state = list(self.filling.values())[number % len(self.filling)]
        refs = [ref for ref, other in self.filling.items() if other is state][:count]
        named_now = set(self.visible.values())
        slots = [ref.slot for ref in refs]
        if well:
            done = self.host.filled(slots, EVENT[state])
            good = [ref for ref in refs if ref in named_now]
            assert done.slots == [ref.slot for ref in good]
            assert [self.visible[key] for key in done.keys] == good
            self.order += good
        else:
            self.host.failed(slots)
            self.visible = {key: ref for key, ref in self.visible.items() if ref not in refs}
        for ref in refs:
            del self.filling[ref]

    @rule(batch=batches)
    def hold(self, batch: list[Key]) -> None:
        refs = [self.visible[key] for key in batch if key in self.visible]
        self.host.pin([ref.slot for ref in refs])
        self.holds += refs

    @precondition(lambda self: self.holds)
    @rule(number=picks, count=st.integers(1, 4))
    def release(self, number: int, count: int) -> None:
        first = number % len(self.holds)
        refs = self.holds[first : first + count]
        del self.holds[first : first + count]
        self.host.unpin([ref.slot for ref in refs])
        for ref in dict.fromkeys(reversed(refs)):  # its last place in the batch counts
            if ref in self.order and ref not in self.holds:
                self.order.remove(ref)
        named_now = set(self.visible.values())
        last = [ref for i, ref in enumerate(refs) if ref not in refs[i + 1 :] and ref not in self.holds]
        self.order += [ref for ref in last if ref in named_now and ref not in self.filling]
        self.passed_over.difference_update(last)

    @rule(batch=batches)
    def begin_writes(self, batch: list[Key]) -> None:
        refs = [self.visible[key] for key in batch if key in self.visible and self.visible[key] not in self.filling]
        self.host.pin_to_write([ref.slot for ref in refs])
        self.writes += refs

    @precondition(lambda self: self.writes)
    @rule(number=picks, count=st.integers(1, 4))
    def end_writes(self, number: int, count: int) -> None:
        first = number % len(self.writes)
        refs = self.writes[first : first + count]
        del self.writes[first : first + count]
        self.host.unpin_written([ref.slot for ref in refs])
        last = [ref for i, ref in enumerate(refs) if ref not in refs[i + 1 :] and ref in self.evictable()]
        back = [ref for ref in last if ref in self.passed_over]
        self.order = back + [ref for ref in self.order if ref not in back]
        self.passed_over.difference_update(back)

    @rule(batch=batches)
    def drop(self, batch: list[Key]) -> None:
        refs = [self.visible.pop(key) for key in batch if key in self.visible]
        self.host.drop([ref.slot for ref in refs])
        self.order = [ref for ref in self.order if ref not in refs]

    @rule(touched=st.lists(keys, unique=True))
    def touch(self, touched: list[Key]) -> None:
        self.host.touch(touched)
        for key in touched:
            ref = self.visible.get(key)
            if ref in self.order:
                self.order.remove(ref)
                self.order.append(ref)
                self.passed_over.discard(ref)

    @rule()
    def reset(self) -> None:
        self.host.reset()
        self.visible.clear()
        # Stale chunks without holds stay in the order for a while; they are evicted first, and not reported.
        self.order = self.evictable()

    @rule(chunks=st.integers(1, 3))
    def sweep(self, chunks: int) -> None:
        self.host.dropping.sweep(chunks)
        self.order = [ref for ref in self.order if self.host.slots.leased((ref,))]

    @invariant()
    def it_is_as_the_model_says(self) -> None:
        self.host.validate()
        busy = {*self.filling, *self.holds, *self.writes}
        assert {chunk.key: chunk.ref for chunk in self.host.slots.visible()} == self.visible
        for ref in self.given:
            chunk = self.host.slots.owner(ref)
            if ref in busy:
                assert chunk is not None, "its slot was given away under running I/O"
                assert chunk.pins == (self.holds + self.writes).count(ref) + (ref in self.filling)
            if chunk is not None and self.visible.get(chunk.key) != ref:
                assert chunk.state is ChunkState.DOOMED
            if chunk is not None and ref not in busy:
                assert ref in self.order
        owned = sum(bool(self.host.slots.leased((ref,))) for ref in self.given)
        assert self.host.room == SLOTS - owned + len(self.evictable())

    def teardown(self) -> None:
        """After the end of all I/O and all holds, every slot is available."""
        while self.filling:
            self.fill(0, 3, well=False)
        while self.writes:
            self.end_writes(0, 4)
        while self.holds:
            self.release(0, 4)
        assert self.host.room == SLOTS
        self.host.dropping.sweep(SLOTS)
        self.host.validate()


TestHostIndex = HostMachine.TestCase


def chunk_of(host: HostTier, name: str = "k") -> Chunk:
    """A readable chunk without holds."""
    host.evict_for(1)
    host.filled(host.admit([named(name)], ChunkState.STORING), ChunkEvent.STORED)
    chunk = host.slots.get(named(name))
    assert chunk is not None
    return chunk


def test_released_more_often_than_held() -> None:
    """One release too many would free a slot in use; the error shows the chunk's transitions."""
    host = HostTier(2, LruPolicy())
    chunk = chunk_of(host)
    with pytest.raises(InvariantError, match="created -> storing; stored -> ready"):
        host.unpin([chunk.slot])


def test_admitted_without_room() -> None:
    """The caller must make room first; otherwise it gets an error, and not a slot in use."""
    host = HostTier(1, LruPolicy())
    chunk_of(host)
    with pytest.raises(InvariantError, match="without room"):
        host.admit([named("other")], ChunkState.STORING)


def test_i_o_that_does_not_fit_the_state() -> None:
    """An arrival in a slot that a store fills is a bug: it raises with the chunk's transitions."""
    host = HostTier(1, LruPolicy())
    slots = host.admit([named("k")], ChunkState.STORING)
    with pytest.raises(InvariantError, match=r"is storing: event 'arrived'.*created -> storing"):
        host.filled(slots, ChunkEvent.ARRIVED)


def _free_twice(host: HostTier, _: Chunk) -> None:
    host._free.give_back([3])
    host._free.give_back([3])
    host._free.fresh = 4


def _lost_slot(host: HostTier, _: Chunk) -> None:
    host._free.take(1)


def _nobody_holds(host: HostTier, chunk: Chunk) -> None:
    (slot,) = host.admit([named("new")], ChunkState.STORING)
    host.slots.pins[slot] = 0
    assert chunk.pins == 0


def _policy_forgot(host: HostTier, chunk: Chunk) -> None:
    host.policy.remove([chunk.slot])


def _invisible(host: HostTier, chunk: Chunk) -> None:
    for shard in host.slots.shards:
        shard.pop(chunk.key, None)


def _not_readable(host: HostTier, chunk: Chunk) -> None:
    host.slots.fills.begin([chunk.slot], HOST)


def _doomed_and_visible(host: HostTier, chunk: Chunk) -> None:
    host.pin([chunk.slot])
    host.drop([chunk.slot])
    host.slots.shards[chunk.key[SHARD_BYTE]][chunk.key] = chunk.slot


def _name_without_a_slot(host: HostTier, _: Chunk) -> None:
    for number in range(3):
        host.slots.shards[number][named("nobody")] = number


def _stale_behind_the_sweep(host: HostTier, _: Chunk) -> None:
    chunk_of(host, "other")
    host.reset()
    host.slots.unswept = 1


def _miscounted(host: HostTier, _: Chunk) -> None:
    host.listed.evictable += 1


BREAKAGES = [
    _free_twice,
    _lost_slot,
    _nobody_holds,
    _policy_forgot,
    _invisible,
    _not_readable,
    _doomed_and_visible,
    _name_without_a_slot,
    _stale_behind_the_sweep,
    _miscounted,
]


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_validate_sees_what_is_broken(breakage: Callable[[HostTier, Chunk], None]) -> None:
    """Each invariant is broken once on purpose: a validate() that sees nothing proves nothing."""
    host = HostTier(4, LruPolicy())
    chunk = chunk_of(host)
    host.validate()
    breakage(host, chunk)
    with pytest.raises(InvariantError):
        host.validate()


def test_the_transition_log_is_bounded() -> None:
    """The log for error messages must not grow with the uptime."""
    host = HostTier(1, LruPolicy())
    for i in range(5000):
        chunk_of(host, str(i))
    assert len(host.slots.log) == 4096
    assert host.slots.transitions_of(named("0")) == "none kept"
    assert host.slots.transitions_of(named("4999")) == "created -> storing; stored -> ready"


def test_a_long_batch_in_the_transition_log_is_kept_whole() -> None:
    """A batch longer than the bound is kept whole, and discarded as one."""
    host = HostTier(5000, LruPolicy(5000))
    batch = [named(str(i)) for i in range(5000)]
    slots = host.admit(batch, ChunkState.STORING)
    assert host.slots.transitions_of(batch[0]) == "created -> storing"
    host.filled(slots, ChunkEvent.STORED)
    assert host.slots.transitions_of(batch[0]) == "stored -> ready"


def test_a_batch_of_several_states_is_logged_once_each() -> None:
    """One drop of a readable chunk and of one that is being stored: each has its own transitions in the log."""
    host = HostTier(2, LruPolicy(2))
    ready = host.admit([named("ready")], ChunkState.STORING)
    host.filled(ready, ChunkEvent.STORED)
    storing = host.admit([named("storing")], ChunkState.STORING)
    host.drop([*ready, *storing])
    log = host.slots.transitions_of
    assert log(named("ready")) == "created -> storing; stored -> ready; dropped -> doomed; released -> gone"
    assert log(named("storing")) == "created -> storing; dropped -> doomed"


def test_a_reset_is_paid_in_steps() -> None:
    """After a reset nothing stale is readable. A bounded number of slots is freed per step, and more when a store needs
    them. Their eviction is not reported: the tier was reported as cleared."""
    host = HostTier(8, LruPolicy(8))
    for i in range(8):
        chunk_of(host, str(i))
    host.reset()
    assert not host.slots.visible()
    assert (host.free, host.room) == (0, 8)
    host.dropping.sweep(3)
    assert (host.free, host.room) == (3, 8)
    assert host.evict_for(5).keys == []
    assert host.free == 5
    chunk_of(host, "0")
    host.dropping.sweep(100)
    assert (host.free, host.room) == (7, 8)
    assert [chunk.key for chunk in host.slots.visible()] == [named("0")]
    host.validate()


def test_a_reset_touches_no_chunk() -> None:
    """Promise 5: the reset of a large tier takes no longer than that of a small one; later steps drop the chunks."""
    host = HostTier(8, LruPolicy(8))
    for i in range(8):
        chunk_of(host, str(i))
    columns = bytes(host.slots.states), host.slots.generations.tolist(), host.slots.pins.tolist(), len(host.policy)
    host.reset()
    assert columns == (
        bytes(host.slots.states), host.slots.generations.tolist(), host.slots.pins.tolist(), len(host.policy)
    )  # fmt: skip
    assert all(host.slots.state(slot) is ChunkState.DOOMED for slot in range(8))


@pytest.mark.parametrize("generation", [0, 5, GENERATIONS - 4, GENERATIONS - 2])
def test_generations_begin_again(generation: int) -> None:
    """After four thousand million batches the numbers begin again at 0: a chunk is stale by its age, not its number."""
    host = HostTier(8, LruPolicy(8))
    host.slots.newest_generation = generation
    for i in range(3):
        chunk_of(host, f"old {i}")
    host.reset()
    for i in range(3):
        chunk_of(host, f"new {i}")
    assert [host.slots.is_stale(slot) for slot in range(6)] == [True] * 3 + [False] * 3
    host.dropping.sweep(8)
    assert host.free == 5
    host.validate()


def test_stale_chunks_are_dropped_within_the_budget() -> None:
    """Promise 5: a reset leaves as many chunks as there are slots. No step drops more than its budget allows."""
    host, budget = HostTier(1000, LruPolicy(1000)), StepBudget(16)
    share = budget.share()
    for i in range(1000):
        chunk_of(host, str(i))
    host.reset()
    for step in range(1, 5):
        budget.begin_step()
        host.dropping.drop_some(share)
        assert host.free == SLOTS_PER_KEY * 16 * step
        host.validate()


def test_the_keys_of_before_a_reset_are_freed_in_slices() -> None:
    """Promise 5: a million keys cost milliseconds to free, so every step frees the same number of them."""
    keys = OLD_KEYS * 256
    host, share = HostTier(3 * keys, LruPolicy(3 * keys)), StepBudget(16).share()
    slots = host.admit([make_key(number.to_bytes(32), 0) for number in range(3 * keys)], ChunkState.STORING)
    host.filled(slots, ChunkEvent.STORED)
    host.reset()
    left = [sum(map(shards_len, host.slots._old_tables))]
    while left[-1]:
        host.dropping.drop_some(share)
        left.append(sum(map(shards_len, host.slots._old_tables)))
    assert left == [3 * keys, 2 * keys, keys, 0]


def test_two_holds_on_a_chunk_of_before_a_reset_end_in_one_batch() -> None:
    """It is dropped once. A random history dropped it twice, and the policy counted one chunk too few."""
    host = HostTier(2, LruPolicy())
    slot = chunk_of(host).slot
    host.pin([slot])
    host.pin([slot])
    host.reset()
    host.unpin([slot, slot])
    host.validate()
    assert (host.free, len(host.policy)) == (2, 0)


def test_a_remembered_prefix_is_forgotten_when_a_chunk_leaves() -> None:
    """The answer to a question is kept for the one that follows. A chunk that was evicted, dropped or reset in between
    must not be held by its old slot, where another chunk's bytes are."""
    for leave in ("evicted", "dropped", "reset"):
        host = HostTier(2, LruPolicy())
        prefix = (named("a"), named("b"))
        slots = [chunk_of(host, "a").slot, chunk_of(host, "b").slot]
        assert host.slots.ready_prefix(prefix) == slots == host.slots.ready_prefix(prefix)
        if leave == "evicted":
            host.evict_for(1)
        elif leave == "dropped":
            host.drop(slots[:1])
        else:
            host.reset()
        assert host.slots.ready_prefix(prefix) == []


def test_what_is_being_filled_ends_a_readable_prefix() -> None:
    """A chunk that has its slot and not yet its bytes is not readable, however the prefix around it is."""
    host = HostTier(3, LruPolicy())
    first = chunk_of(host, "a")
    slots = host.admit([named("b")], ChunkState.STORING)
    last = chunk_of(host, "c")
    prefix = (named("a"), named("b"), named("c"))
    assert host.slots.ready_prefix(prefix) == [first.slot]
    host.filled(slots, ChunkEvent.STORED)
    assert host.slots.ready_prefix(prefix) == [first.slot, *slots, last.slot]
