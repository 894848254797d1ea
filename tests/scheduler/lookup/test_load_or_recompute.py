"""Load or recompute, through the scheduler: tiers and steps are scripted, no time passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from core_parts import Core, TierSpec, disk, make_core, objects
from core_truth import BedRequest
from group_parts import full, window
from hypothesis import given
from hypothesis import strategies as st

from tierkv.manager.contract import RequestContext
from tierkv.manager.lower.read_speed import READINGS_MIN, REMEASURE_S
from tierkv.manager.moves.tier_io import UNMEASURED_CHUNKS_MAX
from tierkv.metrics.watched import WaitingRequests
from tierkv.scheduler.limits import SchedulerLimits
from tierkv.scheduler.lookup import load_or_recompute
from tierkv.scheduler.lookup.load_cost import PendingRead, best_load_tokens
from tierkv.scheduler.lookup.load_or_recompute import PIECES_MAX, LoadOrRecompute
from tierkv.scheduler.lookup.lookups import Lookups
from tierkv.scheduler.lookup.prefill_rate import SAMPLES_MIN
from tierkv.scheduler.lookup.questions import Questions
from tierkv.scheduler.requests.request_state import RequestState
from tierkv.types.engine import GroupSpec
from tierkv.types.keys import Key
from tierkv.types.tier_ops import Completion, Outcome, OutcomeKind, Verb

TOKENS_PER_S = 1000.0
"""Prefill: a chunk of 4 tokens in 4 ms."""
SLOW_S, FAST_S = 2.0, 0.001
"""Seconds per read."""


def core_of(*tiers: TierSpec, auto: bool = True, rate: float | None = TOKENS_PER_S, floor: int = 0) -> Core:
    """Core with a known prefill rate."""
    limits = SchedulerLimits(
        lookup_deadline_s=100.0, weighs_recompute=auto, load_tokens_min=floor, prefill_tokens_per_s=rate
    )
    return make_core(slots=256, tiers=tiers, limits=limits)


def teach(core: Core, elapsed_s: float, tier: int = 0, count: int = READINGS_MIN) -> None:
    """Measure a tier: some reads of one chunk each."""
    for _ in range(count):
        speed = core.manager._tier_io.reads[tier].speed
        speed.measured(16, elapsed_s)


def below(core: Core, tokens: int, request_id: str = "a", tier: int = 0) -> BedRequest:
    """Request whose chunks are all in a lower tier."""
    request = core.arrive(range(1000 * ord(request_id[0]), 1000 * ord(request_id[0]) + tokens), request_id)
    core.keep_below(core.truth.keys(request), tier)
    return request


def test_a_slow_tier_is_not_used_where_recompute_is_faster() -> None:
    """As in sglang #26305: a hit that loads in 2 s, against 64 ms of prefill, is answered as a miss, and counted."""
    core = core_of(disk())
    teach(core, SLOW_S)
    request = below(core, 64)
    assert core.ask(request) == 0
    assert core.ask(request) == 0
    assert (core.counters.hits_shortened, core.counters.tokens_shortened) == (1, 64), "once per question"
    account = core.scheduler.request_account("a")
    assert account is not None
    assert account.shortened_tokens == 64


def test_a_fast_tier_is_used() -> None:
    """1 ms per chunk and queue, against 64 ms of prefill: load."""
    core = core_of(disk())
    teach(core, FAST_S)
    assert core.ask(below(core, 64)) is None
    core.finish_all()
    assert core.ask(core.scheduler._records["a"].request) == 64
    assert not core.counters.hits_shortened


def test_off_loads_everything() -> None:
    """With "off" every hit is loaded, however slow."""
    core = core_of(disk(), auto=False)
    teach(core, SLOW_S)
    assert core.ask(below(core, 64)) is None
    assert not core.counters.hits_shortened


def test_without_a_prefill_rate_everything_is_loaded() -> None:
    """Auto is off until both numbers are known: a guess must not cost hits."""
    core = core_of(disk(), rate=None)
    teach(core, SLOW_S)
    assert core.ask(below(core, 64)) is None


