"""A tier whose reads fail while all else succeeds: it is out of service, and a read ends that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from dispatch_bench import KEYS, DispatchBench, dispatching, wait_for
from tier_bench import Bench, compressible

from tierkv.dispatch import TierLimits
from tierkv.dispatch.health.failed_reads import TRIALS_MAX, TRIED_MAX, FailedReads
from tierkv.logs.stack_log import LOGGER
from tierkv.testing import faults
from tierkv.types.tier_ops import OutcomeKind, Verb

FAILED, OK = [OutcomeKind.FAILED], [OutcomeKind.OK]
REASON = "3 reads in a row failed, the last with: OSError: NOPERM"
LIMITS = TierLimits(breaker_failures=3, breaker_cooldown_s=10.0, trial_deadline_s=2.0)


def unreadable(*numbers: int) -> faults.Fault:
    """Let reads of some chunks fail."""

    def fault(batch: Sequence[Any], inner: faults.Inner) -> object:
        refused = [KEYS[number] for number in numbers]
        results = cast("Sequence[object]", inner(batch))
        return [
            OSError("EIO") if request.key in refused else result for request, result in zip(batch, results, strict=True)
        ]

    return fault


def read(dispatch: DispatchBench, number: int) -> list[OutcomeKind]:
    """Read chunk ``number``."""
    dispatch.bench.fill(0, KEYS[number], compressible(number))
    return dispatch.wait(dispatch.submit(Verb.READ, [number], [0]))[0]


def fail_reads(dispatch: DispatchBench, *numbers: int) -> None:
    """Let a read of each chunk fail, with a probe and a write in between that succeed."""
    for number in numbers:
        assert read(dispatch, number) == FAILED
        assert dispatch.wait(dispatch.submit(Verb.PROBE, [number]), dispatch.write(7, 7)) == [OK, OK]


def is_usable(dispatch: DispatchBench) -> bool:
    """Whether the tier is in service."""
    return dispatch.dispatcher.health()[0][0]


def end_trial(dispatch: DispatchBench) -> None:
    """Let the next trial begin and end."""
    dispatch.clock.advance(10.0)
    dispatch.drain()
    wait_for(lambda: dispatch.drain() == [] and dispatch.dispatcher.pending_trials() == 0, "the end of the trial")


def test_other_verbs_do_not_hide_that_reads_fail(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """An access list that refuses GET: each hit would be announced, and cost its request a wasted load. One line says
    that the tier has left, one that it is back, and trials that fail in between say nothing."""
    with dispatching(bench, limits=LIMITS) as dispatch:
        for number in range(4):
            assert dispatch.wait(dispatch.write(number, number)) == [OK]
        assert read(dispatch, 0) == OK
        rule = bench.backend.add("read_into", faults.raise_error(lambda: OSError("NOPERM")))
        fail_reads(dispatch, 1, 1)
        assert read(dispatch, 1) == FAILED
        dispatch.wait_health(False)
        assert dispatch.dispatcher.health()[0] == (False, False, False)
        for _ in range(3):
            end_trial(dispatch)
            assert dispatch.health() == [False], "only a read shows that reads succeed"

        bench.backend.rules.remove(rule)
        dispatch.clock.advance(10.0)
        dispatch.wait_health(False, True)
        assert read(dispatch, 1) == OK
        assert [record.message.partition("event=")[2] for record in caplog.records if record.name == LOGGER] == [
            'operation_failed tier=files verb=read chunks=1 reason="OSError: NOPERM" suppressed=0',
            f'tier_out_of_service tier=files reason="{REASON}" suppressed=0',
            'tier_in_service tier=files reason="a trial was answered" seconds_out=40 suppressed=0',
        ]


def test_chunks_that_are_never_readable_again_do_not_keep_it_out(bench: Bench) -> None:
    """A bad block of a disk: the trial reads chunks that were read or written lately, too."""
    with dispatching(bench, limits=LIMITS) as dispatch:
        for number in range(2):
            assert dispatch.wait(dispatch.write(number, number)) == [OK]
        bench.backend.add("read_into", unreadable(1))
        fail_reads(dispatch, 1, 1)
        assert read(dispatch, 1) == FAILED
        dispatch.wait_health(False)
        end_trial(dispatch)
        assert dispatch.health() == [False, True]
        assert read(dispatch, 0) == OK


def test_a_probe_ends_no_outage_that_began_with_reads_alone(bench: Bench) -> None:
    """With content that is known from a listing nothing is probed. A trial that probes would be answered."""
    with dispatching(bench, limits=LIMITS) as dispatch:
        assert dispatch.wait(dispatch.write(1, 1)) == [OK]
        rule = bench.backend.add("read_into", faults.raise_error(lambda: OSError("NOPERM")))
        assert [read(dispatch, 1) for _ in range(3)] == [FAILED] * 3
        dispatch.wait_health(False)
        end_trial(dispatch)
        assert not is_usable(dispatch)
        bench.backend.rules.remove(rule)
        end_trial(dispatch)
        assert is_usable(dispatch)


def test_a_trial_reads_a_few_chunks(bench: Bench) -> None:
    """It has the deadline of one read. With a chunk for each failure a slow server would never answer in time."""
    with dispatching(bench, limits=LIMITS) as dispatch:
        for number in range(8):
            assert dispatch.wait(dispatch.write(number, number)) == [OK]
        tried: list[int] = []
        bench.backend.add("read_into", lambda batch, _inner: tried.append(len(batch)) or [OSError("EIO")] * len(batch))
        assert [read(dispatch, number) for number in range(3)] == [FAILED] * 3
        tried.clear()
        end_trial(dispatch)
        assert sum(tried) == 2 * TRIED_MAX


def test_failed_reads_are_counted_anew_after_a_trial(bench: Bench) -> None:
    """One bad block after an outage must not begin the next one."""
    with dispatching(bench, limits=LIMITS) as dispatch:
        for number in range(2):
            assert dispatch.wait(dispatch.write(number, number)) == [OK]
        bench.backend.add("read_into", unreadable(1))
        assert [read(dispatch, 1) for _ in range(3)] == [FAILED] * 3
        end_trial(dispatch)
        assert [read(dispatch, 1) for _ in range(2)] == [FAILED] * 2
        assert is_usable(dispatch)


def test_a_read_between_others_that_fail_keeps_it_in_service(bench: Bench) -> None:
    """Some chunks that cannot be read are misses. The others are read."""
    with dispatching(bench, limits=LIMITS) as dispatch:
        for number in range(2):
            assert dispatch.wait(dispatch.write(number, number)) == [OK]
        bench.backend.add("read_into", unreadable(1))
        for _ in range(3):
            fail_reads(dispatch, 1, 1)
            assert read(dispatch, 0) == OK
        assert dispatch.health() == []


def test_absent_chunks_end_no_outage_while_others_fail(bench: Bench) -> None:
    """Chunks that were evicted meanwhile are absent without a read. If all are, nothing shows that reads fail."""
    with dispatching(bench, limits=LIMITS) as dispatch:
        for number in range(3):
            assert dispatch.wait(dispatch.write(number, number)) == [OK]
        rule = bench.backend.add("read_into", unreadable(0, 1, 2, 7))
        fail_reads(dispatch, 1, 2)
        assert read(dispatch, 0) == FAILED
        dispatch.wait_health(False)
        bench.backend.rules.remove(rule)
        bench.backend.add("read_into", unreadable(0, 7))
        for number in (1, 2):
            bench.file(KEYS[number]).unlink()
        end_trial(dispatch)
        assert dispatch.health() == [False]
        bench.backend.rules.clear()
        for number in (0, 7):
            bench.file(KEYS[number]).unlink()
        end_trial(dispatch)
        assert dispatch.health() == [False, True]


def test_a_new_process_that_knows_no_other_chunk_tries_again(bench: Bench) -> None:
    """All chunks that it has read are lost, and others are not: a read of a request is risked, one and not three."""
    with dispatching(bench, limits=LIMITS) as dispatch:
        for number in range(2):
            assert dispatch.wait(dispatch.write(number, number)) == [OK]
    with dispatching(bench, limits=LIMITS) as dispatch:
        bench.backend.add("read_into", unreadable(1))
        for failures in (3, 1):
            for _ in range(failures):
                dispatch.wait(dispatch.submit(Verb.PROBE, [0]))
                assert read(dispatch, 1) == FAILED
            wait_for(lambda: dispatch.drain() == [] and not is_usable(dispatch), "the outage")
            for _ in range(TRIALS_MAX):
                end_trial(dispatch)
                assert not is_usable(dispatch)
            end_trial(dispatch)
            assert is_usable(dispatch)
        assert read(dispatch, 0) == OK
        dispatch.wait(dispatch.submit(Verb.PROBE, [0]))
        assert read(dispatch, 1) == FAILED
        assert is_usable(dispatch)


def test_a_trial_reads_what_was_read_before() -> None:
    """Chunks that can never be read again must not keep the tier out: others that were read are tried beside them."""
    reads = FailedReads(3)
    reads.answered(KEYS[0])
    for number in (1, 2, 3):
        reads.failed(KEYS[number], 1.0)
    assert reads.are_too_many
    assert reads.trial_keys() == (KEYS[2], KEYS[3], KEYS[0])
