"""Log lines of whole stacks over real tiers: what an operator reads in the morning about the night before."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stack_bed import Faults, opened, prompts_of, serve, stack_config

import tierkv
from tierkv import EngineSpec, GroupSpec
from tierkv.logs.stack_log import LOGGER
from tierkv.stack.counter_watch import CounterWatch
from tierkv.stack.stack import Stack
from tierkv.testing.faults import raise_error

pytestmark = pytest.mark.needs_torch
Expected = Callable[..., list[list[int]]]
PROMPTS = prompts_of(5, 2)
SPEC = EngineSpec("m", "float32", (GroupSpec(16, (4096,)),), 16)
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, LOGGER):
        yield


def config_of(place: Path, **changes: Any) -> dict[str, Any]:
    """A host tier and a disk that tries again soon."""
    tier = {
        "backend": "disk", "path": str(place / "disk"), "capacity": "8MiB", "min_free_bytes": 0,
        "breaker_failures": 2, "breaker_cooldown_s": 0.05, "retries": 0,
    }  # fmt: skip
    return stack_config(place, tiers=[{**tier, **changes}])


def lines(caplog: pytest.LogCaptureFixture, *events: str) -> list[logging.LogRecord]:
    """Lines so far; of some events, if any are named."""
    own = [record for record in caplog.records if record.name == LOGGER]
    return [record for record in own if not events or record.event in events]  # type: ignore[attr-defined]


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Names of the events of all lines so far."""
    return [record.event for record in lines(caplog)]  # type: ignore[attr-defined]


def step_until(stack: Stack, condition: Callable[[], bool]) -> None:
    """Serve new prompts until the log shows something."""
    give_up_s, seed = time.monotonic() + WAIT_S, 1000
    while not condition():
        assert time.monotonic() < give_up_s
        serve(stack, prompts_of(seed, 1, shared=0))
        stack.flush(1.0)
        seed += 1