def test_a_tier_that_was_never_measured_is_used() -> None:
    """The first reads measure it."""
    core = core_of(disk())
    assert core.ask(below(core, 64)) is None
    for op in core.manager.take_ops()[:READINGS_MIN]:
        assert core.manager.read_costs.expected()[0] is None
        core.finish(op, elapsed_s=SLOW_S)
    assert core.manager.read_costs.expected()[0] is not None


def test_chunks_on_their_way_from_a_slow_tier_are_not_free() -> None:
    """Another request waits for these reads: this one would wait for them, too, so it computes instead."""
    core = core_of(disk())
    first = below(core, 64)
    assert core.ask(first) is None
    assert core.manager.take_ops()
    teach(core, SLOW_S)
    second = core.arrive(range(97000, 97064), "second")
    assert core.truth.keys(second) == core.truth.keys(first)
    assert core.ask(second) == 0
    assert not core.manager.take_ops(), "what is being read is not read again"


def burst(core: Core, count: int, tokens: int) -> list[BedRequest]:
    """Requests that arrive at once, each with chunks of its own in the lower tier."""
    requests = [core.arrive(range(100_000 * i, 100_000 * i + tokens), f"r{i}") for i in range(1, count + 1)]
    for request in requests:
        core.keep_below(core.truth.keys(request))
    return requests


def test_a_burst_loads_from_a_tier_that_is_faster() -> None:
    """Each chunk is read in an eighth of the time of its prefill. The last request waits for the reads of all others.

    Computing its own prompt alone would be done sooner, but then all of them would compute.
    """
    core = core_of(disk())
    teach(core, 0.001)
    requests = burst(core, 20, 40)
    assert [core.ask(request) for request in requests] == [None] * 20
    assert not core.counters.hits_shortened


def test_a_short_prompt_does_not_wait_for_many_others() -> None:
    """A hit of four chunks behind twenty others of about its length is computed."""
    core = core_of(disk())
    teach(core, 0.004)
    assert [core.ask(request) for request in burst(core, 20, 28)] == [None] * 20
    assert core.ask(below(core, 16, "short")) == 0


def test_a_short_prompt_does_not_count_long_ones() -> None:
    """The reads of longer loads give way to its own, so a hit of one chunk beside 200 chunks of these is loaded. One of
    as many chunks as each of them counts them all."""
    core = core_of(disk())
    teach(core, 0.001)
    for request in burst(core, 20, 40):
        core.ask(request)
    costs = core.manager.read_costs
    waits = [times.queue_s for chunks in (1, 7, 8, 2000) if (times := costs.expected(chunks)[0])]
    assert waits == pytest.approx([0.0, 0.0, 0.1, 0.1], rel=0.1)
    assert core.ask(below(core, 4, "short")) is None


def test_it_waits_while_the_engine_computes_for_others() -> None:
    """The same hit is loaded if the engine has a long prompt to compute first, until that is computed or ended."""
    core = core_of(disk())
    teach(core, 0.004)
    long = core.arrive(range(900_000, 900_400), "long")
    assert core.ask(long) == 0
    for request in burst(core, 20, 28):
        core.ask(request)
    assert core.ask(below(core, 16, "short")) is None
    core.scheduler.request_finished(long, [[]])
    assert core.ask(below(core, 16, "next")) == 0


def test_what_the_engine_has_computed_does_not_wait() -> None:
    """Tokens that wait for the engine are counted down as it computes them, and gone at the end of each request."""
    core = core_of(disk())
    prefill = core.scheduler._prefill
    first, second = core.arrive(40, "first"), core.arrive(range(500, 540), "second")
    assert (core.ask(first), core.ask(second)) == (0, 0)
    assert prefill.expected_for_others(core.record(first)) == 40
    core.schedule(first, computed=0, scheduled=24, ids=[range(1, 7)])
    assert prefill.expected_for_others(core.record(second)) == 16
    core.schedule(first, computed=24, scheduled=16, ids=[range(1, 11)])
    assert prefill.expected_for_others(core.record(second)) == 0
    core.scheduler.request_finished(second, [[]])
    assert prefill.expected_for_others(core.record(first)) == 0


