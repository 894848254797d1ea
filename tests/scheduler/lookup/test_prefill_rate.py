"""Prefill rate of the engine: given, or measured from its steps."""

from __future__ import annotations

import pytest

from tierkv.scheduler.lookup.prefill_rate import PREFILL_TOKENS_MIN, SAMPLES_MAX, SAMPLES_MIN, PrefillRate


def steps(rate: PrefillRate, count: int, tokens: int, seconds: float, start: float = 0.0) -> float:
    """Make ``count`` steps of one kind. Returns the time after them."""
    for _ in range(count):
        rate.step_began(start)
        rate.step_computes(tokens)
        start += seconds
    rate.step_began(start)
    return start


def test_the_engines_own_figure_counts() -> None:
    """An engine with its own figure is not measured; an impossible figure counts as none."""
    rate = PrefillRate(5000.0)
    steps(rate, 20, 1000, 1.0)
    assert rate.tokens_per_s == 5000.0
    for none in (None, 0.0, -1.0, float("nan")):
        assert PrefillRate(none).tokens_per_s is None


def test_it_is_known_after_some_steps() -> None:
    """A single step may have been a warm-up."""
    rate = PrefillRate()
    now = steps(rate, SAMPLES_MIN - 1, 1000, 0.5)
    assert rate.tokens_per_s is None
    steps(rate, 1, 1000, 0.5, now)
    assert rate.tokens_per_s == 2000.0


@pytest.mark.parametrize("tokens", [0, 1, PREFILL_TOKENS_MIN - 1])
def test_steps_with_little_prefill_do_not_count(tokens: int) -> None:
    """The time of decode steps, and of short prompts, has other causes."""
    rate = PrefillRate()
    steps(rate, 50, tokens, 1.0)
    assert rate.tokens_per_s is None


def test_pauses_do_not_count_for_much() -> None:
    """An engine that sleeps after every fourth step has the same rate; old samples are dropped."""
    rate, now = PrefillRate(), 0.0
    for _ in range(5):
        now = steps(rate, 4, 1000, 0.5, now) + 60.0
    assert rate.tokens_per_s == 2000.0
    steps(rate, SAMPLES_MAX, 1000, 0.25, now)
    assert rate.tokens_per_s == 4000.0


def test_a_step_that_took_no_time_is_none() -> None:
    """A coarse clock, or an empty step in between, must not divide by zero."""
    rate = PrefillRate()
    steps(rate, 10, 1000, 0.0)
    assert rate.tokens_per_s is None