def test_start_and_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A stack says what it found, and whether everything reached its tiers; nothing else in a quiet life."""
    for _ in range(2):
        caplog.clear()
        with opened(config_of(tmp_path)) as stack:
            serve(stack, PROMPTS)
            assert stack.close()
        assert events(caplog) == ["tier_opened", "stack_opened", "stack_closed"]
    found, whole, closed = lines(caplog)
    assert (found.tier, found.backend, found.capacity_bytes) == ("disk", "disk", 8 << 20)  # type: ignore[attr-defined]
    assert found.chunks >= 11  # type: ignore[attr-defined]
    assert found.held_bytes >= 11 * 12 * 1024  # type: ignore[attr-defined]
    assert (whole.chunks, whole.tiers) == (found.chunks, "host,disk")  # type: ignore[attr-defined]
    assert (whole.version, whole.namespace) == (tierkv.__version__, stack.namespace.fingerprint().hex())  # type: ignore[attr-defined]
    assert (closed.written, closed.dropped) == (0, 0)  # type: ignore[attr-defined]
    assert closed.levelno == logging.INFO


def test_a_stop_with_loss(tmp_path: Path, faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    """A stop that loses chunks is a warning with their number."""
    config = config_of(tmp_path, backend="faulty", name="disk", write="back")
    with opened(config, plugins=faults.registry()) as stack:
        serve(stack, PROMPTS)
        faults.last.add("write", raise_error(lambda: OSError(errno.EIO, "worn out")))
        assert not stack.close()
    (closed,) = lines(caplog, "stack_closed_with_loss")
    assert closed.levelno == logging.WARNING
    assert closed.dropped >= 11  # type: ignore[attr-defined]
    assert "operation_failed" in events(caplog)
    assert stack.close() is False
    assert len(lines(caplog, "stack_closed_with_loss")) == 1, "a second close is none"


def test_a_disk_that_turned_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A real disk whose file system refuses writes: the first failure, the state, and its end. Few lines."""
    write, create = os.pwrite, os.open

    def refuse(*_arguments: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def refuse_new(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        return refuse() if flags & os.O_CREAT else create(path, flags, *arguments, **options)

    with opened(config_of(tmp_path)) as stack:
        serve(stack, PROMPTS)
        assert stack.flush()
        with monkeypatch.context() as patch:
            for name in ("pwrite", "pwritev"):
                patch.setattr(os, name, refuse)
            patch.setattr(os, "open", refuse_new)
            step_until(stack, lambda: bool(lines(caplog, "tier_not_writable")))
            assert not stack.tiers.health()["disk"].writable, "whether it is read depends on the reads in between"
        assert os.pwrite is write
        step_until(stack, lambda: bool(lines(caplog, "tier_writable")))
        assert stack.tiers.health()["disk"] == (True, True, False)
    (failed,) = [record for record in lines(caplog, "operation_failed") if record.verb == "write"][:1]  # type: ignore[attr-defined]
    assert "Read-only file system" in failed.getMessage()
    (back,) = lines(caplog, "tier_writable")
    assert back.seconds_out > 0  # type: ignore[attr-defined]
    assert len(lines(caplog)) < 12


def test_damaged_frames(tmp_path: Path, expected: Expected, caplog: pytest.LogCaptureFixture) -> None:
    """Every frame of a real disk is damaged: the engine answers as ever, and the log has one line for the first."""
    with opened(config_of(tmp_path)) as stack:
        serve(stack, PROMPTS)
        assert stack.close()
    for segment in (tmp_path / "disk").rglob("segment-*"):
        content = bytearray(segment.read_bytes())
        for start in range(0, len(content), 4096):
            content[start + 1024] ^= 0xFF
        segment.write_bytes(content)
    caplog.clear()
    with opened(config_of(tmp_path)) as stack:
        assert serve(stack, PROMPTS) == expected(PROMPTS)
        damaged = stack.tiers.stats()["disk"]["corrupt"]
        assert damaged > 0
        assert len(lines(caplog, "frame_damaged")) == 1
    first = lines(caplog, "frame_damaged")[0]
    assert first.levelno == logging.WARNING
    assert "CorruptFrameError: frame field" in first.getMessage()


def test_a_removed_directory(tmp_path: Path, expected: Expected, caplog: pytest.LogCaptureFixture) -> None:
    """A directory that is deleted under a running stack: the engine serves, and the log says once what was done."""
    with opened(config_of(tmp_path)) as stack:
        serve(stack, PROMPTS)
        assert stack.flush()
        shutil.rmtree(tmp_path / "disk")
        step_until(stack, lambda: "was begun again, empty" in caplog.text)
        assert serve(stack, PROMPTS) == expected(PROMPTS)
    assert caplog.text.count("was begun again, empty") == 1
    assert caplog.text.count("removed or replaced") > 0
    assert len(lines(caplog)) < 12


def test_a_tier_that_is_gone_for_a_while(tmp_path: Path, faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    """Out and in again: two lines, the second with the seconds between them."""
    with opened(config_of(tmp_path, backend="faulty", name="disk"), plugins=faults.registry()) as stack:
        serve(stack, PROMPTS)
        assert stack.flush()
        rules = [faults.last.add(verb, raise_error(lambda: OSError("gone"))) for verb in ("read_into", "write")]
        rules.append(faults.last.add("contains", raise_error(lambda: OSError("gone"))))
        stack.reset_cache()
        step_until(stack, lambda: bool(lines(caplog, "tier_out_of_service")))
        for rule in rules:
            faults.last.rules.remove(rule)
        step_until(stack, lambda: bool(lines(caplog, "tier_in_service")))
    (back,) = lines(caplog, "tier_in_service")[:1]
    assert back.seconds_out > 0  # type: ignore[attr-defined]


def test_a_cache_that_fills_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tier that begins to evict is shown once, as information; a host tier too."""
    with opened(config_of(tmp_path, capacity="512KiB")) as stack:
        for seed in range(6):
            serve(stack, prompts_of(seed, 3, shared=0))
    shown = [record.tier for record in lines(caplog, "tier_evicts")]  # type: ignore[attr-defined]
    assert sorted(shown) == ["disk", "host"]


def test_attach_and_detach(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Changes of a running stack are in the log, with what was found."""
    (table,) = config_of(tmp_path)["tiers"]
    with opened({**config_of(tmp_path), "tiers": []}) as stack:
        stack.tiers.attach(table)
        serve(stack, PROMPTS)
        assert stack.flush()
        stack.tiers.detach("disk")
        step_until(stack, lambda: bool(lines(caplog, "tier_detached")))
    assert events(caplog) == ["stack_opened", "tier_attached", "tier_detached", "stack_closed"]


def test_the_interval_is_configured(tmp_path: Path, faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    """``log.interval_s`` is the limit with a name and a unit; 0 shows every event."""
    config = {**config_of(tmp_path, backend="faulty", name="disk", breaker_failures=100), "log": {"interval_s": 0}}
    with opened(config, plugins=faults.registry()) as stack:
        faults.last.add("write", raise_error(lambda: OSError("worn out")))
        for seed in range(5):
            serve(stack, prompts_of(seed, 1, shared=0))
            stack.flush(1.0)
    assert len(lines(caplog, "operation_failed")) >= 5


def test_an_idle_step_looks_at_no_counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters are read once a second, however many steps an engine makes."""
    looks: list[None] = []
    monkeypatch.setattr(CounterWatch, "look", lambda _self: looks.append(None))
    with tierkv.open_stack({"host": {"capacity": "1MiB"}}, SPEC) as stack:
        began_s = time.monotonic()
        for _ in range(500):
            stack.build_connector_meta(tierkv.StepOutput())
        assert 1 <= len(looks) <= time.monotonic() - began_s + 2