def test_a_burst_does_not_wait_for_a_tier_that_turns_out_to_be_slow() -> None:
    """At a start no speed is known: few chunks are asked of the tier, and who waits behind them computes after all."""
    core = core_of(disk())
    requests = burst(core, 20, 40)
    assert [core.ask(request) for request in requests] == [None] * 20
    ops = core.manager.take_ops()
    assert sum(len(op.keys) for op in ops) == UNMEASURED_CHUNKS_MAX
    assert len(ops) >= READINGS_MIN
    core.begin()  # a step begins with its completions
    for op in ops:
        core.finish(op, elapsed_s=SLOW_S)
    answers = [core.ask(request) for request in requests]
    assert answers[:6] == [40] * 6, "these were read"
    assert answers[6:] == [16] + [0] * 13, "a part of the next one, too"
    assert not core.manager.take_ops(), "the rest of it is computed"


def test_a_burst_does_not_wait_for_a_tier_that_hangs_at_the_start() -> None:
    """Those that are held back behind its first reads are late with them. After a missed deadline none is held back."""
    core = make_core(slots=256, tiers=(disk(),), limits=SchedulerLimits(lookup_deadline_s=5.0))
    requests = burst(core, 20, 40)
    assert [core.ask(request) for request in requests] == [None] * 20
    ops = core.manager.take_ops()
    core.begin(4.0)
    assert [core.ask(request) for request in requests] == [None] * 20
    core.begin(5.0)
    assert [core.ask(request) for request in requests].count(0) == 19, "the turn of the next one has just begun"
    core.begin(10.0)
    assert [core.ask(request) for request in requests] == [0] * 20
    late = tuple(Outcome(OutcomeKind.TIMED_OUT) for _ in ops[0].keys)
    core.manager.on_completion(Completion(ops[0].op_id, late, ended=False, elapsed_s=10.0))
    assert core.ask(below(core, 400, "next")) is None
    assert sum(len(op.keys) for op in core.manager.take_ops()) == 100


def test_those_behind_the_first_reads_of_a_tier_cost_nothing_until_it_answers() -> None:
    """A step does not look for their chunks again."""
    core = make_core(slots=512, tiers=(disk(),))
    requests = burst(core, 4, 400)
    for request in requests:
        core.ask(request)
    ops = core.manager.take_ops()
    granting = core.manager.passages._granting
    for step in range(1, 4):
        core.begin(float(step))
        whole = granting.own_left + core.manager.budget.keys_max // 2
        assert [core.ask(request) for request in requests] == [None] * 4
        assert whole - granting.left < 100, "less than the chunks of one request"
    for op in ops:
        core.finish(op, elapsed_s=FAST_S)
    core.begin()
    for request in requests:
        core.ask(request)
    assert core.manager.take_ops(), "an answer of the tier starts the next reads"


def test_requests_that_wait_to_be_read_are_counted() -> None:
    """Neither a counter nor a read says that they wait: how many, what for, and since when."""
    core = make_core(slots=120, tiers=(disk(),), limits=SchedulerLimits(lookup_deadline_s=100.0))
    requests, waiting = burst(core, 4, 200), core.manager.passages.waiting
    assert waiting() == WaitingRequests()
    for request in requests:
        core.ask(request)
    ops = core.manager.take_ops()
    core.begin(7.0)
    for request in requests:
        core.ask(request)
    assert waiting() == WaitingRequests(first_reads=3, age_s=7.0), "one is read, three are behind it"
    for op in ops:
        core.finish(op, elapsed_s=FAST_S)
    core.begin(8.0)
    assert waiting() == WaitingRequests(slots=2), "for two there is room"
    core.begin(18.0)
    assert waiting() == WaitingRequests(slots=2, age_s=10.0)
    for request in requests:
        core.scheduler.request_finished(request, [[]])
    assert waiting() == WaitingRequests()


