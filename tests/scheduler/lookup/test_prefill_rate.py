"""Prefill rate of the engine: given, or measured from its steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tierkv.scheduler.lookup.prefill_rate import (
    LONG_STEP_TOKENS,
    MEDIAN_SAMPLES_MIN,
    PREFILL_TOKENS_MIN,
    SAMPLES_MAX,
    SAMPLES_MIN,
    PrefillRate,
)

DECODE_S = 0.01


def pipelined(rate: PrefillRate, prompts: Sequence[Sequence[int]], seconds_per_token: float) -> None:
    """Make steps as an engine that begins one while the one before it is computed. Each prompt: tokens of its steps."""
    begins_s = free_s = 0.0
    for tokens in [tokens for prompt in prompts for tokens in (*prompt, 0, 0, 0)]:
        rate.step_began(begins_s)
        rate.step_computes(tokens)
        begins_s, free_s = free_s + 1e-4, free_s + DECODE_S + tokens * seconds_per_token


def steps(rate: PrefillRate, count: int, tokens: int, seconds: float, start: float = 0.0) -> float:
    """Make ``count`` steps of one kind, and one that decodes. Returns the time after them."""
    for _ in range(count):
        rate.step_began(start)
        rate.step_computes(tokens)
        start += seconds
    for _ in range(2):
        rate.step_began(start)
        start += DECODE_S
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


def test_of_few_steps_the_slowest_counts() -> None:
    """A rate that is too low loads more than is best, as an unknown one; too high a one would throw hits away."""
    rate = PrefillRate()
    now = steps(rate, MEDIAN_SAMPLES_MIN - 2, 1000, 0.25)
    now = steps(rate, 1, 1000, 2.0, now)
    assert rate.tokens_per_s == 500.0
    steps(rate, 1, 1000, 0.25, now)
    assert rate.tokens_per_s == 4000.0


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
        for _ in range(4):
            rate.step_began(now)
            rate.step_computes(1000)
            now += 0.5
        now += 60.0
    assert rate.tokens_per_s == 2000.0
    steps(rate, SAMPLES_MAX, 1000, 0.25, now)
    assert rate.tokens_per_s == 4000.0


def test_a_step_that_took_no_time_is_none() -> None:
    """A coarse clock, or an empty step in between, must not divide by zero."""
    rate = PrefillRate()
    steps(rate, 10, 1000, 0.0)
    assert rate.tokens_per_s is None


def test_short_steps_count_where_there_are_no_long_ones() -> None:
    """An engine that computes a few hundred tokens at a time has a rate too: too low a one loads more than is best."""
    rate = PrefillRate()
    now = steps(rate, 20, 300, 0.1)
    assert rate.tokens_per_s == pytest.approx(3000.0)
    steps(rate, SAMPLES_MIN, LONG_STEP_TOKENS, 0.064, now)
    assert rate.tokens_per_s == pytest.approx(8000.0)


@pytest.mark.parametrize("prompt", [[1000], [2000, 2000, 700], [100, 100], [2000, 64]])
def test_an_engine_that_begins_a_step_before_the_last_one_has_ended(prompt: list[int]) -> None:
    """The time until the next step is that of the step before: of one that decodes, a few milliseconds."""
    rate = PrefillRate()
    pipelined(rate, [prompt] * 20, seconds_per_token=0.001)
    assert rate.tokens_per_s is not None
    assert 0.5 * 1000 < rate.tokens_per_s <= 1000.0


def test_steps_beside_longer_ones_are_not_measured() -> None:
    """The time of a longer neighbour may be in either interval."""
    rate = PrefillRate()
    pipelined(rate, [[300, 3000, 700]] * 20, seconds_per_token=0.001)
    assert rate.tokens_per_s == pytest.approx(1000.0, rel=0.01)
