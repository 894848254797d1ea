"""The contract between scheduler and manager (spec, section 4)."""

from __future__ import annotations

import pytest
from core_parts import Core, disk, make_core

from tierkv.errors import EngineProtocolError, IllegalTransitionError
from tierkv.manager.contract import RequestContext, StoreGrant
from tierkv.manager.host.chunk_state import CHUNK_STATES, TRANSITIONS, ChunkEvent, ChunkState
from tierkv.manager.host.dropping import SLOTS_PER_KEY
from tierkv.types.cache_events import CacheEventKind
from tierkv.types.keys import Key, make_key
from tierkv.types.lookup import LookupResult

WHO = RequestContext("a")


def key(number: int, group: int = 0) -> Key:
    """Key of a chunk with a number."""
    return make_key(b"chunk %d" % number, group)


def offer(core: Core, *numbers: int) -> StoreGrant | None:
    """Offer chunks for storing."""
    return core.manager.prepare_store([(key(number), 0) for number in numbers], WHO)


def room_for(core: Core, *numbers: int) -> StoreGrant:
    """Offer chunks for storing, with room for all."""
    grant = offer(core, *numbers)
    assert grant is not None
    return grant


def put(core: Core, *numbers: int) -> None:
    """Make chunks readable."""
    core.put([key(number) for number in numbers])


def kinds(core: Core) -> list[tuple[CacheEventKind, tuple[Key, ...]]]:
    """Events so far, without their tier."""
    return [(event.kind, event.keys) for event in core.manager.take_events()]


def test_s16_loading_what_is_absent() -> None:
    """S16: an absent chunk cannot be loaded; the error names it, and nothing was pinned on the way to it."""
    core = make_core()
    put(core, 1)
    with pytest.raises(EngineProtocolError, match=r"chunk 6368756e6b203200000000: it is absent"):
        core.manager.prepare_load([key(1), key(2)], WHO)
    assert core.host.room == core.host.num_slots


def test_s16_loading_what_is_not_ready() -> None:
    """S16: a chunk whose slot is still being filled cannot be loaded."""
    core = make_core()
    room_for(core, 1)
    with pytest.raises(EngineProtocolError, match="it is storing"):
        core.manager.prepare_load([key(1)], WHO)


def test_s17_pins_hold_under_pressure() -> None:
    """S17: while two loads read a chunk, no amount of stores takes its slot; it needs two completions to be free."""
    core = make_core(slots=2)
    put(core, 1)
    first, second = core.manager.prepare_load([key(1)], WHO), core.manager.prepare_load([key(1)], WHO)
    assert first.slots == second.slots
    for i in range(10, 20):
        put(core, i)
        assert key(1) in core.ready()
    core.manager.complete_load(first.slots)
    assert offer(core, 30, 31) is None
    core.manager.complete_load(second.slots)
    assert room_for(core, 30, 31).evicted == (key(19), key(1)), "the load was its last use"


def test_s18_no_room_changes_nothing() -> None:
    """S18: three chunks into two evictable slots: refused whole; nothing is evicted, started or announced."""
    core = make_core(slots=3)
    put(core, 1, 2, 3)
    core.manager.take_events()
    load = core.manager.prepare_load([key(1)], WHO)
    assert offer(core, 4, 5, 6) is None
    assert core.ready() == {key(1), key(2), key(3)}
    assert not kinds(core)
    assert core.counters.stores_refused == 1
    core.manager.complete_load(load.slots)
    core.manager.validate()


def test_s19_all_present() -> None:
    """S19: nothing to store and nothing to evict for it."""
    core = make_core(slots=2)
    put(core, 1, 2)
    assert room_for(core, 1, 2) == StoreGrant((), (), ())
    assert core.ready() == {key(1), key(2)}


def test_s19_the_present_ones_are_not_evicted_for_their_neighbours() -> None:
    """S19: chunk 1 is the next victim, and part of this very offer."""
    core = make_core(slots=2)
    put(core, 1)
    put(core, 2)
    grant = room_for(core, 1, 3)
    assert (grant.keys, grant.evicted) == ((key(3),), (key(2),))
    assert key(1) in core.ready()


