"""Log lines: one per event at first, later ones counted, and nothing in a value can break the line."""

from __future__ import annotations

import ast
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierkv.logs import definitions
from tierkv.logs.definitions import (
    EVENTS,
    LOOKUP_LATE,
    OPERATION_FAILED,
    PLUGIN_NOTE,
    TIER_EVICTS,
    TIER_IN_SERVICE,
    TIER_OUT_OF_SERVICE,
    LogEvent,
)
from tierkv.logs.stack_log import CHANGES_AT_ONCE, INTERVAL_MAX_S, KINDS_MAX, LOGGER, StackLog
from tierkv.testing.manual_clock import ManualClock

RESERVED = set(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


@pytest.fixture
def clock() -> ManualClock:
    """Clock of the log."""
    return ManualClock()


@pytest.fixture
def log(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> Iterator[StackLog]:
    """A log whose lines of every level are captured."""
    with caplog.at_level(logging.INFO, LOGGER):
        yield StackLog(clock, interval_s=60.0)


def suppressed(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int]]:
    """Event and number of suppressed ones of each line."""
    return [(record.event, record.suppressed) for record in caplog.records]  # type: ignore[attr-defined]


def test_a_line_has_its_fields_twice(log: StackLog, caplog: pytest.LogCaptureFixture) -> None:
    """A person reads the text, a program the attributes of the record; both have the same values."""
    log.report(OPERATION_FAILED, tier="disk", verb="read", chunks=3, reason="OSError: gone")
    (record,) = caplog.records
    assert record.getMessage() == (
        "operations of the backend failed; their chunks are misses: "
        'event=operation_failed tier=disk verb=read chunks=3 reason="OSError: gone" suppressed=0'
    )
    assert (record.name, record.levelname) == ("tierkv.stack", "WARNING")
    fields = {name: getattr(record, name) for name in ("event", *OPERATION_FAILED.fields, "suppressed")}
    assert fields == {
        "event": "operation_failed", "tier": "disk", "verb": "read", "chunks": 3, "reason": "OSError: gone",
        "suppressed": 0,
    }  # fmt: skip


def test_a_value_cannot_forge_a_line(log: StackLog, caplog: pytest.LogCaptureFixture) -> None:
    """Request ids and errors come from outside: breaks, quotes and escapes of a terminal stay inside of one value."""
    forged = 'a"\nevent=stack_closed\r\x1b[2J\u2028'
    log.report(LOOKUP_LATE, request=forged)
    text = caplog.records[0].getMessage()
    assert text.isprintable()
    assert json.loads(text.partition("request=")[2].rpartition(" suppressed=")[0]) == forged
    log.report(OPERATION_FAILED, tier="disk", reason="x" * 100_000)
    assert len(caplog.records[1].getMessage()) < 1000


def test_later_events_are_counted_and_then_shown(
    log: StackLog, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The first one at once; those of the next minute in one line, also if no further one happens."""
    for _ in range(1000):
        log.report(OPERATION_FAILED, tier="disk", reason="gone")
        log.report_suppressed()
        clock.advance(0.05)
    assert suppressed(caplog) == [("operation_failed", 0)]
    clock.advance(60.0)
    log.report_suppressed()
    log.report_suppressed()
    assert suppressed(caplog)[1:] == [("operation_failed", 998)]


def test_lines_become_rarer_while_an_event_goes_on(
    log: StackLog, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A tier without its key for a whole night costs some lines, not one per minute; every event is in their sum."""
    for _ in range(12 * 3600):
        log.report(OPERATION_FAILED, tier="disk", reason="no key")
        clock.advance(1.0)
    assert len(caplog.records) < 20
    counted = sum(count + 1 for _, count in suppressed(caplog))
    assert 12 * 3600 - counted <= INTERVAL_MAX_S
    clock.advance(2 * INTERVAL_MAX_S)
    log.report_suppressed()
    clock.advance(2 * INTERVAL_MAX_S)
    caplog.clear()
    for seconds in (0.0, 60.0, 60.0):  # quiet meanwhile: each is a fault of its own again
        clock.advance(seconds)
        log.report(OPERATION_FAILED, tier="disk", reason="no key")
    assert len(caplog.records) == 3


def test_kinds_do_not_hide_each_other(log: StackLog, caplog: pytest.LogCaptureFixture) -> None:
    """The first failure of each kind is shown: another tier, another verb, another event."""
    for _ in range(2):
        for tier in ("disk", "objects"):
            for verb in ("read", "write"):
                log.report(OPERATION_FAILED, kind=verb, tier=tier, verb=verb)
        log.report(LOOKUP_LATE, request="r")
    assert len(caplog.records) == 5


def flap(log: StackLog, clock: ManualClock, count: int) -> None:
    """Report that a tier is out of service and in service again, a second each."""
    for _ in range(count):
        log.report(TIER_OUT_OF_SERVICE, tier="disk", reason="gone")
        clock.advance(1.0)
        log.report(TIER_IN_SERVICE, tier="disk", reason="answered", seconds_out=1.0)
        clock.advance(1.0)


def test_outages_in_a_row_are_written_as_they_happen(
    log: StackLog, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The second outage within a minute was logged up to a minute late. A tier that flaps all night stays limited."""
    flap(log, clock, CHANGES_AT_ONCE)
    assert suppressed(caplog) == CHANGES_AT_ONCE * [("tier_out_of_service", 0), ("tier_in_service", 0)]
    for _ in range(4 * 3600):  # eight hours
        flap(log, clock, 1)
        log.report_suppressed()
    assert len(caplog.records) < 50
    clock.advance(60.0)
    log.report_suppressed()
    caplog.clear()
    clock.advance(CHANGES_AT_ONCE * 60.0)
    flap(log, clock, CHANGES_AT_ONCE)  # quiet meanwhile
    assert len(caplog.records) == 2 * CHANGES_AT_ONCE


def test_a_state_that_lasts_is_written_whatever_was_before(
    log: StackLog, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A tier flaps for hours, so that its lines are rare, and then stays out of service: no line may say otherwise."""
    for _ in range(3600):
        flap(log, clock, 1)
        log.report_suppressed()
    caplog.clear()
    log.report(TIER_OUT_OF_SERVICE, tier="disk", reason="gone")
    for _ in range(61):
        clock.advance(1.0)
        log.report_suppressed()
    assert caplog.records[-1].event == "tier_out_of_service"  # type: ignore[attr-defined]
    caplog.clear()
    log.report(TIER_IN_SERVICE, tier="disk", reason="answered")  # an hour later or at once: it is a change
    clock.advance(60.0)
    log.report_suppressed()
    assert [event for event, _ in suppressed(caplog)] == ["tier_in_service"]


def test_the_last_line_is_the_present_state(
    log: StackLog, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A tier that fails and returns every second must not be shown as out of service after it has returned."""
    flap(log, clock, CHANGES_AT_ONCE + 4)
    clock.advance(60.0)
    log.report_suppressed()
    assert suppressed(caplog)[2 * CHANGES_AT_ONCE :] == [("tier_out_of_service", 3), ("tier_in_service", 3)]
    assert caplog.records[-1].event == "tier_in_service"  # type: ignore[attr-defined]


def test_the_order_of_suppressed_lines_is_that_of_the_events(
    log: StackLog, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The kind that was seen first may be the one that happened last."""
    flap(log, clock, CHANGES_AT_ONCE)
    log.report(TIER_IN_SERVICE, tier="disk", reason="answered")
    log.report(TIER_OUT_OF_SERVICE, tier="disk", reason="gone")
    clock.advance(60.0)
    log.report_suppressed()
    assert [event for event, _ in suppressed(caplog)][-2:] == ["tier_in_service", "tier_out_of_service"]


def test_a_return_after_a_long_silence_comes_last(
    log: StackLog, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """An idle engine writes no late lines: its first step wrote that the tier returned, and then that it was out."""
    flap(log, clock, CHANGES_AT_ONCE)
    log.report(TIER_OUT_OF_SERVICE, tier="disk", reason="gone")
    clock.advance(600.0)
    log.report(TIER_IN_SERVICE, tier="disk", reason="answered")
    log.report_suppressed()
    assert [event for event, _ in suppressed(caplog)][-2:] == ["tier_out_of_service", "tier_in_service"]
    assert caplog.records[-2].seconds_ago == 600  # type: ignore[attr-defined]  # a field of the record


def test_a_full_cache_is_shown_once(log: StackLog, clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    """A cache that evicts is a cache: one line in its life."""
    for _ in range(5):
        log.report(TIER_EVICTS, tier="disk", chunks=7)
        clock.advance(10 * INTERVAL_MAX_S)
    log.report_suppressed(all_kinds=True)
    assert suppressed(caplog) == [("tier_evicts", 0)]


def test_nothing_that_was_suppressed_is_lost_at_the_end(log: StackLog, caplog: pytest.LogCaptureFixture) -> None:
    """A stack that closes within the interval still shows how often something happened."""
    for _ in range(10):
        log.report(LOOKUP_LATE, request="r")
    log.report_suppressed(all_kinds=True)
    assert suppressed(caplog) == [("lookup_late", 0), ("lookup_late", 8)]


def test_a_line_that_was_held_back_has_its_age(
    log: StackLog, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A tier failed and healed; hours later, the line at the end must not look like a failure at the end."""
    for _ in range(3):
        log.report(OPERATION_FAILED, tier="disk", reason="gone")
    clock.advance(40.0)
    log.report_suppressed(all_kinds=True)
    first, last = (record.getMessage() for record in caplog.records)
    assert "seconds_ago" not in first
    assert last.endswith(" seconds_ago=40 suppressed=1")
    assert caplog.records[1].seconds_ago == 40  # type: ignore[attr-defined]  # a field of the record
    for _ in range(2):
        log.report(LOOKUP_LATE, request="r")
    log.report_suppressed(all_kinds=True)
    assert "seconds_ago" not in caplog.records[-1].getMessage()


def test_memory_is_bounded(log: StackLog, clock: ManualClock, caplog: pytest.LogCaptureFixture) -> None:
    """Names of tiers may come from a program that attaches and detaches for ever."""
    for number in range(3 * KINDS_MAX):
        log.report(TIER_IN_SERVICE, tier=f"tier-{number}")
    assert len(log._kinds) == KINDS_MAX + 1
    assert len(caplog.records) == KINDS_MAX + CHANGES_AT_ONCE


def test_a_handler_that_raises_stops_nothing(log: StackLog) -> None:
    """A filter of the user raises into the caller, which is the engine's thread."""

    def raises(_record: logging.LogRecord) -> bool:
        raise RuntimeError("a filter with a fault")

    logger = logging.getLogger(LOGGER)
    logger.addFilter(raises)
    try:
        log.report(LOOKUP_LATE, request="r")
    finally:
        logger.removeFilter(raises)


def test_no_event_is_lost_between_threads(log: StackLog, caplog: pytest.LogCaptureFixture) -> None:
    """I/O threads and the engine's thread report at once."""

    def report() -> None:
        for _ in range(1000):
            log.report(LOOKUP_LATE, request="r")

    threads = [threading.Thread(target=report) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.report_suppressed(all_kinds=True)
    assert sum(count + 1 for _, count in suppressed(caplog)) == 4000


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_fields_fit_a_record(event: LogEvent) -> None:
    """A field with the name of an attribute of a record would raise at the moment of the fault."""
    assert not RESERVED & {"event", "suppressed", *event.fields}


def test_no_two_events_have_one_name() -> None:
    """An alert on a name would mean two things."""
    assert len({event.name for event in EVENTS}) == len(EVENTS)


def test_reports_have_the_fields_of_their_event(root: Path) -> None:
    """A line leaves out a field that its event lacks: a misspelt one was never seen again."""
    events = {name: event for name, event in vars(definitions).items() if isinstance(event, LogEvent)}
    lost = []
    for path in (*root.glob("tierkv/**/*.py"), *root.glob("plugins/*/src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Name):
                event = events.get(node.args[0].id, PLUGIN_NOTE)
                given = {word.arg for word in node.keywords if word.arg is not None} - {"kind"}
                if event is not PLUGIN_NOTE and not given <= set(event.fields):
                    lost.append(
                        f"{path.relative_to(root)}:{node.lineno}: {event.name} has no {given - {*event.fields}}"
                    )
    assert not lost, "\n".join(lost)
