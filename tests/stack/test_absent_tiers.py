"""Tiers that could not be opened with their stack: opened side by side, tried again, in service when they open."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from panics import Panic
from stack_bed import opened, prompts_of, serve, stack_config
from unopened_disks import PATIENCE_S, HangingDisk, Open, RefusingDisk, registry_with

import tierkv
from tierkv.abc import BackendContext
from tierkv.dispatch.threads.runtime import Runtime
from tierkv.dispatch.threads.spawn import Handle, Runner, no_thread, start_thread
from tierkv.errors import BackendUnavailableError, EngineProtocolError
from tierkv.metrics.watched import TierCondition
from tierkv.stack.stack import Stack
from tierkv.testing.manual_clock import ManualClock
from tierkv.types.engine import EngineSpec, GroupSpec, StepOutput

Expected = Callable[..., list[list[int]]]
PROMPTS = prompts_of(17, 2)
ABSENT, WELL = TierCondition(usable=False, writable=False), TierCondition(usable=True, writable=True)


@pytest.fixture
def hanging() -> Iterator[HangingDisk]:
    """Disk whose open hangs until the test releases it, or ends."""
    disk = HangingDisk()
    yield disk
    disk.release()


def tiers_of(place: Path, **slow: Any) -> list[dict[str, Any]]:
    """Description of the tier that hangs, ahead of one that does not."""
    disk = stack_config(place)["tiers"][0]
    return [{**disk, "name": "slow", "path": str(place / "slow"), "backend": "hanging", **slow}, disk]


def step_until(stack: Stack, condition: Callable[[], bool]) -> None:
    """Step an engine without requests."""
    for _ in range(20_000):
        if condition():
            return
        stack.build_connector_meta(StepOutput())
        threading.Event().wait(0.001)
    raise AssertionError("the condition never became true")


def test_tiers_are_opened_side_by_side(tmp_path: Path) -> None:
    """A tier that hangs must not use up the time of the others: here each one opens only when both have begun to."""
    both = threading.Barrier(2, timeout=PATIENCE_S)

    def meeting(inner: Open) -> Open:
        def open_together(context: BackendContext, options: Any) -> Any:
            both.wait()
            return inner(context, options)

        return open_together

    table = {**stack_config(tmp_path)["tiers"][0], "backend": "meeting", "open_deadline_s": 5.0}
    tiers = [{**table, "name": name, "path": str(tmp_path / name)} for name in ("first", "second")]
    registry = registry_with("meeting", meeting)
    with opened({**stack_config(tmp_path), "tiers": tiers}, plugins=registry) as stack:
        assert stack.tiers.names == ("first", "second")


def test_a_tier_that_hung_joins_when_it_opens(
    tmp_path: Path, expected: Expected, hanging: HangingDisk, caplog: pytest.LogCaptureFixture
) -> None:
    """A dead file system comes back: the tier serves what it holds, at its place, without a restart or a second open.
    One line tells that it left, one that it is back.
    """
    tiers = tiers_of(tmp_path, open_deadline_s=0.05)
    with opened(
        {**stack_config(tmp_path), "tiers": [{**tiers[0], "backend": "disk", "open_deadline_s": 60}]}
    ) as before:
        serve(before, PROMPTS)
    with opened({**stack_config(tmp_path), "tiers": tiers}, plugins=hanging.registry) as stack:
        assert stack.tiers.names == ("disk",)
        assert stack.tiers.health() == {"disk": WELL, "slow": ABSENT}
        assert not stack.has_pending_work(), "an idle engine would step for ever"
        stack.build_connector_meta(StepOutput())
        hanging.release()
        step_until(stack, lambda: "slow" in stack.tiers.names)
        assert stack.tiers.names == ("slow", "disk")
        assert stack.tiers.health() == {"disk": WELL, "slow": WELL}
        assert serve(stack, PROMPTS) == expected(PROMPTS)
        assert stack.metrics.counters.tokens_loaded["slow"] > 0
        assert hanging.tries == 1, "a second open of a place whose first one hangs only hangs as well"
        assert stack.close()
    assert hanging.closed.is_set()
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([line for line in lines if "opens without this tier" in line and "tier=slow" in line]) == 1
    assert len([line for line in lines if "is in service: " in line and "tier=slow" in line]) == 1


@pytest.mark.parametrize("error", [BackendUnavailableError, Panic, SystemExit, asyncio.CancelledError])
def test_an_absent_tier_is_tried_with_growing_pauses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    """A place that cannot be opened for a night costs one try per pause, and one log line in all. The pauses are those
    of a tier that left service, so the tier is back as soon as one that was there at the start.
    """
    disk, clock = RefusingDisk(error), ManualClock()
    config = stack_config(tmp_path)
    config["tiers"] = [{**config["tiers"][0], "name": "disk", "backend": "refusing", "breaker_cooldown_s": 8.0}]
    runtime = Runtime(clock=clock, engine_sleep=clock.sleep)
    with opened(config, plugins=disk.registry, runtime=runtime) as stack:
        assert disk.tries == 1
        stack.build_connector_meta(StepOutput())  # a step that learns the time
        for tries, pause_s in enumerate([1.0, *[1.25**growths for growths in range(1, 10)], 8.0, 8.0], 2):
            clock.now_s += pause_s - 0.25
            stack.build_connector_meta(StepOutput())
            assert disk.tries == tries - 1, "it was tried too early"
            clock.now_s += 0.25
            step_until(stack, lambda tries=tries: disk.tries == tries and stack.tiers.names == ())  # type: ignore[misc]
            step_until(stack, lambda: stack._core.wiring.changes._absent["disk"].wait_idle(0))
            stack.build_connector_meta(StepOutput())
        disk.works = True
        clock.now_s += 8.0
        step_until(stack, lambda: stack.tiers.names == ("disk",))
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([line for line in lines if "disk" in line]) == 2, lines


def test_a_reset_empties_an_absent_tier_as_it_joins(tmp_path: Path, expected: Expected) -> None:
    """Weights were updated while the tier was absent: its chunks belong to the old ones."""
    config = {**stack_config(tmp_path)}
    with opened({**config, "tiers": [config["tiers"][0]]}) as before:
        serve(before, PROMPTS)
    disk = RefusingDisk()
    config["tiers"] = [{**config["tiers"][0], "name": "disk", "backend": "refusing", "breaker_cooldown_s": 0.01}]
    with opened(config, plugins=disk.registry) as stack:
        stack.reset_cache("all")
        disk.works = True
        step_until(stack, lambda: stack.tiers.names == ("disk",))
        assert serve(stack, PROMPTS) == expected(PROMPTS)
        assert stack.metrics.counters.tokens_loaded["disk"] == 0, "an outdated chunk was served"


def test_a_reset_keeps_an_absent_tier_of_others_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tier that is only read must neither be emptied nor serve outdated chunks."""
    config = {**stack_config(tmp_path)}
    config["tiers"] = [
        {**config["tiers"][0], "name": "disk", "backend": "refusing", "breaker_cooldown_s": 0.01, "write": "read_only"}
    ]
    disk = RefusingDisk()
    with opened(config, plugins=disk.registry) as stack:
        stack.reset_cache("all")
        disk.works = True
        step_until(stack, lambda: "is not tried again" in caplog.text)
        assert stack.tiers.names == ()
        assert stack.tiers.health() == {}