def test_s20_stored_but_not_complete() -> None:
    """S20: PENDING, never HIT; and it is not handed out a second time."""
    core = make_core()
    room_for(core, 1)
    assert core.manager.lookup(key(1), WHO) is LookupResult.PENDING
    assert room_for(core, 1).keys == ()
    assert core.manager.resident_prefix([key(1)], 0, 1) == 0


def test_s21_completed_twice_or_never_begun() -> None:
    """S21: a completion names slot and generation, so a second one, or one of an older life of the slot, is void."""
    core = make_core(slots=1)
    grant = room_for(core, 1)
    core.manager.complete_store(grant.slots)
    core.manager.complete_store(grant.slots)
    newer = room_for(core, 2)
    core.manager.complete_store(grant.slots)
    core.manager.complete_load(grant.slots)
    assert core.manager.lookup(key(2), WHO) is LookupResult.PENDING
    core.manager.complete_store(newer.slots)
    assert core.ready() == {key(2)}
    core.manager.validate()


def test_a_repeated_key_is_stored_once() -> None:
    """A key repeated in one offer gets one slot, which needs one completion: a second slot would have no owner."""
    core = make_core(slots=4)
    grant = room_for(core, 1, 2, 1, 1)
    assert grant.keys == (key(1), key(2))
    core.manager.validate()
    core.manager.complete_store(grant.slots)
    assert core.host.room == core.host.num_slots
    assert core.ready() == {key(1), key(2)}


def test_a_repeated_key_needs_no_second_slot() -> None:
    """Two keys, one of them repeated, fit into two slots: a refusal would be repeated in every step."""
    core = make_core(slots=2)
    assert room_for(core, 1, 2, 1).evicted == ()
    core.manager.validate()


def test_a_repeated_key_that_is_present() -> None:
    """A chunk that is present and repeated is held once while others of its store make room, and not evicted."""
    core = make_core(slots=2)
    put(core, 1, 2)
    grant = room_for(core, 1, 1, 3)
    assert (grant.keys, grant.evicted) == ((key(3),), (key(2),))
    core.manager.validate()
    core.manager.complete_store(grant.slots)
    assert core.host.room == core.host.num_slots


def test_equal_hashes_of_two_groups_are_two_chunks() -> None:
    """The group is part of a key, so chunks of two groups that end at one token have a slot each."""
    core = make_core(slots=4, block_tokens=(4, 4))
    grant = core.manager.prepare_store([(key(1, 0), 0), (key(1, 1), 1)], WHO)
    assert grant is not None
    assert grant.keys == (key(1, 0), key(1, 1))
    assert len({ref.slot for ref in grant.slots}) == 2
    core.manager.validate()


def test_s22_a_failed_store_leaves_nothing() -> None:
    """S22: no key, no slot taken, and no public notice: it was never announced."""
    core = make_core(slots=1)
    grant = room_for(core, 1)
    core.manager.complete_store(grant.slots, frozenset({key(1)}))
    assert core.manager.lookup(key(1), WHO) is LookupResult.MISS
    assert not kinds(core)
    assert core.counters.stores_failed == 1
    core.manager.complete_store(room_for(core, 1).slots)
    assert core.ready() == {key(1)}


def test_events_of_a_life() -> None:
    """Stored when readable, removed when evicted for another: in the order in which it happened."""
    core = make_core(slots=1)
    put(core, 1)
    put(core, 2)
    assert kinds(core) == [
        (CacheEventKind.STORED, (key(1),)),
        (CacheEventKind.REMOVED, (key(1),)),
        (CacheEventKind.STORED, (key(2),)),
    ]
    core.manager.reset_cache()
    assert kinds(core) == [(CacheEventKind.CLEARED, ())]


def test_s54_victims_come_tail_first() -> None:
    """S54: after touch(a, b, c) the victims come c, b, a: what is left of a prefix is still a prefix."""
    core = make_core(slots=3)
    put(core, 2)
    put(core, 3)
    put(core, 1)
    core.manager.touch([key(1), key(2), key(3)])
    assert [room_for(core, n).evicted for n in (11, 12, 13)] == [(key(3),), (key(2),), (key(1),)]