def test_a_burst_goes_on_with_a_tier_that_turns_out_to_be_fast() -> None:
    """Once its speed is known, all that fits is asked of the tier."""
    core = core_of(disk())
    requests = burst(core, 20, 40)
    for request in requests:
        core.ask(request)
    for op in core.manager.take_ops():
        core.finish(op, elapsed_s=FAST_S)
    core.begin()
    assert all(core.ask(request) in {None, 40} for request in requests)
    assert sum(len(op.keys) for op in core.manager.take_ops()) == 200 - UNMEASURED_CHUNKS_MAX


def test_a_request_that_waits_for_a_turn_learns_that_its_tier_has_become_slow() -> None:
    """The tier was fast when it was asked. It is slow when slots become free, so the rest is computed."""
    limits = SchedulerLimits(lookup_deadline_s=100.0, prefill_tokens_per_s=TOKENS_PER_S)
    core = make_core(slots=16, tiers=(disk(),), limits=limits)
    teach(core, FAST_S)
    requests = burst(core, 3, 40)
    assert [core.ask(request) for request in requests] == [None] * 3
    for op in core.manager.take_ops():
        core.finish(op, elapsed_s=60.0)
    core.begin()
    assert [core.ask(request) for request in requests] == [40, 24, 0], "the second one has some slots"


def test_a_request_whose_reads_wait_learns_that_its_tier_has_become_slow() -> None:
    """Each request has its slots, and the queue of the tier moves, so no deadline would end the wait."""
    core = core_of(disk(write="read_only"))
    teach(core, FAST_S)
    requests = burst(core, 20, 40)
    assert [core.ask(request) for request in requests] == [None] * 20
    ops = core.manager.take_ops()
    assert sum(len(op.keys) for op in ops) == 200, "all wait in the queue of the tier"
    core.begin(50.0)
    read = {key for op in ops[:6] for key in op.keys}
    for op in ops[:6]:
        core.finish(op, elapsed_s=50.0)
    answers = [core.ask(request) for request in requests]
    assert answers == [4 * len(read & set(core.truth.keys(request))) for request in requests]
    core.manager.validate()


def test_a_slow_tail_is_cut_off() -> None:
    """Chunks in the host tier are nearly free and are answered; the slow rest is computed."""
    core = core_of(disk())
    teach(core, SLOW_S)
    request = below(core, 64)
    core.put(core.truth.keys(request)[:10])
    core.finish_all()
    assert core.ask(request) == 40
    assert core.counters.tokens_shortened == 24


def test_a_slow_middle_cuts_the_rest() -> None:
    """Three slow chunks between those of the host tier: waiting costs more than computing all behind them."""
    core = core_of(disk())
    teach(core, SLOW_S)
    request = below(core, 64)
    keys = core.truth.keys(request)
    core.put([*keys[:5], *keys[8:]])
    core.finish_all()
    assert core.ask(request) == 20


def test_a_slow_middle_is_loaded_when_much_follows_it() -> None:
    """These three chunks make six seconds of prefill unnecessary: 2 s of waiting cost less."""
    core = core_of(disk(), rate=100.0)
    teach(core, SLOW_S)
    request = below(core, 640)
    keys = core.truth.keys(request)
    core.put([*keys[:5], *keys[8:]])
    core.finish_all()
    assert core.ask(request) is None


@pytest.mark.parametrize(("fine_in_host", "answer"), [(1, 0), (2, 4), (3, 6)])
def test_a_cut_is_a_hit_of_the_search(fine_in_host: int, answer: int) -> None:
    """S44: chunks of 2 and 4 tokens; a cut after the first small chunk is shorter than a large one, so it is no hit."""
    limits = SchedulerLimits(lookup_deadline_s=100.0, prefill_tokens_per_s=TOKENS_PER_S)
    core = make_core(block_tokens=(2, 4), slots=256, tiers=[disk(write="read_only")], limits=limits)
    teach(core, SLOW_S)
    request = core.arrive(32)
    fine = core.truth.keys(request, 0)
    core.put([*fine[:fine_in_host], *core.truth.keys(request, 1)])
    core.keep_below(fine[fine_in_host:])
    assert core.ask(request) == answer


