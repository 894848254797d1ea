"""Reads that were asked for and are not wanted any more: dispatch does not perform them when their turn comes."""

from __future__ import annotations

import pytest
from core_parts import Core, disk, make_core

from tierkv.manager.contract import RequestContext, StoreGrant
from tierkv.manager.lower.read_speed import READINGS_MIN
from tierkv.types.hints import NO_HINTS
from tierkv.types.keys import Key, make_keys
from tierkv.types.tier_ops import OutcomeKind, TierOp

KEYS = tuple(make_keys([bytes([number]) * 8 for number in range(4)], 0))


def reading(core: Core, owner: str = "a") -> TierOp:
    """Reserve chunks that are below, and take the read."""
    core.keep_below(KEYS)
    core.manager.passages.reserve(owner, KEYS)
    (read,) = core.manager.take_ops()
    return read


def test_a_read_is_wanted_while_a_request_holds_its_chunks() -> None:
    """Of several requests the last one decides. One that asks again in time wants the same read."""
    core = make_core(slots=16, tiers=[disk(write="read_only")])
    read, passages = reading(core), core.manager.passages
    assert read.is_wanted()
    passages.reserve("b", KEYS[:2])
    passages.release("a")
    assert read.is_wanted()
    passages.release("b")
    assert not read.is_wanted()
    passages.reserve("c", KEYS[3:])
    assert read.is_wanted()
    assert not core.manager.take_ops(), "it is not read twice"


def test_a_chunk_that_was_not_read_may_be_read_later() -> None:
    """Nothing is known against it, and its slot is free. It was counted as absent for a while, as after a failure."""
    core = make_core(slots=16, tiers=[disk(write="read_only")])
    read, passages = reading(core), core.manager.passages
    passages.release("a")
    core.finish(read, OutcomeKind.UNWANTED)
    assert core.manager.host_is_idle
    assert core.counters.reads_failed["disk"] == 0
    passage = passages.reserve("b", KEYS)
    (again,) = core.manager.take_ops()
    assert again.keys == KEYS
    core.finish(again)
    assert passage.ready
    core.manager.validate()


def test_a_request_that_asks_too_late_reads_anew() -> None:
    """Dispatch has given the read up, and the request did not know it yet."""
    core = make_core(slots=16, tiers=[disk(write="read_only")])
    read, passages = reading(core), core.manager.passages
    passages.release("a")
    passage = passages.reserve("b", KEYS)
    core.finish(read, OutcomeKind.UNWANTED)
    assert passage.failed
    core.begin()
    passages.reserve("b", KEYS)
    (again,) = core.manager.take_ops()
    assert again.keys == KEYS
    core.finish(again)
    assert passage.ready


def test_what_is_read_ahead_stays_wanted() -> None:
    """No request holds it yet."""
    core = make_core(slots=16, tiers=[disk(write="read_only")])
    core.keep_below(KEYS)
    assert len(core.manager._tier_io.read_ahead(KEYS, 4, NO_HINTS, 0.0)) == 4
    (ahead,) = core.manager.take_ops()
    assert ahead.is_wanted()
    core.manager.passages.reserve("a", KEYS)
    core.manager.passages.release("a")
    assert ahead.is_wanted()


def test_it_says_nothing_about_the_speed_of_the_tier() -> None:
    """Its bytes counted as delivered, so the tier seemed fast to the reads behind them."""
    core = make_core(slots=16, tiers=[disk(write="read_only")])
    others = tuple(make_keys([bytes([99, number]) * 4 for number in range(4)], 0))
    core.keep_below([*KEYS, *others])
    passages, speed = core.manager.passages, core.manager._tier_io.reads[0].speed
    for _ in range(READINGS_MIN):
        speed.measured(8192, 0.001)
    passages.reserve("a", KEYS)
    passages.reserve("b", others)
    first, second = core.manager.take_ops()
    passages.release("a")
    before = speed.ended_bytes, speed.as_dict()
    core.finish(first, OutcomeKind.UNWANTED, elapsed_s=9.0)
    assert (speed.ended_bytes, speed.as_dict()) == before
    core.finish(second, elapsed_s=0.001)
    assert speed.promised_bytes == 0


def store(core: Core, *keys: Key) -> StoreGrant:
    """Offer chunks that a request has computed."""
    grant = core.manager.prepare_store([(key, 0) for key in keys], RequestContext("a"))
    assert grant is not None
    return grant


@pytest.mark.parametrize("outcome", [OutcomeKind.OK, OutcomeKind.CORRUPT, OutcomeKind.UNWANTED])
def test_what_is_computed_during_an_unwanted_read_is_stored(outcome: OutcomeKind) -> None:
    """The engine offers it once, and the read may fail or never begin: then the next request would compute it again.

    The read ends in its own slot, which is free afterwards.
    """
    core = make_core(slots=16, tiers=[disk(write="read_only")])
    core.put(KEYS[1:2])
    read, passages = reading(core), core.manager.passages
    passages.release("a")
    grant = store(core, *KEYS)
    assert grant.keys == (KEYS[0], *KEYS[2:])
    assert not grant.reading
    core.manager.validate()
    core.finish(read, outcome)
    assert core.ready() == {KEYS[1]}, "what was read is of no use"
    core.manager.complete_store(grant.slots)
    assert core.ready() == set(KEYS)
    assert core.manager.host_is_idle
    core.manager.validate()


def test_a_read_that_is_waited_for_is_not_given_up() -> None:
    """Its request has GPU blocks for it, perhaps. The store learns which chunks may be lost."""
    core = make_core(slots=16, tiers=[disk(write="read_only")])
    read = reading(core)
    grant = store(core, *KEYS)
    assert (grant.keys, grant.reading) == ((), frozenset(KEYS))
    core.finish(read)
    assert core.ready() == set(KEYS)


def test_no_room_for_a_store_leaves_the_reads_alone() -> None:
    """A store without room changes nothing: it is offered again, and the read may be asked for until then."""
    core = make_core(slots=4, tiers=[disk(write="read_only")])
    read = reading(core)
    core.manager.passages.release("a")
    assert core.manager.prepare_store([(key, 0) for key in KEYS], RequestContext("a")) is None
    core.finish(read)
    assert core.ready() == set(KEYS)


@pytest.mark.parametrize("read_first", [True, False])
@pytest.mark.parametrize("lost", [OutcomeKind.CORRUPT, OutcomeKind.ABSENT])
def test_a_tier_gets_back_what_its_read_has_lost(lost: OutcomeKind, read_first: bool) -> None:
    """It counted as having the chunks when they were stored, so it was not given them."""
    core = make_core(slots=16, tiers=[disk()])
    read = reading(core)
    core.manager.passages.release("a")
    grant = store(core, *KEYS)
    if read_first:
        core.finish(read, lost)
    core.manager.complete_store(grant.slots)
    if not read_first:
        core.finish(read, lost)
    core.finish_all()
    assert None not in core.lower[0].residency.rows.at_rest(KEYS)
    core.manager.validate()
