"""Meters of calls: what they count, and what they leave out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.call_meters import Calls, CallTimes
from benchmarks.steps.step_meter import StepMeter


def inner(text: str) -> int:
    """One call in Python, which makes one in C."""
    return len(text)


def outer(text: str, *, times: int = 1) -> int:
    """Call :func:`inner` some times."""
    total = 0
    for _ in (None,) * times:
        total += inner(text)
    return total


def test_every_call_is_counted_by_its_kind() -> None:
    """Among them the one that is metered; named arguments are passed on."""
    calls = Calls()
    assert calls.of(outer, "abc", times=2) == 6
    assert (calls.python, calls.c, calls.engine, calls.total) == (3, 2, 1, 5)


def test_ignored_functions_cost_nothing_themselves() -> None:
    """The calls that they make are counted."""
    calls = Calls(ignored=frozenset({outer.__code__}))
    calls.of(outer, "abc")
    assert (calls.python, calls.c) == (1, 1)


def test_a_call_that_raises_is_counted_and_ends_the_count() -> None:
    """A meter that stayed on would count the test framework."""
    calls = Calls()
    with pytest.raises(TypeError):
        calls.of(inner, 3)
    counted = calls.total
    inner("abc")
    assert calls.total == counted == 2


def test_processor_time_is_summed() -> None:
    """In microseconds, over all calls."""
    times = CallTimes()
    assert times.of(sum, range(100_000)) > 0
    first = times.total
    times.of(outer, "abc", times=10_000)
    assert times.total > first > 0


def test_a_step_meter_counts_the_outermost_of_nested_calls() -> None:
    """The scheduler calls the connector within its step: its calls are part of the step once, without the meter's."""
    connector = SimpleNamespace(build_connector_meta=lambda: inner("abc"))
    output = SimpleNamespace(
        num_scheduled_tokens={"a": 20},
        total_num_scheduled_tokens=20,
        scheduled_new_reqs=[SimpleNamespace(req_id="a", num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
    )

    def schedule() -> SimpleNamespace:
        connector.build_connector_meta()
        return output

    scheduler = SimpleNamespace(schedule=schedule, update_from_output=lambda: None)
    meter = StepMeter(block_tokens=16, what="calls")
    meter.watch(scheduler, [connector])
    assert scheduler.schedule() is output
    scheduler.update_from_output()
    (step,) = meter.take()
    assert step.cost == 5, "schedule, the lambda, inner, len, and update_from_output"
    assert (step.tokens, step.running, step.chunks, step.prompts) == (20, 1, 1, 1)
