"""The measured read speed of a tier converges, follows changes, and resists single bad readings."""

from __future__ import annotations

import random

import pytest
from core_parts import Core, disk, make_core

from tierkv.manager.contract import RequestContext
from tierkv.manager.lower.read_speed import (
    CALM_S,
    LATENCY_S_MAX,
    LATENCY_S_MIN,
    READINGS_MIN,
    REMEASURE_S,
    REMEASURE_S_MIN,
    S_PER_BYTE_MAX,
    S_PER_BYTE_MIN,
    SLOWER_MAX,
    TierSpeed,
)
from tierkv.types.keys import Key, make_keys
from tierkv.types.tier_ops import Completion, Outcome, OutcomeKind

MB = 1_000_000
WHO = RequestContext("a")


def expected(speed: TierSpeed, queue_bytes: int) -> float:
    """Expected seconds of a read behind a number of bytes."""
    cost = speed.expected(1)
    assert cost is not None
    return cost.latency_s + cost.queue_s + queue_bytes * cost.s_per_byte


def train(speed: TierSpeed, rng: random.Random, latency_s: float, bytes_per_s: float, count: int) -> None:
    """Reads of all sizes, each a fifth off."""
    for _ in range(count):
        size = rng.choice([1, 2, 4, 16, 64]) * MB
        speed.measured(size, (latency_s + size / bytes_per_s) * rng.uniform(0.8, 1.2))


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(0.0001, 2e9), (0.05, 1e8), (0.5, 5e9), (1.0, 1e6)])
def test_it_finds_latency_and_bandwidth(rng: random.Random, latency_s: float, bytes_per_s: float) -> None:
    """Short and long reads tell the two apart; what matters is the time that is expected of either."""
    speed = TierSpeed()
    train(speed, rng, latency_s, bytes_per_s, 400)
    for size in (MB, 8 * MB, 64 * MB):
        assert expected(speed, size) == pytest.approx(latency_s + size / bytes_per_s, rel=0.5)


def test_one_hiccup_moves_little_and_a_change_moves_all(rng: random.Random) -> None:
    """A read that hung for an hour at most doubles what is expected; a tier that stays slow is known within ten."""
    speed = TierSpeed()
    train(speed, rng, 0.001, 1e9, 100)
    before = expected(speed, 4 * MB)
    speed.measured(4 * MB, 3600.0)
    assert expected(speed, 4 * MB) <= before * SLOWER_MAX**0.5 * 1.01
    train(speed, rng, 0.1, 1e7, 10)
    assert expected(speed, 4 * MB) > 20 * before
    train(speed, rng, 0.001, 1e9, 10)
    assert expected(speed, 4 * MB) < 3 * before


def test_nothing_is_known_before_a_few_readings() -> None:
    """One reading may be anything: nothing is decided by it, and nothing is shown."""
    speed = TierSpeed()
    for _ in range(READINGS_MIN - 1):
        speed.measured(MB, 1.0)
        assert speed.expected(1) is None
        assert speed.as_dict() == {}
    speed.measured(MB, 1.0)
    assert expected(speed, MB) == pytest.approx(1.0)
    assert set(speed.as_dict()) == {"latency_s", "bytes_per_s"}


@pytest.mark.parametrize("slow", range(READINGS_MIN))
@pytest.mark.parametrize("slow_s", [0.1, 10.0])
def test_one_slow_reading_among_the_first_does_not_count_in_full(slow: int, slow_s: float) -> None:
    """The first read of a disk waits for a file to be opened; a tier must not be left out for that."""
    speed = TierSpeed()
    for number in range(READINGS_MIN):
        speed.measured(4 * MB, slow_s if number == slow else 0.004)
    assert 0.004 * 0.99 < expected(speed, 4 * MB) <= 0.004 * SLOWER_MAX**0.5 * 1.01


@pytest.mark.parametrize("elapsed_s", [1e-300, 1e300])
def test_numbers_keep_their_bounds(elapsed_s: float) -> None:
    """A wrong clock must not lead to a division by zero or an infinity."""
    speed = TierSpeed()
    for _ in range(2000):
        speed.measured(1, elapsed_s)
    assert speed.latency_s is not None
    assert speed.s_per_byte is not None
    assert LATENCY_S_MIN <= speed.latency_s <= LATENCY_S_MAX
    assert S_PER_BYTE_MIN <= speed.s_per_byte <= S_PER_BYTE_MAX


def test_a_measurement_without_time_or_bytes_is_none() -> None:
    """A read of nothing, or a completion that names no time, teaches nothing."""
    speed = TierSpeed()
    speed.measured(0, 1.0)
    speed.measured(1, 0.0)
    assert speed.expected(1) is None


def test_what_is_promised_is_waited_for() -> None:
    """A read behind a hundred others waits for them: the queue is part of the price."""
    speed = TierSpeed()
    for _ in range(READINGS_MIN):
        speed.measured(MB, 1.0)
    idle = expected(speed, MB)
    speed.promised(99 * MB, 1, 0.0)
    assert expected(speed, MB) == pytest.approx(idle + 99 * MB * (speed.s_per_byte or 0))


