"""Passages: the order in which requests get slots when they are short (decision 4)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from calls import calls_of
from core_parts import DISK, Core, disk, make_core

from tierkv.errors import InvariantError
from tierkv.manager.contract import RequestContext
from tierkv.manager.host.dropping import SLOTS_PER_KEY
from tierkv.manager.passages.passage import Passage
from tierkv.types.keys import Key, make_key
from tierkv.types.tier_ops import OutcomeKind


def run(first: int, count: int) -> tuple[Key, ...]:
    """Keys of a prefix."""
    return tuple(make_key(b"chunk %d" % i, 0) for i in range(first, first + count))


def reserve(core: Core, owner: str, keys: tuple[Key, ...]) -> Passage:
    """Reserve as a waiting request does once per step."""
    return core.manager.passages.reserve(owner, keys)


def release(core: Core, owner: str) -> None:
    """Release as a request does that loads or ends."""
    core.manager.passages.release(owner)


def with_chunks_below(*runs: tuple[Key, ...], slots: int, reserved: int | None = None) -> Core:
    """A host tier over a tier that has all of ``runs``."""
    core = make_core(slots=slots, reserved=reserved, tiers=[disk(write="read_only")])
    for keys in runs:
        core.keep_below(keys)
    return core


def test_slots_are_granted_in_order_of_arrival() -> None:
    """Two want four slots each and there are six: the older has all of its own, the younger the rest; it gets what is
    missing when the older lets go, also if a third, still younger one asks first."""
    a, b, c = run(0, 4), run(10, 4), run(20, 4)
    core = with_chunks_below(a, b, c, slots=6)
    older, younger = reserve(core, "a", a), reserve(core, "b", b)
    assert (older.complete, younger.num_granted) == (True, 2)
    third = reserve(core, "c", c)
    core.finish_all()
    assert older.ready
    release(core, "a")
    assert not reserve(core, "c", c).num_granted
    assert reserve(core, "b", b).complete
    core.finish_all()
    assert younger.ready
    release(core, "b")
    assert reserve(core, "c", c).complete
    assert third.complete


def test_who_needs_no_slot_does_not_wait() -> None:
    """A younger request whose chunks are all readable takes nothing from the older one, and is served at once."""
    a, b = run(0, 6), run(10, 2)
    core = with_chunks_below(a, slots=6, reserved=8)
    core.put(b)
    busy = core.manager.prepare_load(b, RequestContext("x"))
    assert not reserve(core, "a", a).complete
    assert reserve(core, "b", b).ready
    core.manager.complete_load(busy.slots)


def test_what_was_granted_is_never_taken_away() -> None:
    """Stores press, younger requests press: a reserved chunk stays until its owner releases it."""
    a = run(0, 4)
    core = with_chunks_below(a, run(10, 8), slots=8, reserved=6)
    reservation = reserve(core, "a", a)
    core.finish_all()
    for i in range(100, 120):
        core.put([make_key(b"other %d" % i, 0)])
        reserve(core, "b", run(10, 8))
        core.finish_all()
    assert reservation.ready
    assert set(a) <= core.ready()


def test_the_cap_leaves_room_for_stores() -> None:
    """Reserved chunks together stay under the cap, whether they are fetched or were there, and stores go on."""
    a, b = run(0, 3), run(10, 3)
    core = with_chunks_below(a, slots=6, reserved=4)
    core.put(b)
    assert reserve(core, "a", a).complete
    assert reserve(core, "b", b).num_granted == 1
    core.manager.validate()
    core.put(run(50, 1))


def test_own_chunks_are_held_before_slots_are_taken() -> None:
    """G3: the head is below, the tail is here and would be the next victim."""
    keys = run(0, 4)
    core = with_chunks_below(keys[:2], slots=4)
    core.put(keys[2:])
    core.put(run(90, 2))
    reservation = reserve(core, "a", keys)
    assert reservation.complete
    assert {key for op in core.finish_all() for key in op.keys} == set(keys[:2])
    assert reservation.sources() == ["disk", "disk", "host", "host"]


def test_a_chunk_that_another_is_fetching_is_shared() -> None:
    """Two requests want the same chunks: one read, both are notified, and both name the source tier."""
    keys = run(0, 3)
    core = with_chunks_below(keys, slots=8)
    first, second = reserve(core, "a", keys), reserve(core, "b", keys)
    (read,) = core.manager.take_ops()
    assert second.complete
    core.finish(read)
    assert first.ready
    assert second.ready
    assert set(second.sources()) == {"disk"}


def test_one_lost_chunk_fails_the_reservation_only() -> None:
    """A chunk that does not arrive fails every reservation that waits for it; the other chunks stay held."""
    keys = run(0, 3)
    core = with_chunks_below(keys, slots=8)
    reservation = reserve(core, "a", keys)
    (read,) = core.manager.take_ops()
    core.finish(read, [OutcomeKind.OK, OutcomeKind.ABSENT, OutcomeKind.OK])
    assert reservation.failed
    assert not reservation.ready
    shorter = reserve(core, "a", keys[:1])
    assert shorter.ready
    assert core.host.room == core.host.num_slots - 1


def test_a_failed_reservation_does_not_block_the_others() -> None:
    """Its owner may never come back to ask again."""
    a, b = run(0, 2), run(10, 2)
    core = with_chunks_below(b, slots=4)
    assert reserve(core, "a", a).failed
    assert reserve(core, "b", b).complete


@pytest.mark.parametrize("start", [1, 3])
def test_other_wishes_keep_what_is_still_wanted(start: int) -> None:
    """The engine's own prefix grew, so the front is not wanted any more: the rest is neither fetched nor queued for
    again, although it has not arrived yet and an older request waits for slots."""
    a, b = run(0, 6), run(10, 4)
    core = with_chunks_below(a, b, slots=6)
    reserve(core, "a", a[:2])
    reserve(core, "b", b)
    core.manager.passages.promise("b")
    reads = core.manager.take_ops()
    assert not reserve(core, "a", a).complete
    reservation = reserve(core, "b", b[start:])
    assert reservation.complete
    assert not core.manager.take_ops()
    for read in reads:
        core.finish(read)
    assert reservation.ready
    core.manager.validate()


def test_released_chunks_are_evicted_tail_first() -> None:
    """S54: chunks that a request reserved and released are evicted from the tail on."""
    keys = run(0, 3)
    core = with_chunks_below(keys, slots=3)
    reserve(core, "a", keys)
    core.finish_all()
    release(core, "a")
    core.put(run(50, 1))
    assert core.ready() == {*keys[:2], *run(50, 1)}


def _miscounted(core: Core) -> None:
    core.manager.passages.account.held += 1


def _over_the_cap(core: Core) -> None:
    core.manager.passages.account.chunks_max = 1


def _unwanted(core: Core) -> None:
    core.manager.passages._by_owner["a"].keys = run(0, 1)


def _not_held(core: Core) -> None:
    slot = core.host.slots.find(run(1, 1)[0])
    assert slot is not None
    core.host.unpin([slot])


def _waits_for_nothing(core: Core) -> None:
    core.manager.passages._by_owner["a"].outstanding += 1


@pytest.mark.parametrize("breakage", [_miscounted, _over_the_cap, _unwanted, _not_held, _waits_for_nothing])
def test_validate_sees_what_is_broken(breakage: Callable[[Core], None]) -> None:
    """Each invariant is broken once on purpose."""
    core = make_core()
    core.put(run(0, 2))
    reserve(core, "a", run(0, 2))
    core.manager.validate()
    breakage(core)
    with pytest.raises(InvariantError):
        core.manager.validate()


def test_many_passages_end_in_steps() -> None:
    """A reset ends every passage, and they can fill the host tier. A bounded number of chunks is released at once, the
    rest in later steps; until then their slots stay held, and count on the account."""
    core = make_core(slots=400)
    passages = core.manager.passages
    core.put(run(0, 400))
    core.begin()
    assert passages.reserve("a", run(0, 250)).ready
    assert passages.reserve("b", run(250, 150)).ready
    core.manager.budget.keys_max = 16
    core.manager.reset_cache()
    rooms = [core.host.room]
    while passages.account.total:
        passages.validate()
        core.begin()
        rooms.append(core.host.room)
    freed_max = max(later - room for room, later in itertools.pairwise(rooms))
    assert freed_max <= 2 * SLOTS_PER_KEY * 16, "released, and swept"
    assert core.host.room == 400
    core.host.validate()


def calls_of_release_all(passages: int) -> int:
    """Number of calls of Python functions in the end of all passages, each of one chunk."""
    core = make_core(slots=passages)
    core.put(run(0, passages))
    for number in range(passages):
        core.begin()
        assert core.manager.passages.reserve(f"r{number}", run(number, 1)).ready
    calls = calls_of(core.manager.passages.release_all)
    core.manager.passages.validate()
    assert not core.manager.passages.owners
    return calls


def test_a_reset_ends_many_passages_as_fast_as_few() -> None:
    """Promise 5: the call that resets the cache looks at no passage. Later steps release their slots."""
    assert calls_of_release_all(200) == calls_of_release_all(2)


def test_chunks_on_their_way_at_a_reset_are_awaited_by_nobody() -> None:
    """A passage that a reset ended is released later. Its reads may end before that or after it."""
    core = make_core(slots=8, tiers=[disk()])
    core.keep_below(run(0, 4))
    core.begin()
    passage = core.manager.passages.reserve("a", run(0, 4))
    reads = core.manager.take_ops()
    assert passage.outstanding == 4
    core.manager.reset_cache()
    core.manager.validate()
    core.begin()
    assert passage.outstanding == 0
    assert not core.host.waiters.by_slot
    for read in reads:
        core.finish(read)
    core.begin()
    core.manager.validate()
    assert (core.host.room, core.manager.passages.account.total) == (8, 0)


def test_pins_count_under_the_cap_and_are_let_go_with_the_owner() -> None:
    """Pins keep the same bound as reservations, and stay while stores need slots. The chunks are evictable again when
    their owner unpins some of them, or all."""
    keys = run(0, 5)
    core = make_core(slots=8, reserved=4)
    core.put(keys)
    who = RequestContext("a")
    assert [core.manager.passages.pins.add(who.request_id, key) for key in keys] == [True] * 4 + [False]
    assert core.manager.passages.pins.add(who.request_id, keys[0]), "held already"
    assert not core.manager.passages.pins.add(who.request_id, run(90, 1)[0]), "not there"
    core.manager.validate()
    for i in range(100, 120):
        core.put([make_key(b"other %d" % i, 0)])
    assert set(keys[:4]) <= core.ready()
    core.manager.passages.pins.remove(who.request_id, keys[:1])
    assert core.host.room == core.host.num_slots - 1
    release(core, "a")
    assert core.host.room == core.host.num_slots
    core.manager.validate()


def test_pins_and_a_reservation_are_handed_over_together() -> None:
    """A request holds two chunks one by one, and two others by a reservation: its load gets all four, and nothing is
    counted as reserved any more."""
    keys = run(0, 4)
    core = with_chunks_below(keys[2:], slots=6)
    core.put(keys[:2])
    who = RequestContext("a")
    assert all(core.manager.passages.pins.add(who.request_id, key) for key in keys[:2])
    assert reserve(core, "a", keys[2:]).complete
    core.finish_all()
    grant = core.manager.prepare_load(keys, who)
    assert grant.sources == ("host", "host", "disk", "disk")
    core.manager.validate()
    core.manager.complete_load(grant.slots)
    assert core.host.room == core.host.num_slots


def test_a_load_in_another_order_than_the_lookup() -> None:
    """With several groups a load goes group by group, a lookup by the ends of chunks: the holds are handed over as
    they are, each with its source."""
    keys = run(0, 4)
    core = with_chunks_below(keys[:2], slots=8)
    core.put(keys[2:])
    passage = reserve(core, "a", keys)
    core.finish_all()
    slots = dict(zip(keys, passage.slots, strict=True))
    order = (keys[3], keys[0], keys[2], keys[1])
    grant = core.manager.prepare_load(order, RequestContext("a"))
    assert [slot for slot, _ in grant.slots] == [slots[key] for key in order]
    assert grant.sources == ("host", "disk", "host", "disk")
    assert all(core.host.slots.pins[slot] == 1 for slot in slots.values()), "no chunk is held twice"
    core.manager.validate()
    core.manager.complete_load(grant.slots)
    assert core.host.room == 8


def test_missing_chunks_are_looked_up_together() -> None:
    """A prompt that a tier has costs the engine's thread few calls for each chunk, asked for and when it arrives."""

    def calls(chunks: int) -> int:
        core = make_core(slots=chunks, tiers=[replace(disk(), capabilities=replace(DISK, preferred_batch=64))])
        core.keep_below(run(0, chunks))
        core.begin()
        asked = calls_of(core.manager.passages.reserve, "a", run(0, chunks))
        reads = core.manager.take_ops()
        arrived = sum(calls_of(core.finish, read) for read in reads)
        passage = core.manager.passages.get("a")
        assert passage is not None
        assert passage.ready
        core.manager.validate()
        return asked + arrived

    assert calls(48) - calls(16) < 12 * 32


def test_a_chunk_that_is_wanted_twice_is_read_once() -> None:
    """A prompt that repeats a hash waits once more for the slot of the first."""
    core = make_core(slots=8, tiers=[disk()])
    keys = run(0, 3)
    core.keep_below(keys)
    core.begin()
    passage = core.manager.passages.reserve("a", (*keys, keys[1]))
    (read,) = core.manager.take_ops()
    assert read.keys == keys
    core.begin()
    assert passage.outstanding == 4, "the next step finds it on its way"
    core.finish(read)
    assert passage.ready
    assert passage.slots[1] == passage.slots[3]
    core.manager.validate()