def test_s54_stores_and_loads_leave_the_same_order() -> None:
    """S54: a prefix that was stored, or loaded, at once also loses its tail first."""
    core = make_core(slots=3)
    put(core, 1, 2, 3)
    assert room_for(core, 11).evicted == (key(3),)
    load = core.manager.prepare_load([key(1), key(2)], WHO)
    core.manager.complete_load(load.slots)
    assert room_for(core, 12).evicted == (key(2),)


def test_s55_touching_the_unknown_and_the_busy() -> None:
    """S55: a touch names whatever a request used; what is absent or in flight is passed over, here and below."""
    core = make_core(slots=2, tiers=[disk()])
    grant = room_for(core, 1)
    core.manager.touch([key(1), key(2), key(3)])
    core.manager.complete_store(grant.slots)
    core.manager.validate()
    assert core.ready() == {key(1)}


def test_a_failed_load_drops_the_chunk() -> None:
    """Bytes that failed their check on the way to the GPU are never offered again; others who hold the slot keep it
    until they let go."""
    core = make_core(slots=1)
    put(core, 1)
    first, second = core.manager.prepare_load([key(1)], WHO), core.manager.prepare_load([key(1)], WHO)
    core.manager.complete_load(first.slots, first.slots)
    assert core.manager.lookup(key(1), WHO) is LookupResult.MISS
    assert offer(core, 2) is None, "the second load still reads the slot"
    core.manager.complete_load(second.slots, second.slots)
    assert core.counters.chunks_corrupt == {"host": 1}
    assert core.counters.chunks_loaded == 0
    assert room_for(core, 2).keys == (key(2),)


def test_reset_leaves_busy_slots_alone() -> None:
    """S90 at this level: all keys are gone at once; a slot that a copy still touches comes back when the copy ends."""
    core = make_core(slots=4)
    put(core, 1, 2)
    storing, loading = room_for(core, 3), core.manager.prepare_load([key(1)], WHO)
    core.manager.reset_cache()
    assert core.host.room == 2
    assert [core.manager.lookup(key(n), WHO) for n in (1, 2, 3)] == [LookupResult.MISS] * 3
    again = room_for(core, 1, 3)
    assert set(again.slots).isdisjoint((*storing.slots, *loading.slots))
    core.manager.complete_store(storing.slots)
    core.manager.complete_load(loading.slots)
    core.manager.validate()
    assert core.host.room == 2
    assert not core.ready()


def test_a_step_sweeps_within_its_own_budget() -> None:
    """Promise 5: what a step sweeps and what it does for requests share one budget, or a step takes twice as long."""
    core = make_core(slots=20_000)
    for first in range(0, 20_000, 5_000):
        put(core, *range(first, first + 5_000))
    core.begin()
    budget, full = core.manager.budget, core.manager.budget.common
    core.manager.reset_cache()
    core.begin()
    taken = full - budget.common
    assert taken > 0
    assert core.host.free <= SLOTS_PER_KEY * (taken + budget.share_keys)


@pytest.mark.parametrize("state", ChunkState)
@pytest.mark.parametrize("event", ChunkEvent)
def test_only_the_table_moves_a_chunk(state: ChunkState, event: ChunkEvent) -> None:
    """An event that the table does not list raises with the chunk's log."""
    if (state, event) in TRANSITIONS:
        assert CHUNK_STATES.next(state, event, b"", str) is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransitionError, match=f"chunk ab is {state.value}: event '{event.value}'.*the log$"):
            CHUNK_STATES.next(state, event, b"\xab", lambda: "the log")


def test_gone_is_the_end() -> None:
    """Nothing leads out of GONE, and every state leads to it: no slot can be lost for ever."""
    assert not [after for (state, _), after in TRANSITIONS.items() if state is ChunkState.GONE]
    reached = {ChunkState.GONE}
    for _ in ChunkState:
        reached |= {state for (state, _), after in TRANSITIONS.items() if after in reached}
    assert reached == set(ChunkState)
