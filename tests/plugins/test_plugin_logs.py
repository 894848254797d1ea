"""Lines of plugins have fields, as those of the stack: a program that collects logs finds the tier of each."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tierkv import open_stack
from tierkv.abc.logs import EVENT, lines_of_tier, plugin_logger
from tierkv.logs.stack_log import CHANGES_AT_ONCE, StackLog
from tierkv.testing.engines.hand_engine import SLOT_BYTES, HandEngine, Prompt, engine_spec
from tierkv.testing.manual_clock import ManualClock

ROOT = Path(__file__).resolve().parents[2]


def config_of(place: Path) -> dict[str, Any]:
    """A host tier over two disks with names of their own."""
    tier = {"backend": "disk", "capacity": "4MiB", "min_free_bytes": 0, "segment_bytes": "1MiB", "retries": 0}
    tiers = [{**tier, "name": name, "path": str(place / name)} for name in ("near", "far")]
    return {"host": {"capacity": 16 * SLOT_BYTES}, "lookup": {"recompute": "off"}, "tiers": tiers}


def test_a_line_at_open_names_its_tier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A lost index is found when the tier is opened: of which one, a reader need not guess from a path."""
    with open_stack(config_of(tmp_path), engine_spec()) as stack:
        HandEngine(stack).store(Prompt(1))
    for log in (tmp_path / "far").rglob("index.log"):
        log.write_bytes(b"")
    caplog.clear()
    with open_stack(config_of(tmp_path), engine_spec()):
        pass
    lines = [record for record in caplog.records if record.name == "tierkv_disk"]
    assert lines
    assert {(record.event, record.tier) for record in lines} == {(EVENT, "far")}  # type: ignore[attr-defined]
    assert all(record.getMessage().endswith(": event=plugin_note tier=far suppressed=0") for record in lines)


def test_a_line_of_an_operation_names_its_tier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Threads of two tiers write at once: each line has the tier whose call it is about."""
    with open_stack(config_of(tmp_path), engine_spec()) as stack:
        engine = HandEngine(stack)
        engine.store(Prompt(1))
        stack.flush()
        shutil.rmtree(tmp_path / "near")
        number = 1
        while not any(record.name == "tierkv_disk" for record in caplog.records):
            number += 1
            engine.store(Prompt(number))
            stack.flush(1.0)
        lines = [record for record in caplog.records if record.name == "tierkv_disk"]
        assert {record.tier for record in lines} == {"near"}  # type: ignore[attr-defined]


def test_the_text_stays_a_format(caplog: pytest.LogCaptureFixture) -> None:
    """A per cent sign in the name of a tier breaks no line, with arguments or without; a tier may be missing, too."""
    logger = plugin_logger("a_plugin")
    with lines_of_tier("100%d"):
        logger.warning("%d chunks", 3)
        logger.warning("none")
    logger.warning("no tier", extra={"path": "p"})
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        "3 chunks: event=plugin_note tier=100_d",
        "none: event=plugin_note tier=100_d",
        "no tier: event=plugin_note",
    ]
    assert caplog.records[-1].path == "p"  # type: ignore[attr-defined]
    assert caplog.records[0].levelno == logging.WARNING


def test_lines_of_one_format_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    """A disk that fails one write in forty wrote five such lines in each second, all night."""
    clock, logger = ManualClock(), plugin_logger("a_plugin")
    log = StackLog(clock)
    for number in range(1000):
        with lines_of_tier("disk", log.note):
            logger.warning("%d is away", number)
            logger.warning("%d is back", number)
        clock.advance(0.02)
        log.report_suppressed()
    assert len(caplog.records) == 2 * CHANGES_AT_ONCE
    clock.advance(60.0)
    log.report_suppressed()
    last = caplog.records[-1]
    assert last.getMessage() == "999 is back: event=plugin_note tier=disk seconds_ago=60 suppressed=995"
    assert (last.name, last.tier, last.suppressed) == ("a_plugin", "disk", 995)  # type: ignore[attr-defined]
    with lines_of_tier("disk", log.note):
        logger.info("nobody listens")
        logger.warning("another line")
    assert caplog.records[-1].getMessage() == "another line: event=plugin_note tier=disk suppressed=0"


def test_a_line_that_is_held_back_keeps_its_error(caplog: pytest.LogCaptureFixture) -> None:
    """The error that is being handled is another one, or none, when the line is written."""
    clock, logger = ManualClock(), plugin_logger("a_plugin")
    log = StackLog(clock)
    for _ in range(CHANGES_AT_ONCE + 1):
        try:
            Path("/nowhere/at-all").read_bytes()
        except OSError:
            with lines_of_tier("disk", log.note):
                logger.exception("failed")
    log.report_suppressed(all_kinds=True)
    assert len(caplog.records) == CHANGES_AT_ONCE + 1
    assert all(record.exc_info and isinstance(record.exc_info[1], OSError) for record in caplog.records)


def test_every_plugin_of_the_project_uses_it() -> None:
    """A line without fields is lost to the program that looks for its tier."""
    sources = [path for path in ROOT.glob("plugins/*/src/**/*.py") if "getLogger(" in path.read_text(encoding="utf-8")]
    assert not sources
    used = [
        path for path in ROOT.glob("plugins/*/src/**/*.py") if re.search(r"\bplugin_logger\(", path.read_text("utf-8"))
    ]
    assert len(used) > 10
