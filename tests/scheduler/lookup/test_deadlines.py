"""Every deferral ends at its deadline, with the readable chunks, however rarely the engine asks (promise 4)."""

from __future__ import annotations

import pytest
from calls import calls_of
from core_blocks import blocks
from core_parts import Core, TierSpec, disk, make_core, objects
from core_truth import BedRequest
from group_parts import full, window

from tierkv.config.schema import LookupConfig
from tierkv.manager.contract import RequestContext
from tierkv.scheduler.limits import SchedulerLimits
from tierkv.scheduler.lookup.first_segment import EARLY_S
from tierkv.types.engine import StepOutput
from tierkv.types.tier_ops import Completion, Outcome, OutcomeKind, TierHealth
from tierkv.types.transfers import TransferJob

DEADLINE_S = SchedulerLimits().lookup_deadline_s


def take(core: Core, request: BedRequest, tokens: int) -> TransferJob:
    """Allocate for an offer and start its load."""
    core.scheduler.update_state_after_alloc(request, [blocks(range(1, 1 + tokens // 4))], tokens)
    return core.scheduler.build_connector_meta(StepOutput()).loads[0]


def test_s47_an_answer_at_the_deadline_stays() -> None:
    """S47: after its deadline a request is not deferred again in the next step.

    An engine without free blocks in this step has some in the next one, and must not be deferred for another deadline.
    """
    core = make_core(tiers=[objects()])
    request = core.arrive(16)
    assert core.ask(request) is None
    core.begin(DEADLINE_S)
    assert core.ask(request) == 0
    core.begin(DEADLINE_S + 0.1)
    assert core.ask(request) == 0


@pytest.mark.parametrize("tier", [disk(), objects()])
def test_no_tier_is_late_while_its_answers_wait_to_be_taken_in(tier: TierSpec) -> None:
    """After a silence more operations have ended than one step takes in. Hits were given up that had been read."""
    core = make_core(tiers=[tier])
    request = core.arrive(16)
    if tier.capabilities.authoritative_index:
        core.keep_below(core.truth.keys(request))
    assert core.ask(request) is None
    core.begin(DEADLINE_S)
    core.manager.step.is_behind = True  # as a stack does when a drain has left some
    assert core.ask(request) is None
    core.manager.step.is_behind = False
    assert core.ask(request) == 0


def test_a_new_question_after_an_answer_has_a_deadline_of_its_own() -> None:
    """An offer that waited long for blocks and then changed, because the GPU has more tokens, is gathered anew."""
    core = make_core(tiers=[disk()])
    request = core.arrive(16)
    keys = core.truth.keys(request)
    core.put(keys[:2])
    assert core.ask(request) == 8
    for i in range(1, 9):
        core.begin(i)
        assert core.ask(request) == 8
    core.keep_below(keys[2:])
    assert core.ask(request, computed=4) is None, "12 tokens are there, 8 of them below"
    core.finish_all()
    assert core.ask(request, computed=4) == 12


def test_s49_the_wait_for_a_load_ends_with_the_deadline() -> None:
    """S49, promise 4: a hung load delays other requests no longer than the deadline: then they load themselves."""
    core = make_core()
    first, second = core.arrive(16, "f"), core.arrive(20, "s")
    core.put(core.truth.keys(first))
    core.ask(first)
    take(core, first, 16)
    assert core.ask(second) is None
    core.begin(10 * DEADLINE_S)
    assert core.ask(second) is None, "only the engine reports the load, and it was silent"
    for _ in range(3):
        core.begin(core.now + DEADLINE_S / 4)
        assert core.ask(second) is None
    core.begin(core.now + DEADLINE_S / 4)
    assert core.ask(second) == 16


def test_a_long_hit_is_not_given_up_for_the_load_of_another() -> None:
    """S49: the load that was waited for is late, and no tier is: the request streams the whole hit itself."""
    core = make_core(tiers=[disk()], slots=16, reserved=8)
    first, second = core.arrive(16, "f"), core.arrive(80, "s")
    core.keep_below(core.truth.keys(second))
    assert core.ask(first) is None
    core.finish_all()
    assert core.ask(first) == 16
    take(core, first, 16)
    assert core.ask(second) is None
    core.finish_all()
    for _ in range(5):
        core.begin(core.now + DEADLINE_S / 4)
        answer = core.ask(second)
    assert answer == 80
    assert core.counters.deadlines_expired == 1


def test_a_late_answer_makes_no_call_per_chunk() -> None:
    """All but the last chunks of a prompt are held at the deadline: the answer costs as much for many as for few.

    The tier is too slow for an early offer.
    """
    calls = []
    for chunks in (64, 512):
        core = make_core(tiers=[disk()], slots=1024, reserved=1000)
        request = core.arrive(4 * chunks)
        core.keep_below(core.truth.keys(request))
        assert core.ask(request) is None
        slow_s = 2 * EARLY_S
        core.begin(slow_s)
        left = chunks
        while left > 8:
            for op in core.manager.take_ops():
                if left > 8:
                    core.finish(op)
                left -= len(op.keys)
            core.begin()
            core.ask(request)
        core.begin(slow_s + DEADLINE_S)
        calls.append(calls_of(core.ask, request))
        assert core.ask(request) in range(2 * chunks, 4 * chunks)
    assert calls[1] < calls[0] + 64


def test_the_deadline_answers_with_what_is_ready() -> None:
    """Two of four chunks arrived, the tier hangs: after the deadline the two are offered, the rest is released."""
    core = make_core(tiers=[disk()])
    request = core.arrive(32)
    core.keep_below(core.truth.keys(request))
    assert core.ask(request) is None
    first, hanging = core.manager.take_ops()
    core.finish(first)
    core.begin(DEADLINE_S - 0.1)
    assert core.ask(request) is None
    core.begin(DEADLINE_S)
    assert core.ask(request) == 16
    assert core.counters.deadlines_expired == 1
    assert take(core, request, 16).keys == first.keys
    core.manager.on_completion(Completion(hanging.op_id, (Outcome(OutcomeKind.TIMED_OUT),) * 4))
    core.scheduler.validate()


def test_a_request_that_waits_for_a_broken_tier_is_answered_at_once() -> None:
    """The tier is out of service, and its reads are given up: the request computes in the same step. Its slots stay in
    use until the calls have ended."""
    core = make_core(tiers=[disk()], slots=8)
    request = core.arrive(32)
    core.keep_below(core.truth.keys(request))
    assert core.ask(request) is None
    reads = core.manager.take_ops()
    core.begin(0.1)
    assert core.ask(request) is None
    core.manager.on_completion(TierHealth(0, usable=False))
    outcomes = {op: (Outcome(OutcomeKind.TIMED_OUT),) * len(op.keys) for op in reads}
    for op in reads:
        core.manager.on_completion(Completion(op.op_id, outcomes[op], ended=False))
    assert core.ask(request) == 0
    assert core.host.room == 0, "a thread may still fill the slots"
    for op in reads:
        core.manager.on_completion(Completion(op.op_id, outcomes[op]))
    assert core.host.room == 8
    core.scheduler.validate()


def test_the_deadline_starts_no_new_reads() -> None:
    """After the deadline nothing is read: a hung tier would collect more reads with every request."""
    core = make_core(tiers=[disk()], slots=8)
    first, second = core.arrive(32, "f"), core.arrive(range(100, 132), "s")
    for request in (first, second):
        core.keep_below(core.truth.keys(request))
        assert core.ask(request) is None
    assert {op.keys[0] for op in core.manager.take_ops()} <= set(core.truth.keys(first)), "the slots are all taken"
    core.scheduler.request_finished(first, [])
    core.begin(DEADLINE_S)
    assert core.ask(second) == 0
    assert not core.manager.take_ops()


def test_a_younger_request_gets_its_ready_part_too() -> None:
    """While an older request waits for slots, a younger one may take none.

    At its deadline it is still answered with the part of its prefix in the host tier.
    """
    core = make_core(tiers=[disk()], slots=8, reserved=8)
    older, younger = core.arrive(28, "o"), core.arrive(range(100, 132), "y")
    core.put(core.truth.keys(younger)[:2])
    core.keep_below([*core.truth.keys(older), *core.truth.keys(younger)[2:]])
    keeper = core.arrive(range(100, 108), "k")
    assert core.ask(keeper) == 8, "its offer keeps these two chunks from being evicted for the older request"
    busy = core.truth.keys(core.request(range(500, 516)))
    assert core.manager.prepare_store([(key, 0) for key in busy], RequestContext("unknown")) is not None
    assert core.ask(older) is None
    assert core.ask(younger) is None
    core.begin(DEADLINE_S)
    assert core.ask(younger) == 8


def test_a_request_that_is_rarely_asked_about_is_answered() -> None:
    """Promise 4: an engine with a long queue asks about each request less often than the deadline lasts.

    Held chunks are released in between, but the second question is past the deadline and gets an answer.
    """
    core = make_core(tiers=[objects()])
    request = core.arrive(16)
    assert core.ask(request) is None
    core.begin(2 * DEADLINE_S)
    assert core.ask(request) == 0
    assert core.host.room == core.host.num_slots


def test_what_arrived_in_the_meantime_is_answered() -> None:
    """Chunks that arrived after the release are offered from the host tier."""
    core = make_core(tiers=[disk()])
    request = core.arrive(16)
    core.keep_below(core.truth.keys(request))
    assert core.ask(request) is None
    (read,) = core.manager.take_ops()
    core.begin(2 * DEADLINE_S)
    core.finish(read)
    assert core.ask(request) == 16


def test_an_offer_that_is_not_taken_gives_way() -> None:
    """An engine that stops asking (it forgot the request, or runs others first) must not pin the host tier forever.

    The offer is kept until the engine has asked about another request for the deadline, and that one finds no slots.
    The next question gets no worse answer for it.
    """
    core = make_core(slots=4, tiers=[disk(write="read_only")])
    request, other = core.arrive(16), core.arrive(range(100, 116), "other")
    keys = core.truth.keys(request)
    core.keep_below([*keys, *core.truth.keys(other)])
    core.put(keys[:3])
    assert core.ask(request) is None
    core.finish_all()
    assert core.ask(request) == 16
    core.begin(100.0)
    assert core.host.room == 0, "no other request wants the slots: silence costs nothing"
    assert core.ask(other) is None
    core.begin(100.0 + DEADLINE_S - 0.1)
    assert core.ask(request) == 16, "the engine asks about both"
    core.begin(200.0)
    assert core.ask(other) is None
    core.begin(200.0 + DEADLINE_S)
    assert core.ask(other) is None
    core.finish_all()
    core.begin()
    assert core.ask(other) == 16
    assert core.ask(request) is None, "it was answered once: this is a new question with its own time"
    assert core.counters.deadlines_expired == 0


def test_a_hit_that_cannot_be_partial_in_chunks_of_two_sizes() -> None:
    """Chunks of 2 and 3 tokens: the part readable at the deadline needs a chunk that ends behind it.

    That chunk stays held with the others.
    """
    core = make_core(block_tokens=(2, 3), hash_block_tokens=1, tiers=[disk()])
    request = core.arrive(12)
    fine, coarse = core.truth.keys(request, 0), core.truth.keys(request, 1)
    core.put([*fine[:2], *coarse])
    core.keep_below(fine[2:])
    assert core.ask(request) is None
    core.begin(DEADLINE_S)
    assert core.ask(request) == 4
    core.scheduler.update_state_after_alloc(request, [blocks([1, 2]), blocks([3, 4])], 4)
    (load,) = core.scheduler.build_connector_meta(StepOutput()).loads
    assert load.keys == (*fine[:2], *coarse[:2])


def test_a_window_is_not_cut_at_the_deadline() -> None:
    """The tier hangs with the last chunk of the window: a shorter hit with an earlier window is the answer.

    It is held and loadable; a prefix without its window would give wrong bytes.
    """
    core = make_core(groups=[full(), window(8)], tiers=[disk()])
    request = core.arrive(41)
    prefix, recent = core.truth.keys(request, 0), core.truth.keys(request, 1)
    core.put([*prefix, *recent[3:5], recent[8]])
    core.keep_below([recent[9]])
    assert core.ask(request) is None
    core.begin(DEADLINE_S)
    assert core.ask(request) == 20
    tables = [blocks(range(1, 7)), blocks([0, 0, 0, 14, 15, 16])]
    core.scheduler.update_state_after_alloc(request, tables, 20)
    (load,) = core.scheduler.build_connector_meta(StepOutput()).loads
    assert load.keys == (*prefix[:5], *recent[3:5])


def test_a_window_of_which_not_all_may_be_held_at_the_deadline() -> None:
    """All chunks are readable, but another request holds chunks, so that this one may hold only three of four.

    It waits for the other one, which waits for the engine: that is no delay of a tier.
    """
    core = make_core(groups=[full(), window(8)], reserved=8)
    keeper, request = core.arrive(range(100, 113), "k"), core.arrive(13)
    core.put([key for one in (keeper, request) for group in (0, 1) for key in core.truth.keys(one, group)])
    assert core.ask(keeper) == 12
    assert core.ask(request, computed=4) is None
    core.begin(DEADLINE_S * 2)
    assert core.ask(keeper) == 12, "it is still interested"
    assert core.ask(request, computed=4) is None
    core.scheduler.request_finished(keeper, [])
    assert core.ask(request, computed=4) == 8
    assert core.counters.deadlines_expired == 0


@pytest.mark.parametrize("deadline_s", [None, 0.5, 60.0])
def test_the_bound_on_deferral_is_configurable_and_has_a_default(deadline_s: float | None) -> None:
    """Promise 4: there is a bound by default. When it expires, the readable prefix is the answer, and that is counted.

    In the account of the request the wait is as long as the bound.
    """
    assert LookupConfig().deadline_s == SchedulerLimits().lookup_deadline_s == DEADLINE_S
    limits = SchedulerLimits() if deadline_s is None else SchedulerLimits(lookup_deadline_s=deadline_s)
    core = make_core(tiers=[disk()], limits=limits)
    request = core.arrive(16)
    keys = core.truth.keys(request)
    core.put(keys[:1])
    core.keep_below(keys[1:])
    bound_s = limits.lookup_deadline_s
    assert core.ask(request) is None
    core.begin(bound_s * 0.99)
    assert core.ask(request) is None
    assert core.counters.deadlines_expired == 0
    core.begin(bound_s)
    assert core.ask(request) == 4
    assert core.counters.deadlines_expired == 1
    account = core.scheduler.request_account("a")
    assert account is not None
    assert account.deferred_s == bound_s


def test_a_look_for_lookups_that_lapse_takes_no_budget() -> None:
    """While slots are short, each step looks for a lookup that lapses: a small share stays whole for the questions."""
    core = make_core(tiers=[disk()])
    request = core.arrive(16)
    core.keep_below(core.truth.keys(request))
    assert core.ask(request) is None
    core.manager.passages.note_shortage()
    core.begin(1.0)
    assert core.manager.passages.is_short
    assert core.scheduler._lookups.share.own_left == core.manager.budget.share_keys


def test_the_time_of_a_turn_begins_with_it() -> None:
    """A request that waited behind another one for longer than the deadline is not late when its turn begins."""
    core = make_core(tiers=[disk()], slots=8, reserved=8)
    older, younger = core.arrive(32, "o"), core.arrive(range(100, 132), "y")
    busy = core.truth.keys(core.request(range(500, 532)))
    for part in (busy[:2], busy[2:4], busy[4:6], busy[6:]):
        core.manager.prepare_store([(key, 0) for key in part], RequestContext("unknown"))
    core.keep_below([*core.truth.keys(older), *core.truth.keys(younger)])
    assert core.ask(older) is None
    assert core.ask(younger) is None
    core.scheduler.request_finished(older, [])
    core.begin(2 * DEADLINE_S)
    assert core.ask(younger) is None, "its turn has just begun"
    core.begin(3 * DEADLINE_S)
    assert core.ask(younger) == 0, "stores use all slots, and nothing has moved since"


def test_a_tier_that_goes_on_makes_no_request_late() -> None:
    """Stores use all slots, and a tier writes them: the deadline counts from its latest sign of life."""
    core = make_core(tiers=[disk()], slots=8, reserved=8)
    request = core.arrive(range(100, 132))
    busy = core.truth.keys(core.request(range(500, 532)))
    core.manager.prepare_store([(key, 0) for key in busy], RequestContext("unknown"))
    core.keep_below(core.truth.keys(request))
    assert core.ask(request) is None
    core.begin(DEADLINE_S - 1)
    core.manager.on_completion(TierHealth(0, usable=True))
    core.begin(2 * DEADLINE_S - 1.5)
    assert core.ask(request) is None
    core.begin(2 * DEADLINE_S - 1)
    assert core.ask(request) == 0


def test_a_paused_search_after_a_loss_goes_on() -> None:
    """A step loses a chunk, and the search that follows stops at the budget: the next step continues it."""
    core = make_core(tiers=[disk()])
    request = core.arrive(128)
    core.keep_below(core.truth.keys(request))
    assert core.ask(request) is None
    passage = core.manager.passages.get(request.request_id)
    assert passage is not None
    passage.failed = True
    found = []
    for now in (0.1, 0.2):
        core.begin(now)
        core.manager.budget.common = 0
        share = core.scheduler._lookups.share
        share.take(share.left)
        assert core.ask(request) is None
        assert core.record(request).lookup.paused
        found.append(core.record(request).lookup.reached)
    assert found[0] is found[1], "what was found is kept"


def test_a_tier_that_has_answered_is_not_late_however_long_the_engine_is_silent() -> None:
    """A shared tier answers at once, and the engine asks again when the answer has expired: all is there."""
    core = make_core(tiers=[objects(write="read_only")])
    request = core.arrive(16)
    assert core.ask(request) is None
    (probe,) = core.manager.take_ops()
    core.begin(0.1)
    core.finish(probe)
    core.begin(10 * DEADLINE_S)
    assert core.ask(request) is None
    core.finish_all()
    assert core.ask(request) == 16
    assert core.counters.deadlines_expired == 0


def late_with_windows(chunks: int, readable: int) -> tuple[int | None, list[int]]:
    """Answer to a prompt whose tier hangs with all chunks behind the ``readable`` ones, and calls of the late asks."""
    core = make_core(
        groups=[full(), window(400)], tiers=[disk()], slots=4 * chunks, reserved=4 * chunks, step_keys=32,
        limits=SchedulerLimits(load_tokens_min=0),
    )  # fmt: skip
    request = core.arrive(4 * chunks + 1)
    for group in (0, 1):
        keys = core.truth.keys(request, group)
        core.put(keys[: readable if group else chunks // 2])
        core.keep_below(keys[readable if group else chunks // 2 :])
    now, answer, calls = 0.0, None, list[int]()
    while now < DEADLINE_S:
        core.begin(now)
        assert core.ask(request) is None
        now += 0.01
    while answer is None and len(calls) < chunks:
        now += 0.01
        core.begin(now)
        before = core.counters.deferrals
        calls.append(calls_of(core.ask, request))
        answer = core.ask(request) if core.counters.deferrals == before else None
        core.manager.validate()
    assert core.counters.deadlines_expired == 1
    return answer, calls


def test_a_late_answer_with_windows_is_searched_and_held_over_steps() -> None:
    """Promise 2: a late search looks at each chunk of a window from the end of the prompt on, in parts."""
    calls = [max(late_with_windows(chunks, readable=8)[1]) for chunks in (256, 1024)]
    assert calls[1] < 1.5 * calls[0]


@pytest.mark.parametrize("readable", [200, 512])
def test_a_late_answer_has_all_that_is_readable_however_many_steps_it_takes(readable: int) -> None:
    """Promise 4: the shorter hit has other window chunks than the longer one that is late. To hold all of it takes some
    steps, and no chunk of a lower tier, so none of it is given up.
    """
    answer, calls = late_with_windows(1024, readable)
    assert answer == 4 * readable
    assert len(calls) > 1


def test_prompts_that_are_here_do_not_wait_for_those_of_a_slow_tier() -> None:
    """Promise 4: requests behind one that a hung tier reads for are asked about in every step. To ask again costs them
    nothing, so the others are searched for, held and answered meanwhile.
    """
    core = make_core(tiers=[disk()], slots=4096, reserved=4096, step_keys=64)
    slow = [core.arrive(range(1000 * number, 1000 * number + 256), f"slow {number}") for number in range(24)]
    here = core.arrive(range(100_000, 100_256), "here")
    for request in slow:
        core.keep_below(core.truth.keys(request))
    core.put(core.truth.keys(here))
    steps = 0
    while core.ask(here) is None:
        steps += 1
        assert steps < 4 * len(slow)
        core.begin(steps / 1000)
        for request in slow:
            assert core.ask(request) is None
    assert core.ask(here) == 256
    core.manager.validate()