def test_staleness() -> None:
    """Only a tier that has nothing to read, and had nothing for a while, is read for its own sake."""
    speed = TierSpeed()
    assert speed.is_stale(0.0)
    speed.promised(MB, 1, 1.0)
    assert not speed.is_stale(100.0)
    speed.ended(MB, 1)
    assert not speed.is_stale(1.0 + REMEASURE_S_MIN - 0.1)
    assert speed.is_stale(1.0 + REMEASURE_S_MIN)


def sample(speed: TierSpeed, now: float, elapsed_s: float) -> None:
    """Read a chunk only to measure the tier."""
    speed.promised(MB, 1, now)
    speed.sampled(now)
    speed.measured(MB, elapsed_s)
    speed.ended(MB, 1)


def pause_behind(speed: TierSpeed, now: float) -> float:
    """Seconds from ``now`` until the tier may be read again to measure it, in steps of a tenth of a second."""
    return next(tenths / 10 for tenths in range(1000) if speed.is_stale(now + tenths / 10))


def test_pauses_grow_while_samples_are_slow_and_begin_again_after_a_calm() -> None:
    """A tier that stays slow is read seldom. One that has become slow after a long time is tried again soon."""
    speed = TierSpeed()
    now, pauses = 0.0, []
    for _ in range(6):
        sample(speed, now, 1.0)
        pauses.append(pause_behind(speed, now))
        now += pauses[-1]
    assert pauses == [2, 4, 8, REMEASURE_S, REMEASURE_S, REMEASURE_S]
    sample(speed, now + CALM_S, 1.0)
    assert pause_behind(speed, now + CALM_S) == 2 * REMEASURE_S_MIN


def test_a_fast_sample_is_followed_at_once(rng: random.Random) -> None:
    """A tier whose fault has ended is expected to be as fast as before within some reads of one chunk."""
    speed = TierSpeed()
    train(speed, rng, 0.0001, 1e9, 100)
    usual_s = expected(speed, 16 * MB)
    train(speed, rng, 2.0, 1e9, 4)
    assert expected(speed, 16 * MB) > 8 * usual_s
    now = 10.0
    for _ in range(8):
        sample(speed, now, 0.0001 + MB / 1e9)
        if not speed.is_stale(now):
            break
    assert expected(speed, 16 * MB) < 2 * usual_s
    assert not speed.is_stale(now), "it is as fast as expected now"
    assert speed.is_stale(now + 2 * REMEASURE_S_MIN)


# -- fed by the manager ------------------------------------------------------------------------------------------------


def reading(count: int = 8) -> tuple[Core, list[Key]]:
    """A core whose disk is about to be read in batches of 4."""
    core = make_core(tiers=[disk(write="read_only")])
    keys = make_keys([bytes([i]) * 8 for i in range(count)], 0)
    core.keep_below(keys)
    core.manager.passages.reserve(WHO.request_id, tuple(keys), WHO.hints)
    return core, keys


def test_reads_teach_with_their_queue() -> None:
    """The later of several batches waited for the others: the tier delivered more meanwhile, and is not slower."""
    core, _ = reading(4 * READINGS_MIN)
    speed = core.manager._tier_io.reads[0].speed
    ops = core.manager.take_ops()
    for number, op in enumerate(ops):
        core.finish(op, elapsed_s=0.1 + 0.05 * number)
    assert expected(speed, 64) == pytest.approx(0.1, rel=0.1)
    assert speed.is_stale(REMEASURE_S_MIN), "nothing is promised any more"


def test_failures_teach_nothing_and_deadlines_a_lot() -> None:
    """A refusal comes at once and is not speed; a read that missed its deadline is slow, and is counted once."""
    core, _ = reading(4 * (1 + READINGS_MIN))
    speed = core.manager._tier_io.reads[0].speed
    first, *others = core.manager.take_ops()
    core.finish(first, OutcomeKind.REFUSED, elapsed_s=0.0001)
    assert (speed.latency_s, speed.expected(1)) == (None, None)
    for op in others:
        late = tuple(Outcome(OutcomeKind.TIMED_OUT) for _ in op.keys)
        core.manager.on_completion(Completion(op.op_id, late, ended=False, elapsed_s=10.0))
    known = speed.expected(1)
    assert known is not None
    assert expected(speed, 128) > 9.0
    known = speed.latency_s
    for op in others:
        core.finish(op, elapsed_s=60.0)
    assert (speed.latency_s, speed.promised_bytes) == (known, 0)


def test_a_read_that_hangs_at_the_start_does_not_stay_in_the_model() -> None:
    """One missed deadline among the first readings: the good ones behind it are applied in full."""
    speed = TierSpeed()
    assert not speed.measured(MB, 10.0, is_late=True)
    assert speed.has_missed
    assert not speed.is_known
    for _ in range(READINGS_MIN - 1):
        speed.measured(MB, 0.001)
    assert expected(speed, MB) == pytest.approx(0.001)
