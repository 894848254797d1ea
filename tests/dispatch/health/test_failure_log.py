"""Log lines about operations: the first failure of each kind is shown, the others are counted."""

from __future__ import annotations

import logging
from collections import Counter
from threading import Event

import pytest
from dispatch_bench import KEYS, dispatching, wait_for
from tier_bench import Bench, compressible

from tierkv.abc import Capabilities
from tierkv.dispatch import TierLimits
from tierkv.errors import OutOfSpaceError
from tierkv.frames.frame import HEADER_BYTES
from tierkv.logs.stack_log import LOGGER
from tierkv.testing import faults
from tierkv.types.tier_ops import OutcomeKind, Verb

PATIENT = TierLimits(breaker_failures=1000)


def shown(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Event and verb of each line."""
    return [
        " ".join([record.event, getattr(record, "verb", "")]).strip()  # type: ignore[attr-defined]
        for record in caplog.records
        if record.name == LOGGER
    ]


def test_the_first_failure_of_each_kind_is_shown(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """A device that fails reads, one that fails writes, and one that is full need different people."""
    with dispatching(bench, limits=PATIENT) as dispatch:
        dispatch.wait(dispatch.write(0, 0))
        bench.backend.add("read_into", faults.raise_error(lambda: OSError("worn out")))
        bench.backend.add("contains", faults.raise_error(lambda: OSError("worn out")))
        rule = bench.backend.add("write", faults.raise_error(lambda: OSError("worn out")))
        for _ in range(5):
            dispatch.wait(dispatch.submit(Verb.READ, [0], [1]), dispatch.submit(Verb.PROBE, [0]), dispatch.write(1, 2))
        bench.backend.rules.remove(rule)
        bench.backend.add("write", faults.raise_error(lambda: OutOfSpaceError("no room")))
        for _ in range(5):
            dispatch.wait(dispatch.write(1, 2))
    assert Counter(shown(caplog)) == Counter(
        ["operation_failed read", "operation_failed probe", "operation_failed write", "tier_full"]
    )
    assert 'reason="OSError: worn out"' in caplog.records[0].getMessage()


def test_one_fault_that_a_retry_heals_is_not_shown(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """A lost connection that a second try repairs concerns no operator; the counter of retries has it."""
    from tierkv.tiers.retry import RetryLimits, Timing  # noqa: PLC0415 - used once

    tier = bench.tier(retry=RetryLimits(attempts=3), timing=Timing(bench.clock, sleep=lambda _: None))
    with dispatching(bench, tier) as dispatch:
        bench.backend.add("write", faults.raise_error(lambda: ConnectionError("reset")), times=1)
        assert dispatch.wait(dispatch.write(0, 0)) == [[OutcomeKind.OK]]
        assert dispatch.dispatcher.stats.tiers[0].retries == 1
    assert shown(caplog) == []


def test_damaged_frames_are_shown(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Real files with a flipped byte: one line for the first, and a number for the others."""
    with dispatching(bench) as dispatch:
        for number in range(3):
            dispatch.wait(dispatch.write(number, number))
            file = bench.file(KEYS[number])
            damaged = bytearray(file.read_bytes())
            damaged[HEADER_BYTES] ^= 1
            file.write_bytes(damaged)
        for number in range(3):  # one after the other: they read into one slot
            assert dispatch.wait(dispatch.submit(Verb.READ, [number], [3])) == [[OutcomeKind.CORRUPT]]
    (record,) = [record for record in caplog.records if record.name == LOGGER]
    assert record.getMessage().startswith("damaged frames were refused; their chunks are misses: event=frame_damaged")
    assert "checksum" in record.getMessage()


def test_a_missed_deadline_is_shown(bench: Bench, gate: Event, caplog: pytest.LogCaptureFixture) -> None:
    """A device that hangs raises nothing; the line names the verb and the seconds."""
    with dispatching(bench, limits=PATIENT) as dispatch:
        bench.backend.add("write", faults.hang_until(gate))
        number = dispatch.write(0, 0, deadline_s=2.0)
        wait_for(lambda: bool(bench.backend.calls), "the call")
        dispatch.clock.advance(3.0)
        dispatch.drain()
        gate.set()
        dispatch.wait(number)
    assert [record.getMessage().partition("event=")[2] for record in caplog.records] == [
        "deadline_missed tier=files verb=write chunks=1 deadline_s=2 suppressed=0"
    ]


def test_what_is_given_up_with_a_tier_is_no_missed_deadline(
    bench: Bench, gate: Event, caplog: pytest.LogCaptureFixture
) -> None:
    """The tier goes out of service in silence, and a probe of the same moment ends with it: the line about the tier
    says why. The probe was shown as a deadline of 0.01 s."""
    tier = bench.tier(capabilities=Capabilities(preferred_concurrency=1))
    with dispatching(bench, tier, limits=TierLimits(breaker_failures=3)) as dispatch:
        bench.backend.add("read_into", faults.hang_until(gate))
        hung = dispatch.submit(Verb.READ, [0], [0], deadline_s=2.0)
        wait_for(lambda: bool(bench.backend.calls), "the call")
        dispatch.clock.advance(2.0)
        given_up = dispatch.submit(Verb.PROBE, [1], deadline_s=2.0)
        dispatch.drain()
        assert [report.ended for report in dispatch.completions(given_up)] == [True]
        gate.set()
        dispatch.wait(hung)
    assert shown(caplog) == ["deadline_missed read", "tier_out_of_service"]


def test_a_full_queue_is_shown_and_a_detach_is_not(bench: Bench, gate: Event, caplog: pytest.LogCaptureFixture) -> None:
    """Overload is the operator's business; refusals that follow from a known cause are not."""
    with dispatching(bench, limits=TierLimits(queue_ops_max=1, io_threads=1)) as dispatch:
        bench.backend.add("write", faults.hang_until(gate))
        numbers = [dispatch.write(0, 0) for _ in range(8)]
        assert shown(caplog) == ["queue_full write"]
        gate.set()
        dispatch.wait(*numbers)
        dispatch.dispatcher.detach(0, 1.0)
        bench.fill(0, KEYS[0], compressible(0))
        assert dispatch.wait(dispatch.submit(Verb.WRITE, [0], [0])) == [[OutcomeKind.REFUSED]]
    assert shown(caplog) == ["queue_full write"]


def test_a_backend_that_cannot_be_closed_is_shown(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Its locks may stay, and its last writes may be lost."""
    with caplog.at_level(logging.INFO, LOGGER), dispatching(bench) as dispatch:
        bench.backend.add("close", faults.raise_error(lambda: OSError("disk gone")))
        dispatch.dispatcher.close(1.0)
    assert [record.getMessage().partition("event=")[2] for record in caplog.records] == [
        'tier_not_closed tier=files reason="OSError: disk gone" suppressed=0'
    ]
