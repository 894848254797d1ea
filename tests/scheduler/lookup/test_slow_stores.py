"""Stores that the engine copies for long are no delay of a tier, and hide none (promise 4)."""

from __future__ import annotations

from core_parts import Core, disk, make_core

from tierkv.manager.contract import RequestContext
from tierkv.scheduler.limits import SchedulerLimits
from tierkv.types.tier_ops import Verb
from tierkv.types.transfers import SlotRef

DEADLINE_S = SchedulerLimits().lookup_deadline_s


def begin_stores(core: Core, tokens: range) -> tuple[SlotRef, ...]:
    """Let the engine begin to store the chunks of these tokens. Returns their slots."""
    keys = core.truth.keys(core.request(tokens))
    granted = core.manager.prepare_store([(key, 0) for key in keys], RequestContext("unknown"))
    assert granted is not None
    return granted.slots


def test_a_slow_copy_from_the_engine_makes_no_tier_late() -> None:
    """A request wants a chunk that is being stored for another one: a copy is slow, and no tier has anything to do."""
    core = make_core(tiers=[disk()])
    first = core.arrive(17, "first")
    assert core.ask(first) == 0
    (store,) = core.schedule(first, computed=0, scheduled=17, ids=[list(range(1, 6))]).stores
    second = core.arrive(17, "second")
    for step in range(4):
        core.begin(step * DEADLINE_S)
        assert core.ask(second) is None
    core.report(store.job_id)
    assert core.ask(second) == 16
    assert core.counters.deadlines_expired == 0


def test_stores_that_go_on_make_no_request_late() -> None:
    """Stores use all slots for longer than the deadline, and go on: nothing is late until none has moved for as long.

    Simulated seed 400,039 of overload.
    """
    core = make_core(tiers=[disk()], slots=8, reserved=8)
    request = core.arrive(range(100, 132))
    core.keep_below(core.truth.keys(request))
    stored = begin_stores(core, range(500, 532))
    assert core.ask(request) is None
    for number in range(4):
        core.begin(core.now + DEADLINE_S - 1)
        core.manager.complete_store(stored[number : number + 1])
        begin_stores(core, range(600 + 4 * number, 604 + 4 * number))
        assert core.ask(request) is None
    core.begin(core.now + DEADLINE_S - 0.5)
    assert core.ask(request) is None
    core.begin(core.now + 0.5)
    assert core.ask(request) == 0


def test_a_tier_that_hangs_is_late_although_the_engine_stores() -> None:
    """Reads that hang keep some slots, and the engine's stores the others: who waits for slots is answered (G7)."""
    core = make_core(tiers=[disk(), disk(name="other")], slots=8, reserved=8)
    first = core.arrive(17, "first")
    core.keep_below(core.truth.keys(first))
    assert core.ask(first) is None
    assert [op.verb for op in core.manager.take_ops()] == [Verb.READ]
    stored = begin_stores(core, range(500, 516))
    second = core.arrive(range(100, 133), "second")
    core.keep_below(core.truth.keys(second), tier=1)
    assert core.ask(second) is None
    core.begin(DEADLINE_S)
    assert core.ask(first) == 0
    core.manager.complete_store(stored[:1])
    begin_stores(core, range(600, 604))
    assert core.ask(second) == 0