@pytest.mark.parametrize(("windows", "answer"), [([16], 0), ([9, 16], 40), ([4, 16], 20)])
def test_a_shorter_hit_of_a_window_is_weighed_again(windows: list[int], answer: int) -> None:
    """The last window is in the host tier, the tail of the prefix is slow: a cut hit needs another window.

    If all other windows are slow, nothing is loaded; if one is in the host tier, the hit ends with it.
    """
    limits = SchedulerLimits(lookup_deadline_s=100.0, prefill_tokens_per_s=TOKENS_PER_S)
    core = make_core(groups=[full(), window(4)], slots=256, tiers=[disk(write="read_only")], limits=limits)
    teach(core, SLOW_S)
    request = core.arrive(69)
    prefix, ends = core.truth.keys(request, 0), core.truth.keys(request, 1)
    core.put([*prefix[:10], *[ends[i] for i in windows]])
    core.keep_below([*prefix[10:], *[key for i, key in enumerate(ends) if i not in windows]])
    assert core.ask(request) == answer


def test_an_unknown_window_is_asked_for_before_the_cut() -> None:
    """S44: a cut hit needs a window whose presence is unknown: tiers are asked.

    The answer is the one that would have been given had it been known at once.
    """
    limits = SchedulerLimits(lookup_deadline_s=100.0, prefill_tokens_per_s=TOKENS_PER_S)
    answers: list[int | None] = []
    for asked_before in (False, True):
        tiers = [disk(write="read_only"), objects(write="read_only")]
        core = make_core(groups=[full(), window(4)], slots=256, tiers=tiers, limits=limits)
        teach(core, SLOW_S, tier=0)
        teach(core, FAST_S, tier=1)
        request = core.arrive(69)
        prefix, ends = core.truth.keys(request, 0), core.truth.keys(request, 1)
        core.put([*prefix[:10], ends[-1]])
        core.keep_below(prefix[10:])
        present = {ends[9]}

        def probe(core: Core = core, present: set[Key] = present) -> None:
            for op in core.manager.take_ops():
                kinds = [OutcomeKind.OK if key in present or op.verb is Verb.READ else OutcomeKind.ABSENT
                         for key in op.keys]  # fmt: skip
                core.finish(op, kinds)

        if asked_before:
            for key in ends:
                core.manager.lookup(key, core.record(request).ctx)
            probe()
        answer = core.ask(request)
        assert asked_before or answer is None
        for _ in range(8):
            if answer is not None:
                break
            probe()
            answer = core.ask(request)
        answers.append(answer)
    assert answers == [40, 40]


