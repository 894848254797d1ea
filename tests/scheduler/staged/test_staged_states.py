"""Lookups of engines with states beside attention, which can be far from the end, and at few places."""

from __future__ import annotations

import random
from collections.abc import Sequence

from core_parts import Core, TierSpec, disk, make_core, objects
from group_parts import full, ssm, window
from staged_bed import MISS, PENDING, RETRY, StagedBed, prefix

from tierkv.scheduler.staged.staged_request import RETURNS_MAX
from tierkv.types.keys import Key
from tierkv.types.tier_ops import OutcomeKind, Verb

BLOCK = 4
CHUNKS = 12


def core_of(tier: TierSpec) -> Core:
    """Attention and states over one tier."""
    return make_core(groups=(full(BLOCK), ssm(BLOCK)), slots=32, tiers=[tier])


def both(family: str = "a") -> tuple[tuple[Key, ...], tuple[Key, ...]]:
    """Chunks of a prompt: of attention, and of the states."""
    return prefix(CHUNKS, family, 0), prefix(CHUNKS, family, 1)


def answer_probes(it: StagedBed, there: Sequence[Key]) -> int:
    """Let the shared tier answer probes and reads. Returns the number of probes."""
    questions = 0
    while ops := it.core.manager.take_ops():
        for op in ops:
            kinds = [OutcomeKind.OK if key in there else OutcomeKind.ABSENT for key in op.keys]
            questions += op.verb is Verb.PROBE
            it.core.finish(op, kinds)
    return questions


def test_a_tier_is_asked_about_all_places_of_a_state_at_once() -> None:
    """States are kept at few places. Two questions per round trip would take seconds with a remote tier.

    Only the chunks that it turns out to have are read.
    """
    it = StagedBed(core_of(objects()))
    whole, states = both()
    there = [*whole, states[3]]
    it.add("a")
    steps = 0
    end: int | None = None
    while end is None:
        it.begin(0.01)
        end = it.ask_both("a", whole, states, 1)
        it.end()
        answer_probes(it, there)
        steps += 1
        assert steps <= 4
    assert end == 4
    assert it.core.ready() == {*whole[:4], states[3]}
    it.load("a", [*whole[:4], states[3]])
    assert it.held == 0


def test_an_unknown_state_behind_a_gap_costs_the_deadline() -> None:
    """The answer about the last state is missing; a nearer one is known to be absent. The engine waits.

    So the deadline must run, and at its end there is an answer.
    """
    it = StagedBed(core_of(objects(write="read_only")), deadline_s=0.05)
    whole, states = both()
    it.core.put(whole)
    it.core.put(states[2:3])
    it.add("a")
    assert it.look("a", states[7], 7) is RETRY
    it.end()
    (probe,) = it.core.manager.take_ops()
    it.core.finish(probe, OutcomeKind.ABSENT)
    for _ in range(4):
        it.begin(0.01)
        assert it.ask("a", whole[:9]) == 9
        assert it.look("a", states[8], 8) is RETRY
        assert it.look("a", states[7], 7) is MISS
        it.end()
    it.begin(0.03)
    assert it.look("a", states[8], 8) is MISS
    it.end()
    assert it.core.counters.deadlines_expired == 1


def test_nothing_is_read_where_no_state_was_kept() -> None:
    """All attention chunks are present, most of them below, but no state: there is no hit.

    So no chunk is read for it, and none is held.
    """
    it = StagedBed(core_of(disk(write="read_only")))
    whole, states = both()
    it.core.put(whole[:4])
    it.core.keep_below(whole[4:])
    it.add("a")
    for _ in range(3):
        assert it.ask("a", whole) is None
        assert it.ask_window("a", states, 1) == 0
        it.end()
        assert not it.core.manager.take_ops()
        assert it.held == 0
        it.begin(10.0)
    assert it.core.counters.deferrals == it.core.counters.deadlines_expired == 0


def scene(rng: random.Random) -> tuple[StagedBed, dict[str, tuple[tuple[Key, ...], tuple[Key, ...]]], int]:
    """Two or three prompts with a common front, slots for about one, and how many chunks a hit needs at its end.

    Of attention there is a prefix. Of the other group there are some chunks.
    """
    reserved, needed, shared = rng.randrange(6, 13), rng.choice([1, 2, 3]), rng.randrange(5)
    other = ssm(BLOCK) if needed == 1 else window(needed * BLOCK, BLOCK)
    it = StagedBed(make_core(groups=(full(BLOCK), other), slots=32, reserved=reserved, tiers=[disk(write="read_only")]))
    prompts = {}
    for name in "abc"[: rng.choice([2, 3])]:
        whole, states = (prefix(shared, "s", group) + prefix(CHUNKS, name, group)[shared:] for group in (0, 1))
        prompts[name] = whole, states
        there = [
            *whole[: rng.randrange(3, 9)],
            *(key for key in states if rng.random() < (0.8 if needed > 1 else 0.35)),
        ]
        for key in there:
            if it.core.host.slots.find(key) is None:
                (it.core.put if rng.random() < 0.8 and it.core.host.room else it.core.keep_below)([key])
        it.add(name)
    return it, prompts, needed


def test_no_request_waits_for_ever_for_slots_that_others_hold(rng: random.Random) -> None:
    """The engine asks for the states of a shorter hit in one step. In the next one, a chunk behind that hit found no
    slot, so the engine asked for other states, and those of the hit were released. The oldest request lost in each step
    what it had gathered in the step before, and the engine served neither that one nor the others."""
    for _ in range(80):
        it, prompts, needed = scene(rng)
        waiting = list(prompts)
        for _ in range(100):
            it.begin(0.001)
            ends = {name: it.ask_both(name, *prompts[name], needed) for name in waiting}
            it.end()
            for name, end in ends.items():
                if end is not None:
                    waiting.remove(name)
                    whole, states = prompts[name]
                    it.load(name, [*whole[:end], *states[max(0, end - needed) : end]])
            it.run_io()
        assert not waiting
        assert it.core.counters.deadlines_expired == it.held == 0


def test_a_lookup_that_alternates_between_chunks_ends() -> None:
    """An engine asks about one state in every second step, and about another one in those between.

    So each step gives up what the previous one gathered. After some turns the answer is what is readable.
    """
    it = StagedBed(core_of(disk(write="read_only")))
    whole, states = both()
    it.core.put(whole[:8])
    it.core.keep_below([states[3], states[5]])
    it.add("a")
    answers = []
    for step in range(4 * RETURNS_MAX):
        it.begin()
        number = (3, 5)[step % 2]
        it.ask("a", whole[: number + 1])
        answers.append(it.look("a", states[number], number))
        it.end()
    assert set(answers[:RETURNS_MAX]) == {PENDING}
    assert answers[-1] is MISS
    assert it.core.counters.deadlines_expired == 1
