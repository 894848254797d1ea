"""Log lines about load: an operator learns why hits are lost, and the log stays short."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from calls import calls_of
from stack_bed import Faults, opened, prompts_of, serve, stack_config

from tierkv.logs.stack_log import INTERVAL_S, StackLog
from tierkv.metrics.counters import CoreCounters
from tierkv.metrics.watched import WaitingRequests
from tierkv.scheduler.lookup.read_ahead import CREDIT_CHUNKS, READS_PER_UNUSED
from tierkv.stack.counter_watch import CounterWatch
from tierkv.testing.faults import hang_until
from tierkv.testing.manual_clock import ManualClock

Expected = Callable[..., list[list[int]]]


def test_late_lookups_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """A hung tier makes every lookup late: one line a minute names a request, and counts the others."""
    counters, clock = CoreCounters(), ManualClock()
    watch = CounterWatch(counters, StackLog(clock), busy=lambda: ["disk", "objects"])
    watch.answered("none", 0)
    assert not caplog.records
    for number in range(5):
        counters.deadlines_expired += 1
        watch.answered(f"r{number}", number)
        clock.advance(1.0)
    counters.deadlines_expired += 1
    clock.advance(INTERVAL_S)
    watch.answered("r5", 5)
    assert [record.getMessage().partition("event=")[2] for record in caplog.records] == [
        "lookup_late request=r0 tiers=disk,objects suppressed=0",
        "lookup_late request=r5 tiers=disk,objects suppressed=4",
    ]


def test_the_end_of_reading_ahead_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """It stops when too many reads were for nothing: one line when it stops, and again after it went on."""
    counters, clock = CoreCounters(), ManualClock()
    watch = CounterWatch(counters, StackLog(clock))

    def lines_after(unused: int, promoted: int = 0) -> list[str]:
        caplog.clear()
        clock.advance(INTERVAL_S)  # so that no line is suppressed
        counters.chunks_read_in_vain, counters.promotions["disk"] = unused, promoted
        watch.look()
        return [record.getMessage().partition("event=")[2] for record in caplog.records]

    enough = CREDIT_CHUNKS // READS_PER_UNUSED + 1
    assert not lines_after(enough - 1), "reading ahead goes on"
    assert lines_after(enough) == [f"read_ahead_stopped chunks={enough} one_in={READS_PER_UNUSED} suppressed=0"]
    assert not lines_after(enough + 1), "it has stopped already"
    assert not lines_after(enough + 1, promoted=10 * READS_PER_UNUSED), "it goes on"
    more = enough + 20
    assert lines_after(more, promoted=10 * READS_PER_UNUSED) == [
        f"read_ahead_stopped chunks={more} one_in={READS_PER_UNUSED} suppressed=0"
    ]


@pytest.mark.needs_torch
def test_a_stack_logs_a_late_lookup(
    tmp_path: Path, faults: Faults, expected: Expected, caplog: pytest.LogCaptureFixture
) -> None:
    """Reads hang: the lookups of three prompts are late, and the log has one line for them."""
    prompts = prompts_of(11, 3)
    release = threading.Event()
    tier = {"backend": "faulty", "path": str(tmp_path / "disk"), "capacity": "8MiB", "min_free_bytes": 0}
    config = stack_config(tmp_path, lookup={"deadline_s": 0.2}, tiers=[{**tier, "read_deadline_s": 30.0}])
    with opened(config, plugins=faults.registry()) as stack:
        serve(stack, prompts)
        assert not caplog.records
    try:
        with opened(config, plugins=faults.registry()) as stack:
            faults.last.add("read_into", hang_until(release))
            assert serve(stack, prompts) == expected(prompts)
            assert stack.metrics.counters.deadlines_expired > 0
            (line,) = (record.getMessage() for record in caplog.records if "event=lookup_late" in record.getMessage())
            assert " tiers=faulty suppressed=" in line
            release.set()
    finally:
        release.set()


def test_requests_that_wait_for_long_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """They are late, counted or failed nowhere: a line says how many wait, what for, and since when."""
    clock, waits = ManualClock(), [WaitingRequests(2, 0, 4.9)]
    watch = CounterWatch(CoreCounters(), StackLog(clock), lambda: waits[-1])
    watch.look()
    assert not caplog.records, "a queue alone is no reason for a line"
    waits.append(WaitingRequests(0, 7, 5.0))
    watch.look()
    waits.append(WaitingRequests(0, 9, 8.0))
    for _ in range(3):
        clock.advance(1.0)
        watch.look()
    clock.advance(INTERVAL_S)
    waits.append(WaitingRequests())
    watch.look()
    first, second = (record.getMessage().partition("event=")[2] for record in caplog.records)
    assert first == "requests_wait slots=0 first_reads=7 age_s=5 suppressed=0"
    assert second.startswith("requests_wait slots=0 first_reads=9 age_s=8")


def test_a_look_takes_calls_for_counters_that_have_counted() -> None:
    """A busy engine looks once a second, in a step: most watched counters are zero for ever."""
    counters = CoreCounters()
    watch = CounterWatch(counters, StackLog(ManualClock()))
    watch.look()
    assert calls_of(watch.look) <= 12


def test_the_end_of_a_stack_reports_what_is_suppressed(caplog: pytest.LogCaptureFixture) -> None:
    """The faults of a stack's last minute would be in no line: nothing is logged after its end."""
    counters, clock = CoreCounters(), ManualClock()
    watch = CounterWatch(counters, StackLog(clock))
    for number in range(4):
        counters.deadlines_expired += 1
        watch.answered(f"r{number}", number)
    caplog.clear()
    watch.closed(watch.written_and_lost(), 0, 0.1, complete=True)
    (late,) = [record.getMessage().partition("event=")[2] for record in caplog.records]
    assert late == 'lookup_late request=r3 tiers="" suppressed=2'
