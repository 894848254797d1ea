"""Retries: only for failures that may pass, only for failed keys, with jitter, and never beyond the deadline."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from tier_bench import Bench

from tierkv.errors import BackendError, BackendUnavailableError
from tierkv.testing import faults
from tierkv.testing.frames import make_key
from tierkv.tiers.retry import OpResult, RetryLimits, Timing
from tierkv.tiers.tier import Tier
from tierkv.types.tier_ops import OutcomeKind, Verb

KEYS = [make_key(number) for number in range(6)]
OK, ABSENT, FAILED, TIMED_OUT = OutcomeKind.OK, OutcomeKind.ABSENT, OutcomeKind.FAILED, OutcomeKind.TIMED_OUT


class SteppedTime:
    """Clock that advances with each sleep."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.naps: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now_s += seconds

    def tier(self, bench: Bench, attempts: int = 4, base_s: float = 1.0, most_s: float = 2.0) -> Tier:
        timing = Timing(lambda: self.now_s, self.sleep, random.Random(11))
        return bench.tier(retry=RetryLimits(attempts, base_s, most_s), timing=timing)


def unavailable() -> BackendError:
    """Return an error that may pass."""
    return BackendUnavailableError("try later")


def probe(tier: Tier, deadline_s: float = math.inf, count: int = 3) -> tuple[list[OutcomeKind], int]:
    """Probe keys; returns outcomes and retries."""
    outcomes, retries = tier.perform(Verb.PROBE, KEYS[:count], deadline_s=deadline_s)
    return [outcome.kind for outcome in outcomes], retries


@pytest.mark.parametrize("error", [unavailable, ConnectionResetError, TimeoutError])
def test_a_passing_failure_is_retried(bench: Bench, error: Callable[[], BaseException]) -> None:
    """A store that is busy for a moment must not cause a miss."""
    time = SteppedTime()
    bench.backend.add("contains", faults.raise_error(error), times=2)
    assert probe(time.tier(bench)) == ([ABSENT] * 3, 6)
    assert len(time.naps) == 2


@pytest.mark.parametrize("error", [lambda: BackendError("broken"), lambda: ValueError("bug"), SystemExit])
def test_a_lasting_failure_is_not_retried(bench: Bench, error: Callable[[], BaseException]) -> None:
    """A bug does not disappear by retrying."""
    time = SteppedTime()
    bench.backend.add("contains", faults.raise_error(error))
    assert probe(time.tier(bench)) == ([FAILED] * 3, 0)
    assert (time.naps, bench.backend.calls) == ([], ["contains"])


def test_attempts_are_bounded(bench: Bench) -> None:
    """Promise 6. The last error is reported."""
    bench.backend.add("contains", faults.raise_error(unavailable))
    assert probe(SteppedTime().tier(bench, attempts=4)) == ([FAILED] * 3, 9)
    assert bench.backend.calls == ["contains"] * 4


def test_only_failed_keys_are_retried(bench: Bench, compressible: Callable[..., bytes]) -> None:
    """Keys that were written are not written twice."""
    written: list[list[bytes]] = []

    def note(batch: Any, inner: Callable[[Any], Any]) -> object:
        written.append([request.key for request in batch])
        return inner(batch)

    bench.backend.add("write", note)
    bench.backend.add("write", faults.return_error(unavailable, index=1), times=1)
    refs = [bench.fill(number, KEYS[number], compressible(number)) for number in range(3)]
    outcomes, retries = SteppedTime().tier(bench).perform(Verb.WRITE, KEYS[:3], refs)
    assert ([outcome.kind for outcome in outcomes], retries) == ([OK] * 3, 1)
    assert written == [KEYS[:3], [KEYS[1]]]


def test_delays_have_full_jitter_and_a_ceiling(bench: Bench) -> None:
    """Clients that lost a tier together must not return together."""
    bench.backend.add("contains", faults.raise_error(unavailable))
    naps: list[list[float]] = [[], [], [], []]
    time = SteppedTime()
    tier = time.tier(bench, attempts=5, base_s=1.0, most_s=3.0)
    for _ in range(200):
        time.naps.clear()
        probe(tier, count=1)
        for series, nap in zip(naps, time.naps, strict=True):
            series.append(nap)
    for series, ceiling in zip(naps, (1.0, 2.0, 3.0, 3.0), strict=True):
        assert 0 <= min(series) < 0.1 * ceiling
        assert 0.9 * ceiling < max(series) <= ceiling


def test_no_try_starts_after_the_deadline(bench: Bench) -> None:
    """Its result would be dropped, and its slots are needed."""
    time = SteppedTime()
    bench.backend.add("contains", faults.raise_error(unavailable))
    kinds, _ = probe(time.tier(bench, attempts=50), deadline_s=103.0)
    assert kinds == [FAILED] * 3
    assert time.now_s < 103.0
    assert len(bench.backend.calls) < 50


def test_batches_stop_at_the_deadline(bench: Bench) -> None:
    """An operation of many batches ends soon after its deadline, not after its last batch."""
    time = SteppedTime()
    bench.backend.add("contains", faults.slow(2.0, time.sleep))
    assert probe(time.tier(bench), deadline_s=101.0, count=6) == ([ABSENT] * 4 + [TIMED_OUT] * 2, 0)
    assert probe(time.tier(bench), deadline_s=101.0) == ([TIMED_OUT] * 3, 0)
    assert bench.backend.calls == ["contains"]


def test_an_operation_without_keys_has_no_outcomes(bench: Bench) -> None:
    """Other tiers may have served all keys of a batch."""
    assert bench.tier().perform(Verb.PROBE, []) == OpResult([], 0)
    assert bench.backend.calls == []


@pytest.mark.parametrize("limits", [(0, 1.0, 1.0), (1, -1.0, 1.0), (1, 1.0, -1.0)])
def test_limits_are_checked(limits: tuple[int, float, float]) -> None:
    """With zero attempts every operation would time out."""
    with pytest.raises(ValueError, match="attempts must be"):
        RetryLimits(*limits)
