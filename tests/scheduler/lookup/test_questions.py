"""Searches of one step are bounded together, and each lookup that waits for one has its turn."""

from __future__ import annotations

import pytest
from calls import calls_of
from core_parts import BedRequest, Core, TierSpec, disk, make_core, objects

from tierkv.manager.step_budget import StepBudget
from tierkv.scheduler.lookup.open_lookup import OpenLookup
from tierkv.scheduler.lookup.questions import KEYS_PER_SEARCH, SearchTurns
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult

STEP_KEYS = 64


def resident(core: Core, number: int, chunks: int = 2) -> BedRequest:
    """Request for chunks that are in the host tier, and one token more."""
    first = 1000 * number
    request = core.arrive(range(first, first + chunks * core.geometry.groups[0].chunk_tokens + 1), f"resident-{number}")
    core.put(core.record(request).groups[0].keys)
    return request


def test_a_step_searches_for_a_bounded_number_of_requests() -> None:
    """8,000 short prompts at once took 215 ms of the engine's thread in one step. The first ones are answered first."""
    core = make_core(slots=2048, tiers=[disk()], step_keys=STEP_KEYS)
    waiting = [resident(core, number) for number in range(100)]
    steps = 0
    while waiting:
        core.begin(0.01 * steps)
        answers = [core.ask(request) for request in waiting]
        answered = sum(answer is not None for answer in answers)
        assert 0 < answered <= STEP_KEYS / KEYS_PER_SEARCH
        assert None not in answers[:answered]
        waiting = waiting[answered:]
        steps += 1


@pytest.mark.parametrize("chunks", [1, 500])
def test_a_question_without_budget_makes_few_calls(chunks: int) -> None:
    """Whatever the length of the prompt: it is searched in a later step."""
    core = make_core(slots=2048, tiers=[disk()], step_keys=STEP_KEYS)
    others = [resident(core, number) for number in range(20)]
    late = resident(core, 20, chunks)
    for request in others:
        core.ask(request)
    assert core.ask(late) is None
    assert calls_of(core.ask, late) < 60


def test_those_that_are_asked_about_first_do_not_use_up_every_step() -> None:
    """Many wait for a silent tier, and each answer of another one repeats their searches. Others wait behind them.

    Those would never be searched, although all of their chunks are in host memory.
    """
    core = make_core(slots=64, tiers=[objects()], step_keys=STEP_KEYS)
    asked = [core.arrive(range(1000 * number, 1000 * number + 9), f"cold-{number}") for number in range(100, 150)]
    last = resident(core, 1)
    answers: list[int | None] = []
    while not answers or answers[-1] is None:
        assert len(answers) < 4 * len(asked), "the last one has no turn"
        core.begin(0.001 * len(answers))
        core.manager.step.version += 1
        assert {core.ask(request) for request in asked} == {None}
        answers.append(core.ask(last))
    assert answers[-1] == 8


def test_a_search_knows_that_it_continues_one_of_an_earlier_step() -> None:
    """Tiers may have answered since. Otherwise it waits for an answer that was given already, and nothing wakes it."""
    turns, lookup = SearchTurns(StepBudget().share()), OpenLookup()
    turns.begin_step()
    assert turns.take(lookup)
    lookup.begin_search(1)
    assert not lookup.continued
    lookup.seen, lookup.paused = {None: {Key(bytes(36)): LookupResult.RETRY}}, True
    turns.begin_step()
    assert turns.take(lookup)
    lookup.begin_search(2)
    assert lookup.continued
    assert not lookup.is_settled(lookup.searched_version)
    lookup.seen = {}
    lookup.begin_search(3)
    assert lookup.is_settled(lookup.searched_version)


@pytest.mark.parametrize("tier", [disk(), objects()])
@pytest.mark.parametrize("step_keys", [2, 6, 64])
def test_a_search_looks_for_a_chunk_however_little_is_left(tier: TierSpec, step_keys: int) -> None:
    """The fixed cost of a search used up a small budget: it began in each step, and found nothing."""
    core = make_core(tiers=[tier], step_keys=step_keys)
    request = core.arrive(4 * 16 + 1)
    keys = core.truth.keys(request)
    if tier.capabilities.authoritative_index:
        core.keep_below(keys)
    answers: list[int | None] = []
    while None in answers[-1:] or not answers:
        core.begin()
        core.manager.budget.common = 0  # others were first
        answers.append(core.ask(request))
        for op in core.manager.take_ops():
            core.finish(op)
        assert len(answers) < 200
    assert answers[-1] == 4 * 16