def test_an_absent_tier_is_detached_or_attached_by_hand(tmp_path: Path) -> None:
    """Operators need not wait for the next try, and can end the tries; an attachment that fails ends none."""
    disk = RefusingDisk()
    config = stack_config(tmp_path)
    table = {**config["tiers"][0], "name": "disk", "backend": "refusing"}
    with opened({**config, "tiers": [table]}, plugins=disk.registry) as stack:
        with pytest.raises(BackendUnavailableError):
            stack.tiers.attach(table)
        assert stack.tiers.health() == {"disk": ABSENT}
        disk.works = True
        stack.tiers.attach(table)
        stack.build_connector_meta(StepOutput())
        assert stack.tiers.health() == {"disk": WELL}
    disk.works = False
    with opened({**config, "tiers": [table]}, plugins=disk.registry) as stack:
        change = stack.tiers.detach("disk")
        stack.build_connector_meta(StepOutput())
        assert change.wait(0.0)
        assert stack.tiers.health() == {}
        with pytest.raises(EngineProtocolError, match="there are: none"):
            stack.tiers.detach("disk")


def test_a_required_tier_that_fails_unlocks_the_others(tmp_path: Path) -> None:
    """Tiers that opened beside it are closed before the error is raised: the next start finds no lock."""
    config = stack_config(tmp_path)
    file = tmp_path / "file"
    file.write_text("no directory")
    broken = {**config["tiers"][0], "name": "broken", "path": str(file), "required": True}
    with pytest.raises(OSError, match="file"), opened({**config, "tiers": [config["tiers"][0], broken]}):
        pass
    with opened({**config, "tiers": [{**config["tiers"][0], "required": True}]}) as stack:
        assert stack.tiers.names == ("disk",)


@pytest.mark.parametrize("backend", ["disk", "lmdb"])
def test_a_tier_that_is_tried_again_does_not_follow_the_process(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that changed its working directory meanwhile once got a second, empty store in the new one."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    tier = {"backend": backend, "path": "kv", "capacity": "8MiB", "breaker_cooldown_s": 0.01}
    config = {"host": {"capacity": "1MiB"}, "tiers": [tier]}
    spec = EngineSpec("m", "float32", (GroupSpec(16, (4096,)),), 16)
    owner = tierkv.open_stack(config, spec)
    stack = tierkv.open_stack(config, spec)
    assert stack.tiers.health()[backend] == ABSENT
    monkeypatch.chdir(tmp_path / "second")
    assert owner.close()
    step_until(stack, lambda: stack.tiers.health()[backend] == WELL)
    assert stack.close()
    assert list((tmp_path / "second").iterdir()) == []


def test_an_absent_tier_is_tried_again_after_a_try_without_a_thread(tmp_path: Path) -> None:
    """A machine that had no thread left for a moment would leave the tier out until the restart."""
    disk, clock, refused = RefusingDisk(), ManualClock(), list[str]()

    def spawn(name: str, runner: Runner) -> Handle:
        if name == "tierkv-disk-open" and not refused:
            refused.append(name)
            raise no_thread(name, RuntimeError("can't start new thread"))
        return start_thread(name, runner)

    config = stack_config(tmp_path)
    config["tiers"] = [{**config["tiers"][0], "name": "disk", "backend": "refusing"}]
    runtime = Runtime(clock=clock, engine_sleep=clock.sleep, spawn=spawn)
    with opened(config, plugins=disk.registry, runtime=runtime) as stack:
        disk.works = True
        stack.build_connector_meta(StepOutput())
        clock.now_s += 60.0
        stack.build_connector_meta(StepOutput())
        assert refused
        stack.build_connector_meta(StepOutput())
        clock.now_s += 60.0
        step_until(stack, lambda: stack.tiers.names == ("disk",))