@pytest.mark.parametrize("groups", [[window(4)], [full(), window(4)]], ids=["window", "full and window"])
def test_a_long_choice_goes_on_from_step_to_step(groups: list[GroupSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    """The windows of a long prompt are in a slow tier, and a step's budget does not suffice for all of them.

    So the search for a shorter hit without that tier takes several steps. It must end, and each step looks at no chunk
    that an earlier one has excluded.
    """
    looks: list[Key] = []
    look = Questions.presence
    monkeypatch.setattr(Questions, "presence", lambda self, key: (looks.append(key), look(self, key))[1])
    limits = SchedulerLimits(lookup_deadline_s=100.0, prefill_tokens_per_s=TOKENS_PER_S)
    core = make_core(groups=groups, slots=512, tiers=[disk(write="read_only")], limits=limits, step_keys=64)
    teach(core, SLOW_S)
    request = core.arrive(4 * 400 + 1)
    if len(groups) > 1:
        core.put(core.truth.keys(request, 0))
    core.keep_below(core.truth.keys(request, len(groups) - 1))
    record, steps = core.record(request), iter(range(60))
    while record.state is not RequestState.GATHERING:
        core.begin(next(steps) / 100)
        looks.clear()
        assert core.ask(request) is None
        assert len(looks) <= 2 * 64, "a few of its two windows, and those that the budget allows"


def test_a_fast_tier_before_a_slow_one() -> None:
    """The part on the disk is loaded, the part in objects is not."""
    core = core_of(disk(), objects(write="read_only"))
    teach(core, FAST_S, tier=0)
    teach(core, SLOW_S, tier=1)
    request = core.arrive(64)
    core.keep_below(core.truth.keys(request)[:8])
    assert core.ask(request) is None
    for probe in core.manager.take_ops():
        assert probe.verb is Verb.PROBE
        core.finish(probe)
    assert core.ask(request) is None
    reads = core.finish_all()
    assert {op.tier for op in reads if op.keys[0] in core.truth.keys(request)[:8]} == {0}
    assert core.ask(request) == 32


def test_a_tier_that_recovers_is_used_again() -> None:
    """A tier that is left out is not read, so its recovery would never show.

    One chunk is read now and then, for which no request waits; a few of those bring the tier back.
    """
    core = core_of(disk(write="read_only"))
    teach(core, SLOW_S, count=3)
    request, answer, reads = below(core, 64), 0, 0
    for step in range(20):
        core.begin(step * (REMEASURE_S + 1))
        answer = core.ask(request)
        if answer is None:
            break
        ops = core.manager.take_ops()
        assert sum(len(op.keys) for op in ops) <= 1
        reads += len(ops)
        for op in ops:
            core.finish(op, elapsed_s=FAST_S)
        core.scheduler.request_finished(request, [[]])
        request = below(core, 64, chr(ord("b") + step))
    assert answer is None, "the whole hit is loaded again"
    assert 1 < reads < 12


def test_a_tier_whose_fault_has_ended_is_used_again_soon() -> None:
    """A few reads that hang for two seconds make it slow. The requests of a second or two are computed, no more."""
    core = core_of(disk(write="read_only"))
    teach(core, FAST_S, count=8)
    teach(core, SLOW_S, count=7)
    computed_s = []
    for number in range(40):
        core.begin(0.25 * number)
        request = below(core, 64, chr(ord("a") + number))
        if core.ask(request) is None:
            break
        computed_s.append(core.now)
        for op in core.manager.take_ops():
            core.finish(op, elapsed_s=FAST_S)
        core.scheduler.request_finished(request, [[]])
    assert computed_s
    assert computed_s[-1] <= 2.0


def test_slowdowns_and_recoveries_are_counted() -> None:
    """Once each, whatever the number of requests; a speed that is nearly that of computing counts as neither."""
    core = core_of(disk(write="read_only"))
    counts = core.counters.slowdowns, core.counters.recoveries
    for number, (elapsed_s, expected) in enumerate(
        [(FAST_S, ({}, {})), (SLOW_S, ({"disk": 1}, {})), (FAST_S, ({"disk": 1}, {"disk": 1}))]
    ):
        teach(core, elapsed_s, count=30)
        for one in "abc":
            request = below(core, 64, chr(ord(one) + 3 * number))
            core.ask(request)
            core.scheduler.request_finished(request, [[]])
        assert counts == expected


def test_a_slow_tier_is_not_measured_all_the_time() -> None:
    """A tier that stays slow costs one read in ten seconds soon, whatever the load."""
    core = core_of(disk(write="read_only"))
    teach(core, SLOW_S)
    reads = []
    for i in range(40):
        core.begin(100.0 + i)
        assert core.ask(below(core, 64, chr(ord("a") + i))) == 0
        for op in core.manager.take_ops():
            reads.append(i)
            core.finish(op, elapsed_s=SLOW_S)
    assert reads == [0, 2, 6, 14, 24, 34]


def test_answers_do_not_flap() -> None:
    """A tier about as fast as prefill: measurements that vary by a tenth change no answer."""
    core = core_of(disk(write="read_only"))
    changes, last = 0, None
    for i in range(20):
        core.begin(float(i))
        teach(core, 0.064 * (1.1 if i % 2 else 0.9), count=4)
        core.manager._tier_io.reads[0].speed.s_per_byte = 1e-9
        request = below(core, 64, chr(ord("a") + i))
        loaded = core.ask(request) is None
        core.scheduler.request_finished(request, [[]])
        changes += last is not None and loaded is not last
        last = loaded
    assert changes <= 1


def test_a_fixed_floor() -> None:
    """Hits shorter than the minimum are computed, whatever their tier; others are loaded whole."""
    core = core_of(floor=16)
    short, long = core.arrive(12, "s"), core.arrive(range(100, 116), "l")
    core.put([*core.truth.keys(short), *core.truth.keys(long)])
    assert core.ask(short) == 0
    assert core.ask(long) == 16
    assert core.counters.tokens_shortened == 12


def test_the_rate_is_measured_from_steps() -> None:
    """An engine without its own figure is measured: after some prefill steps its slow tier is left out."""
    core = core_of(disk(), rate=None)
    teach(core, SLOW_S)
    runner = core.arrive(600 * SAMPLES_MIN, "r", max_offload_tokens=0)
    for i in range(SAMPLES_MIN):
        core.begin(i * 0.6)
        assert core.scheduler._prefill.tokens_per_s is None
        core.schedule(runner, computed=600 * i, scheduled=600, ids=[range(150 * i + 1, 150 * i + 151)], whole=not i)
    core.begin(SAMPLES_MIN * 0.6)
    core.begin(SAMPLES_MIN * 0.6 + 0.02)
    assert core.scheduler._prefill.tokens_per_s == pytest.approx(1000.0)
    assert core.ask(below(core, 64)) == 0


def test_the_reads_of_a_long_prompt_are_compared_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 chunks, half of them in a slow tier: at most 257 reads are compared, and the cut is still exact."""
    core = core_of(disk(), disk(name="slow"))
    teach(core, FAST_S / 1000, tier=0)
    teach(core, SLOW_S, tier=1)
    request = core.arrive(8000)
    keys = core.truth.keys(request)
    core.keep_below(keys[:999], 0)
    core.keep_below(keys[999:], 1)
    compared: list[int] = []

    def counted(reads: list[PendingRead], *args: Any) -> int:
        compared.append(len(reads))
        assert sum(read.num_bytes for read in reads) == 2000 * core.geometry.groups[0].payload_bytes
        return best_load_tokens(reads, *args)

    looked_up: list[int] = []
    sources_of = core.manager.read_costs.sources_of

    def sources(keys: Sequence[Key], ctx: RequestContext) -> list[int | None]:
        looked_up.append(len(keys))
        return sources_of(keys, ctx)

    monkeypatch.setattr(load_or_recompute, "best_load_tokens", counted)
    monkeypatch.setattr(core.manager.read_costs, "sources_of", sources)
    assert core.ask(request) is None
    assert sum(looked_up) <= 3 * PIECES_MAX, "for the whole hit and for the shorter one"
    assert compared
    assert max(compared) <= PIECES_MAX + 1
    assert core.record(request).lookup.hit_tokens == 999 * 4


def test_a_long_prompt_that_changes_its_tier_with_every_chunk_is_looked_up_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """8,000 chunks, by turns in two tiers: the reads still have all of them, half from each tier."""
    core = core_of(disk(), disk(name="other"))
    teach(core, FAST_S / 1000, tier=0)
    teach(core, FAST_S / 1000, tier=1)
    request = core.arrive(32_000)
    keys = core.truth.keys(request)
    for tier in range(2):
        core.keep_below([key for key in keys if key[0] % 2 == tier], tier)
    looked_up: list[int] = []
    sources_of = core.manager.read_costs.sources_of

    def sources(keys: Sequence[Key], ctx: RequestContext) -> list[int | None]:
        looked_up.append(len(keys))
        return sources_of(keys, ctx)

    monkeypatch.setattr(core.manager.read_costs, "sources_of", sources)
    choice = LoadOrRecompute(core.manager, core.geometry, SchedulerLimits(), core.counters, core.scheduler._prefill)
    core.ask(request)
    looked_up.clear()
    reads = choice._pending_reads(core.record(request), 0, 32_000)
    assert sum(looked_up) < len(keys) / 4
    assert sum([read.num_chunks for read in reads]) == 8000
    assert 3600 < sum([read.num_chunks for read in reads if read.tier == 0]) < 4400


@pytest.mark.parametrize("tiers", [1, 2])
def test_all_groups_share_the_pieces(tiers: int) -> None:
    """Six groups once had as many pieces each, and the first answer about a long prompt took 6 ms for that."""
    groups = [full(4), *[window(1024)] * 5]
    core = make_core(groups=groups, slots=64, tiers=[disk(name=f"disk{i}") for i in range(tiers)])
    request = core.arrive(8000)
    for i in range(len(groups)):
        core.keep_below(core.truth.keys(request, i), tiers - 1)
    prefill = core.scheduler._prefill
    choice = LoadOrRecompute(core.manager, core.geometry, SchedulerLimits(), core.counters, prefill)
    reads = choice._pending_reads(core.record(request), 0, 8000)
    assert PIECES_MAX / 2 < len(reads) <= PIECES_MAX + len(groups)
    sizes = [core.geometry.groups[i].payload_bytes for i in range(len(groups))]
    assert sum(read.num_bytes for read in reads) == 2000 * sizes[0] + 256 * sum(sizes[1:])


GROUPS = [[full(2), full(4)], [full(4), window(8, 2)], [full(2), window(4, 4), window(12, 2)], [window(8), window(4)]]

where = st.lists(st.sampled_from(["host", "host", "disk", "disk", "both", "none"]), max_size=16)
"""Per chunk, where it is."""


@given(
    groups=st.sampled_from(GROUPS), places=st.tuples(where, where, where), computed=st.integers(0, 5),
    elapsed_s=st.sampled_from([0.0005, 0.004, 0.03, 1.0]), own_tokens=st.integers(0, 5),
)  # fmt: skip
def test_auto_is_feasible_and_never_longer_than_off(
    groups: list[GroupSpec], places: tuple[list[str], ...], computed: int, elapsed_s: float, own_tokens: int
) -> None:
    """For any placement, with or without windows: the answer is a hit of the search under some limit.

    It is not longer than the answer with "off".
    """
    sizes = [group.block_tokens for group in groups]
    count = max(size * len(run) for size, run in zip(sizes, places, strict=False))
    answers: list[int] = []
    feasible: set[int] = set()
    for auto in (False, True):
        limits = SchedulerLimits(weighs_recompute=auto, prefill_tokens_per_s=TOKENS_PER_S)
        core = make_core(groups=groups, slots=256, tiers=[disk(write="read_only")], limits=limits)
        teach(core, elapsed_s)
        request = core.arrive(count + own_tokens)
        local = 4 * computed
        for group, run in zip(range(len(groups)), places, strict=False):
            for key, place in zip(core.truth.keys(request, group), run, strict=False):
                if place in ("host", "both"):
                    core.put([key])
                if place in ("disk", "both"):
                    core.keep_below([key])
        record = core.record(request)
        record.computed_tokens = local
        lookups: Lookups = core.scheduler._lookups
        if not auto:
            feasible = {lookups._search(record, local, cap, late=False).tokens for cap in range(request.num_tokens + 1)}
        answer = core.ask(request, computed=local)
        while answer is None:
            for op in core.manager.take_ops():
                core.finish(op, OutcomeKind.OK)
            core.begin()  # the searches above may have used up the budget of their step
            answer = core.ask(request, computed=local)
        answers.append(answer)
    assert answers[1] <= answers[0]
    assert answers[1] in feasible
