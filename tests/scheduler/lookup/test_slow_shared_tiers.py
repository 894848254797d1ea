"""Shared tiers that answer questions, or deliver chunks, more slowly than the engine computes: no request waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_parts import Core, TierSpec, make_core, objects
from core_truth import BedRequest
from group_parts import window

from tierkv.manager.lower.read_speed import READINGS_MIN, REMEASURE_S
from tierkv.scheduler.limits import SchedulerLimits
from tierkv.types.engine import GroupSpec
from tierkv.types.tier_ops import Completion, Outcome, OutcomeKind, TierHealth, TierOp, Verb

TOKENS_PER_S = 1000.0
"""Prefill: a chunk of 4 tokens in 4 ms."""
CHUNKS = 400
SLOW_S, FAST_S = 0.05, 0.00001
"""Seconds per chunk, of a question and of a read."""


def core_of(
    *tiers: TierSpec, weighs: bool = True, rate: float | None = TOKENS_PER_S, groups: list[GroupSpec] | None = None
) -> Core:
    """Core over shared tiers, with a known prefill rate."""
    limits = SchedulerLimits(lookup_deadline_s=100.0, weighs_recompute=weighs, prefill_tokens_per_s=rate)
    return make_core(slots=1024, tiers=tiers or (objects(),), limits=limits, groups=groups, step_keys=100_000)


def teach(core: Core, *, probe_s: float | None = None, read_s: float | None = None) -> None:
    """Measure questions and reads of the tier."""
    for _ in range(READINGS_MIN):
        if probe_s is not None:
            core.lower[0].probes.speed.measured(4, 4 * probe_s)
        if read_s is not None:
            core.manager._tier_io.reads[0].speed.measured(32 * core.geometry.payload_bytes_max, 32 * read_s)


def prompt(core: Core, number: int) -> BedRequest:
    """Request whose chunks no tier knows yet."""
    return core.arrive(range(10_000 * number, 10_000 * number + 4 * CHUNKS + 1), f"r{number}")


def probes(core: Core) -> list[TierOp]:
    """Questions that are due."""
    return [op for op in core.manager.take_ops() if op.verb is Verb.PROBE]


def answer(core: Core, ops: list[TierOp], probe_s: float, kind: OutcomeKind = OutcomeKind.OK) -> None:
    """Answer questions. probe_s: seconds per key."""
    for op in ops:
        core.finish(op, kind, elapsed_s=probe_s * len(op.keys))


@pytest.mark.parametrize(("probe_s", "read_s"), [(SLOW_S, None), (SLOW_S, FAST_S), (FAST_S, SLOW_S)])
def test_requests_do_not_wait_for_a_slow_shared_tier(probe_s: float, read_s: float | None) -> None:
    """Its questions take longer than computing, or its reads do: few chunks are asked for, to measure it again."""
    core = core_of()
    teach(core, probe_s=probe_s, read_s=read_s)
    first, second = prompt(core, 1), prompt(core, 2)
    assert core.ask(first) is None
    assert core.ask(second) == 0
    asked = probes(core)
    seconds = sum([probe_s * len(op.keys) for op in asked]) / core.lower[0].capabilities.preferred_concurrency
    assert asked
    assert seconds <= core.lower[0].limits.probe_deadline_s / 8
    answer(core, asked, probe_s, OutcomeKind.ABSENT)
    core.begin(0.5)
    assert core.ask(first) == 0
    assert core.ask(prompt(core, 3)) == 0
    assert not probes(core)
    assert core.counters.slowdowns["objects"] == 1
    core.manager.validate()


def test_the_time_in_a_queue_is_no_time_of_a_question() -> None:
    """In a burst, questions wait behind reads. That says nothing about the next ones."""
    core = core_of()
    for number in range(1, 2 + READINGS_MIN):
        request = prompt(core, number)
        assert core.ask(request) is None
        for op in probes(core):
            absent = (Outcome(OutcomeKind.ABSENT),) * len(op.keys)
            seconds = FAST_S * len(op.keys)
            core.manager.on_completion(Completion(op.op_id, absent, elapsed_s=5.0 + seconds, queued_s=5.0))
        core.begin(core.now + 1.0)
        core.ask(request)
    assert core.lower[0].probes.s_per_key is not None
    assert not core.lower[0].probes.is_slow


def test_questions_and_reads_are_not_added_up() -> None:
    """Each takes a little less time than computing, and part of it is the other's, where both share a tier's calls."""
    core = core_of()
    teach(core, probe_s=2 * 0.0035, read_s=0.0035)
    core.ask(prompt(core, 1))
    assert not core.lower[0].probes.is_slow


def test_a_few_chunks_that_are_found_are_loaded() -> None:
    """The questions are slow, and the reads are not: chunks found by the questions that measure the tier pay."""
    core = core_of()
    teach(core, probe_s=SLOW_S, read_s=FAST_S)
    request = prompt(core, 1)
    assert core.ask(request) is None
    asked = probes(core)
    answer(core, asked, SLOW_S)
    core.begin(0.5)
    assert core.ask(request) is None
    core.finish_all()
    assert core.ask(request) == 4 * sum([len(op.keys) for op in asked])


def test_a_shared_tier_that_recovers_is_asked_again() -> None:
    """It is measured again at times, and requests wait for it as soon as it is faster than computing."""
    core = core_of()
    teach(core, probe_s=SLOW_S)
    assert core.ask(prompt(core, 1)) is None
    answer(core, probes(core), SLOW_S, OutcomeKind.ABSENT)
    asked, number = 0, 2
    while asked < CHUNKS:
        core.begin(core.now + REMEASURE_S + 1)
        assert number < 20, "it stays unused"
        request = prompt(core, number)
        assert core.ask(request) is None
        asked = 0
        while ops := probes(core):
            asked += sum([len(op.keys) for op in ops])
            answer(core, ops, FAST_S, OutcomeKind.ABSENT)
        core.begin()
        assert core.ask(request) == 0
        number += 1
    assert core.counters.recoveries["objects"] == 1


def test_a_shared_tier_whose_reads_recover_is_asked_again() -> None:
    """A chunk that is found by the questions which measure it is read to measure its reads."""
    core = core_of()
    teach(core, probe_s=FAST_S, read_s=SLOW_S)
    number = loaded = 0
    while not loaded:
        core.begin(core.now + REMEASURE_S + 1)
        number += 1
        assert number < 20, "it stays unused"
        request = prompt(core, number)
        while (loaded := core.ask(request)) is None:
            for op in core.manager.take_ops():
                core.finish(op, elapsed_s=FAST_S * len(op.keys))
            core.begin()
    assert loaded == 4 * CHUNKS
    assert core.counters.recoveries["objects"] == 1


def test_a_shared_tier_that_hung_is_asked_as_soon_as_it_returns() -> None:
    """The time of its late answers says nothing about those after the fault."""
    core = core_of()
    teach(core, probe_s=SLOW_S)
    core.ask(prompt(core, 1))
    assert core.ask(prompt(core, 2)) == 0
    core.manager.on_completion(TierHealth(0, usable=False))
    core.manager.on_completion(TierHealth(0, usable=True))
    core.begin(core.now + 0.1)
    assert core.ask(prompt(core, 3)) is None
    assert len(core.lower[0].probes) >= CHUNKS
    assert core.counters.recoveries["objects"] == 1


@pytest.mark.parametrize(("weighs", "rate"), [(False, TOKENS_PER_S), (True, None)])
def test_a_slow_shared_tier_is_asked_where_nothing_is_weighed(weighs: bool, rate: float | None) -> None:
    """With recompute off, or before the prefill rate is known, every hit is loaded."""
    core = core_of(weighs=weighs, rate=rate)
    teach(core, probe_s=SLOW_S, read_s=SLOW_S)
    core.ask(prompt(core, 1))
    assert core.ask(prompt(core, 2)) is None


def test_questions_about_a_window_are_few() -> None:
    """A window of few chunks serves a prompt of any length, so slow questions about it pay."""
    core = core_of(groups=[window(8)])
    teach(core, probe_s=SLOW_S, read_s=FAST_S)
    core.ask(prompt(core, 1))
    assert core.ask(prompt(core, 2)) is None


def test_questions_that_wait_when_a_tier_becomes_slow_are_dropped() -> None:
    """Those of requests; a chunk that is to be written is still asked for, as its write waits for the answer."""
    core = core_of()
    requests = [prompt(core, number) for number in range(1, 4)]
    assert [core.ask(request) for request in requests] == [None] * 3
    to_write = core.truth.keys(core.request(8, "w"))
    for key in to_write:
        core.lower[0].probes.put(key)
    for _ in range(8):
        answer(core, probes(core), SLOW_S)
        core.begin(core.now + 1.0)
    assert len(core.lower[0].probes) > CHUNKS
    core.ask(requests[0])
    assert core.lower[0].probes.is_slow
    asked = [key for op in probes(core) for key in op.keys]
    assert set(to_write) <= set(asked)
    assert len(asked) < len(to_write) + 20, "beside these, a few that measure it again"
    core.manager.validate()


def test_damaged_chunks_do_not_have_a_whole_prompt_asked_for_again_and_again() -> None:
    """Answers expire while windows are read, and one after the other is damaged: chunks are asked about twice."""
    damaged = 12
    tier = objects(probe_keys_max=32)
    tier = replace(tier, limits=replace(tier.limits, presence_ttl_s=0.1))
    core = core_of(tier, rate=None, groups=[window(8)])
    request = prompt(core, 1)
    waiting: list[TierOp] = []
    asked = 0
    while (tokens := core.ask(request)) is None:
        waiting += core.manager.take_ops()
        for op in waiting[:2]:
            asked += len(op.keys) * (op.verb is Verb.PROBE)
            bad = op.verb is Verb.READ and damaged > 0
            damaged -= bad
            good = Outcome(OutcomeKind.OK, core.geometry.payload_bytes_max if op.verb is Verb.READ else None)
            outcomes = (good,) * (len(op.keys) - bad) + (Outcome(OutcomeKind.CORRUPT),) * bad
            core.manager.on_completion(Completion(op.op_id, outcomes, elapsed_s=0.01))
        del waiting[:2]
        core.begin(core.now + 0.2)
        assert core.now < 60.0
    assert tokens
    assert not damaged
    assert asked <= 3 * CHUNKS
    core.manager.validate()
