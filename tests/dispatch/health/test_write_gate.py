"""A tier whose writes fail while its reads succeed: it is read, and its writes are refused but for trials."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
from dispatch_bench import KEYS, dispatching, wait_for
from tier_bench import Bench, compressible

from tierkv.abc import Capabilities
from tierkv.dispatch import TierLimits
from tierkv.errors import OutOfSpaceError, PartUnavailableError
from tierkv.logs.stack_log import LOGGER
from tierkv.testing import faults
from tierkv.types.tier_ops import OutcomeKind, Verb

FAILED, REFUSED, OK = [OutcomeKind.FAILED], [OutcomeKind.REFUSED], [OutcomeKind.OK]
REASON = "3 operations in a row failed, the last with: OSError: gone"
LIMITS = TierLimits(breaker_failures=3, breaker_cooldown_s=10.0, trial_deadline_s=2.0)


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Log lines so far."""
    return [record.message for record in caplog.records if record.name == LOGGER]


def test_reads_do_not_hide_that_writes_fail(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that turned read-only is known as such although each read in between succeeds, and is still read."""
    with dispatching(bench, limits=LIMITS) as dispatch:
        assert dispatch.wait(dispatch.write(0, 0)) == [OK]
        rule = bench.backend.add("write", faults.raise_error(lambda: OSError("read-only")))
        for _ in range(3):
            assert dispatch.wait(dispatch.write(1, 1)) == [FAILED]
            bench.fill(0, KEYS[0], compressible(0))
            assert dispatch.wait(dispatch.submit(Verb.READ, [0], [2])) == [OK]
        assert dispatch.dispatcher.health()[0] == (True, False, False)
        for _ in range(20):
            assert dispatch.wait(dispatch.write(1, 1)) == [REFUSED]
        assert dispatch.wait(dispatch.submit(Verb.READ, [0], [2])) == [OK]
        assert dispatch.health() == [], "the tier itself stays in service"
        assert [line.partition("event=")[2] for line in lines_of(caplog)] == [
            'operation_failed tier=files verb=write chunks=1 reason="OSError: read-only" suppressed=0',
            'tier_not_writable tier=files reason="OSError: read-only" suppressed=0',
        ]

        for _ in range(4):  # trials, one per cooldown; they never take the tier out of service
            dispatch.clock.advance(10.0)
            assert dispatch.wait(dispatch.write(1, 1)) == [FAILED]
            assert dispatch.wait(dispatch.write(1, 1)) == [REFUSED]
        assert dispatch.health() == []
        assert len(lines_of(caplog)) == 2, "trials that fail are counted, not shown"

        bench.backend.rules.remove(rule)
        dispatch.clock.advance(10.0)
        assert dispatch.wait(dispatch.write(1, 1)) == [OK]
        assert dispatch.wait(dispatch.write(2, 2)) == [OK]
        assert dispatch.dispatcher.health()[0] == (True, True, False)
        assert lines_of(caplog)[2:] == [
            "tier can be written again: event=tier_writable tier=files seconds_out=50 suppressed=0"
        ]


def test_deletions_do_not_end_the_reads_of_a_tier_that_cannot_be_written(bench: Bench) -> None:
    """A disk that is read-only deletes nothing either; each failed write is followed by a deletion."""
    with dispatching(bench, limits=LIMITS) as dispatch:
        assert dispatch.wait(dispatch.write(0, 0)) == [OK]
        for verb in ("write", "delete"):
            bench.backend.add(verb, faults.raise_error(lambda: OSError("read-only")))
        for _ in range(3):
            assert dispatch.wait(dispatch.write(1, 1)) == [FAILED]
            assert dispatch.wait(dispatch.submit(Verb.PROBE, [0])) == [OK]
        assert dispatch.dispatcher.health()[0] == (True, False, False)
        for _ in range(10):
            assert dispatch.wait(dispatch.submit(Verb.DELETE, [1])) == [FAILED]
        assert dispatch.health() == [], "the tier stays in service"
        bench.fill(0, KEYS[0], compressible(0))
        assert dispatch.wait(dispatch.submit(Verb.READ, [0], [2])) == [OK]


@pytest.mark.parametrize(
    "between", [None, faults.raise_error(lambda: OutOfSpaceError("full"))], ids=["written", "no room"]
)
def test_single_failures_never_add_up(bench: Bench, between: Any) -> None:
    """A write that fails now and then, over a night, must not end the writes: an answer in between begins anew."""
    fails = faults.raise_error(lambda: OSError("a passing fault"))
    with dispatching(bench, limits=LIMITS) as dispatch:
        for number in range(4 * LIMITS.breaker_failures):
            result = between if number % 2 else fails
            rules = [bench.backend.add("write", result)] if result else []
            dispatch.wait(dispatch.write(1, 1))
            dispatch.wait(dispatch.submit(Verb.PROBE, [0]))
            for rule in rules:
                bench.backend.rules.remove(rule)
            assert dispatch.dispatcher.health()[0] == (True, True, False)


def test_a_trial_at_a_dead_server_of_several_opens_nothing(bench: Bench) -> None:
    """It shows nothing about the others, whose writes have failed: the next trial may meet one of them."""
    with dispatching(bench, limits=LIMITS) as dispatch:
        rule = bench.backend.add("write", faults.raise_error(lambda: OSError("read-only")))
        for _ in range(3):
            assert dispatch.wait(dispatch.write(1, 1)) == [FAILED]
            assert dispatch.wait(dispatch.submit(Verb.PROBE, [0])) == [[OutcomeKind.ABSENT]]
        bench.backend.rules.remove(rule)
        bench.backend.add("write", faults.raise_error(lambda: PartUnavailableError("dead")), times=1)
        dispatch.clock.advance(10.0)
        assert dispatch.wait(dispatch.write(1, 1)) == [FAILED]
        assert dispatch.wait(dispatch.write(1, 1)) == [REFUSED]
        dispatch.clock.advance(10.0)
        assert dispatch.wait(dispatch.write(1, 1)) == [OK]
        assert dispatch.dispatcher.health()[0] == (True, True, False)


def test_one_trial_at_a_time(bench: Bench) -> None:
    """A tier that cannot write costs one write per cooldown, however many are offered."""
    with dispatching(bench, limits=LIMITS) as dispatch:
        bench.backend.add("write", faults.raise_error(lambda: OSError("read-only")))
        for _ in range(3):
            dispatch.wait(dispatch.write(1, 1))
            dispatch.wait(dispatch.submit(Verb.PROBE, [0]))
        dispatch.clock.advance(10.0)
        outcomes = dispatch.wait(*[dispatch.write(number, number) for number in range(4)])
        assert sorted(map(str, outcomes)) == sorted(map(str, [FAILED, REFUSED, REFUSED, REFUSED]))


def test_a_trial_that_waits_too_long_is_followed_by_another(bench: Bench, gate: Event) -> None:
    """A trial misses its deadline behind a read that hangs: the tier stays in service, and a later write is the next
    trial. Without an end of the first one, no write would be accepted any more."""
    second, begun = Event(), list[object]()

    def waits(batch: Any, inner: Callable[[Any], Any]) -> object:
        begun.append(batch)
        (gate if len(begun) == 1 else second).wait()
        return inner(batch)

    tier = bench.tier(capabilities=Capabilities(preferred_concurrency=1))
    with dispatching(bench, tier, limits=LIMITS) as dispatch:
        rule = bench.backend.add("write", faults.raise_error(lambda: OSError("read-only")))
        for _ in range(3):
            assert dispatch.wait(dispatch.write(1, 1)) == [FAILED]
            dispatch.wait(dispatch.submit(Verb.PROBE, [0]))
        bench.backend.rules.remove(rule)
        bench.backend.add("read_into", waits)
        dispatch.clock.advance(10.0)
        reads = [dispatch.submit(Verb.READ, [number], [number], deadline_s=1e6) for number in (2, 3)]
        trial = dispatch.write(1, 1, deadline_s=5.0)
        wait_for(lambda: len(begun) == 1, "the first read")
        dispatch.clock.advance(3.0)
        gate.set()
        dispatch.wait(reads[0])
        wait_for(lambda: len(begun) == 2, "the second read")
        dispatch.clock.advance(4.0)
        dispatch.drain()
        assert not dispatch.completions(trial), "the queue moved since"
        dispatch.clock.advance(1.0)
        assert dispatch.wait(trial) == [[OutcomeKind.TIMED_OUT]]
        second.set()
        dispatch.wait(reads[1])
        assert dispatch.health() == []
        dispatch.clock.advance(10.0)
        assert dispatch.wait(dispatch.write(1, 1)) == [OK]


def test_a_tier_that_leaves_and_returns_is_logged_once_each(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """An operator learns of an outage from the log, in two lines."""
    with dispatching(bench, limits=LIMITS) as dispatch:
        caplog.set_level(logging.WARNING, LOGGER)
        rule = bench.backend.add("contains", faults.raise_error(lambda: OSError("gone")))
        dispatch.wait(*[dispatch.submit(Verb.PROBE, [1]) for _ in range(3)])
        dispatch.wait_health(False)
        assert dispatch.dispatcher.health()[0] == (False, False, False)
        bench.backend.rules.remove(rule)
        dispatch.clock.advance(10.0)
        dispatch.wait_health(False, True)
        assert [line.partition("event=")[2] for line in lines_of(caplog)] == [
            'operation_failed tier=files verb=probe chunks=1 reason="OSError: gone" suppressed=0',
            f'tier_out_of_service tier=files reason="{REASON}" suppressed=0',
            'tier_in_service tier=files reason="a trial was answered" seconds_out=10 suppressed=0',
        ]


def test_a_tier_that_never_has_room_is_not_writable(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """A full file system that takes nothing at all: health, metric and log say so, and each write is still tried, since
    the tier may evict. A tier that is only full for a moment stays writable."""
    with dispatching(bench, limits=LIMITS) as dispatch:

        def write(outcome: OutcomeKind, after_s: float) -> bool:
            dispatch.clock.advance(after_s)
            assert dispatch.wait(dispatch.write(1, 1)) == [[outcome]]
            return dispatch.dispatcher.health()[0].writable

        full = faults.raise_error(lambda: OutOfSpaceError("no room"))
        rule = bench.backend.add("write", full)
        assert [write(OutcomeKind.NO_SPACE, 0.1) for _ in range(9)] == [True] * 9
        bench.backend.rules.remove(rule)
        assert write(OutcomeKind.OK, 0.1)
        rule = bench.backend.add("write", full)
        assert [write(OutcomeKind.NO_SPACE, 0.5) for _ in range(4)] == [True, True, False, False]
        assert dispatch.dispatcher.health()[0].usable
        bench.backend.rules.remove(rule)
        assert write(OutcomeKind.OK, 0.1), "the next write is no trial: none was refused"
        assert [line.partition("event=")[2] for line in lines_of(caplog) if "writable" in line] == [
            'tier_not_writable tier=files reason="OutOfSpaceError: no room" suppressed=0',
            "tier_writable tier=files seconds_out=0.6 suppressed=0",
        ]


def test_a_tier_that_has_no_room_to_evict_is_not_writable(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """LMDB copies the pages that it changes: on a disk without a free block it deletes nothing, the tier waits for its
    evictions, and no write shows that it is full. Health said for ten seconds that it can be written."""
    with dispatching(bench, limits=LIMITS) as dispatch:

        def evict(outcome: OutcomeKind, after_s: float) -> bool:
            dispatch.clock.advance(after_s)
            assert dispatch.wait(dispatch.submit(Verb.DELETE, [1])) == [[outcome]]
            return dispatch.dispatcher.health()[0].writable

        assert dispatch.wait(dispatch.write(1, 1)) == [OK]
        rule = bench.backend.add("delete", faults.raise_error(lambda: OutOfSpaceError("no room")))
        assert [evict(OutcomeKind.NO_SPACE, 0.1) for _ in range(9)] == [True] * 9
        bench.backend.rules.remove(rule)
        assert evict(OutcomeKind.OK, 5.0)
        rule = bench.backend.add("delete", faults.raise_error(lambda: OutOfSpaceError("no room")))
        assert [evict(OutcomeKind.NO_SPACE, 0.5) for _ in range(4)] == [True, True, False, False]
        assert dispatch.dispatcher.health()[0].usable
        bench.backend.rules.remove(rule)
        assert dispatch.wait(dispatch.write(2, 2)) == [OK], "no write was refused"
        assert dispatch.dispatcher.health()[0].writable
        assert [line.partition("event=")[2] for line in lines_of(caplog) if "writable" in line] == [
            'tier_not_writable tier=files reason="OutOfSpaceError: no room" suppressed=0',
            "tier_writable tier=files seconds_out=0.5 suppressed=0",
        ]


def test_a_full_tier_whose_deletions_fail_is_not_writable(bench: Bench) -> None:
    """No write is submitted to a full tier that cannot evict, as on a disk that turned read-only. Its deletions show
    that nothing is written. They took the tier out of service, so that its chunks were misses for a moment."""
    with dispatching(bench, limits=LIMITS) as dispatch:
        rule = bench.backend.add("delete", faults.raise_error(lambda: OSError("read-only")))
        writable = []
        for _ in range(5):
            dispatch.clock.advance(0.4)
            assert dispatch.wait(dispatch.submit(Verb.DELETE, [1])) == [FAILED]
            writable.append(dispatch.dispatcher.health()[0].writable)
        assert writable == [True, True, True, False, False]
        assert dispatch.dispatcher.health()[0].usable
        bench.backend.rules.remove(rule)
        assert dispatch.wait(dispatch.write(2, 2)) == [OK]
        assert dispatch.dispatcher.health()[0].writable
