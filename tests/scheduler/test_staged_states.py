"""Lookups of engines with states beside attention: states far from the end, and tails, which end inside a block."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from core_parts import Core, TierSpec, disk, make_core, objects
from group_parts import full, ssm
from staged_bed import HIT, MISS, PENDING, RETRY, StagedBed, prefix

from tierkv.scheduler.staged_lookups import group_budgets
from tierkv.types.keys import Key, make_key
from tierkv.types.lookup import LookupResult
from tierkv.types.tier_ops import OutcomeKind, Verb

BLOCK = 4
CHUNKS = 12


def core_of(tier: TierSpec | None = None, *, slots: int = 32, hash_block_tokens: int = BLOCK) -> Core:
    """Attention and states over one tier."""
    below = disk(write="read_only") if tier is None else tier
    return make_core(groups=(full(BLOCK), ssm(BLOCK)), slots=slots, tiers=[below], hash_block_tokens=hash_block_tokens)


def both(family: str = "a") -> tuple[tuple[Key, ...], tuple[Key, ...]]:
    """The chunks of a prompt: of attention, and of the states."""
    return prefix(CHUNKS, family, 0), prefix(CHUNKS, family, 1)


def answer_probes(it: StagedBed, there: Sequence[Key]) -> int:
    """The shared tier says what it has, and gives what it is asked for; how many questions it was asked."""
    questions = 0
    while ops := it.core.manager.take_ops():
        for op in ops:
            kinds = [OutcomeKind.OK if key in there else OutcomeKind.ABSENT for key in op.keys]
            questions += op.verb is Verb.PROBE
            it.core.finish(op, kinds)
    return questions


def test_a_tier_is_asked_about_all_places_of_a_state_at_once() -> None:
    """States are kept at a few places. Asked about two of them per round trip, a tier far away would be asked for
    seconds; and what it turns out to have is all that is read."""
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


def test_a_state_behind_a_gap_that_no_tier_speaks_of_costs_the_deadline() -> None:
    """The tier owes an answer about the last state; a nearer one is known not to be there. The engine waits: so the time
    has to run, and at its end there is an answer."""
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
    it.begin(0.02)
    assert it.look("a", states[8], 8) is MISS
    it.end()
    assert it.core.counters.deadlines_expired == 1


def test_nothing_is_read_where_no_state_was_kept() -> None:
    """All of the attention is there, most of it below, and not one state: there is no hit, so not a chunk is brought up
    for it, and none is held."""
    it = StagedBed(core_of())
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


# -- tails -------------------------------------------------------------------------------------------------------------


def tail(end_token: int, group: int) -> Key:
    """What a group has up to a token inside a block."""
    return make_key(f"up to {end_token}".encode().rjust(12), group)


def ask_tails(it: StagedBed, request_id: str, ends: Sequence[int]) -> tuple[int | None, bool]:
    """As engines do: one end after the other, the largest first, every group until one misses.

    Returns:
        The end of which all is there, if any; whether something would have to be waited for.
    """
    waits = False
    for end in ends:
        answers: list[LookupResult] = []
        for group in (0, 1):
            answers.append(it.lookups.lookup(request_id, tail(end, group), group, end))
            if answers[-1] is MISS:
                break
        later = any(answer is not HIT for answer in answers if answer is not MISS)
        waits |= later
        if not later and MISS not in answers:
            return end, waits
    return None, waits


def test_a_tail_is_gathered_in_both_groups_and_loaded() -> None:
    """No whole block has a state, but the block that the prompt ends in: what both groups have there is brought up, not
    what only one of them has, and the question about a smaller end does not make the larger one unwanted."""
    it = StagedBed(core_of(hash_block_tokens=1))
    whole, _ = both()
    pair = [tail(2, 0), tail(2, 1)]
    it.core.keep_below([*whole, tail(3, 0), *pair])
    it.add("a")
    assert ask_tails(it, "a", [3, 2, 1]) == (None, True)
    it.end()
    assert set(it.run_io()) == set(pair)
    it.begin(0.01)
    assert ask_tails(it, "a", [3, 2, 1])[0] == 2
    assert it.lookups.tail_tokens("a")[pair[0]] == 2
    it.load("a", pair)
    assert it.held == 0


def test_the_largest_tail_that_is_there_is_the_one() -> None:
    """Two ends are there: the larger one is brought up, the smaller one stays where it is."""
    it = StagedBed(core_of(hash_block_tokens=1))
    it.core.keep_below([tail(end, group) for end in (3, 1) for group in (0, 1)])
    it.add("a")
    assert ask_tails(it, "a", [3, 2, 1]) == (None, True)
    it.end()
    assert set(it.run_io()) == {tail(3, 0), tail(3, 1)}


def test_a_tail_behind_whole_chunks_stays_held_with_them() -> None:
    """The engine hears that all is there, and has no blocks for it now: later it is still there, though stores press.
    A tail that would have to be read keeps nobody waiting."""
    it = StagedBed(core_of(hash_block_tokens=1))
    whole, states = both()
    it.core.put([*whole[:2], states[1], tail(10, 0), tail(10, 1)])
    it.core.keep_below([tail(11, 0), tail(11, 1)])
    it.add("a")
    for number in range(3):
        assert it.ask_both("a", whole[:2], states[:2], 1) == 2
        assert ask_tails(it, "a", [11, 10, 9])[0] == 10
        it.end()
        for other in range(40):
            it.core.put(prefix(1, f"other {number} {other}"))
        it.begin(0.01)
    assert it.core.counters.deferrals == 0
    assert it.ask_both("a", whole[:2], states[:2], 1) == 2
    assert ask_tails(it, "a", [11, 10, 9])[0] == 10
    it.load("a", [*whole[:2], tail(10, 0), tail(10, 1)])
    assert it.held == 0


def test_a_tail_that_no_tier_speaks_of_costs_the_deadline() -> None:
    """The question about it hangs: "later" until the deadline, then a miss."""
    it = StagedBed(core_of(objects(), hash_block_tokens=1))
    it.add("a")
    for _ in range(5):
        assert ask_tails(it, "a", [3]) == (None, True)
        it.end()
        it.begin(1.0)
    assert ask_tails(it, "a", [3]) == (None, False)
    assert it.core.counters.deadlines_expired == 1


@pytest.mark.parametrize(("tokens_max", "found"), [(None, 10), (10, 10), (9, None), (0, None)])
def test_hints_bound_tails(tokens_max: int | None, found: int | None) -> None:
    """``max_load_tokens`` counts from the first token that the engine lacks, whole chunks and tail together."""
    it = StagedBed(core_of(hash_block_tokens=1))
    whole, states = both()
    it.core.put([*whole[:2], states[1], tail(10, 0), tail(10, 1)])
    it.add("a", max_load_tokens=tokens_max)
    it.ask_both("a", whole[:2], states[:2], 1)
    assert ask_tails(it, "a", [10])[0] == found


def test_tails_have_room_beside_whole_chunks() -> None:
    """One request may have no more gathered than there is: where there can be tails, whole chunks leave them room."""
    assert group_budgets(core_of().geometry, 20) == (18, 2)
    assert group_budgets(core_of(hash_block_tokens=1).geometry, 20) == (16, 2)
    assert group_budgets(core_of(hash_block_tokens=1).geometry, 2) == (1, 1)


def test_a_pending_tail_is_waited_for() -> None:
    """Another request's store of it is under way."""
    it = StagedBed(core_of(hash_block_tokens=1))
    pair = [tail(2, 0), tail(2, 1)]
    grant = it.core.manager.prepare_store([(key, group) for group, key in enumerate(pair)], it.lookups.context("w"))
    assert grant is not None
    it.add("a")
    assert it.lookups.lookup("a", pair[0], 0, 2) is PENDING
    assert ask_tails(it, "a", [2]) == (None, True)
    it.end()
    it.core.manager.complete_store(grant.slots)
    it.begin(0.01)
    assert ask_tails(it, "a", [2])[0] == 2
