"""Close of a stack whose tier or copy hangs or fails: it ends in time, and everything else is released."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import worker_ranks
from stack_bed import Faults

import tierkv
from tierkv.dispatch.threads.runtime import Runtime
from tierkv.stack.core import CLOSE_GRACE_S
from tierkv.stack.stack import Stack
from tierkv.testing.faults import hang_until
from tierkv.testing.manual_clock import ManualClock
from tierkv.types.transfers import ChunksInBlocks
from tierkv.worker.pages import HostPages

TIMEOUT_S, PATIENCE_S = 7.0, 60.0


def opened_with_a_store(place: Path, faults: Faults, runtime: Runtime | None = None) -> Stack:
    """Open a stack over a faulty disk, in whose host tier two chunks wait to be written."""
    disk = {"backend": "faulty", "path": str(place), "capacity": "8MiB", "min_free_bytes": 0, "write": "back"}
    config = worker_ranks.config_of(tiers=[disk])
    stack = tierkv.open_stack(config, worker_ranks.spec_of(1), plugins=faults.registry(), runtime=runtime or Runtime())
    driver = worker_ranks.Driver(stack, [worker_ranks.LocalRank(worker) for worker in stack.workers])
    driver.store(driver.request(range(64)), [1, 2, 3, 4])
    return stack


def test_a_close_with_a_hung_tier_ends_within_its_time(tmp_path: Path) -> None:
    """Each phase once had the whole time again, so that a server was killed in the middle of its close."""
    faults, clock, released = Faults(), ManualClock(), threading.Event()
    stack = opened_with_a_store(tmp_path, faults, Runtime(clock=clock, engine_sleep=clock.sleep))
    faults.last.add("write", hang_until(released))
    began_s = clock.now_s
    assert not stack.close(TIMEOUT_S)
    assert TIMEOUT_S <= clock.now_s - began_s <= TIMEOUT_S + CLOSE_GRACE_S
    released.set()


def test_a_release_that_fails_keeps_no_other_from_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads, memory and the record are released, and the error reaches the caller."""
    stack = opened_with_a_store(tmp_path, Faults())
    wiring: Any = stack._core.wiring
    made: list[str] = []

    def fail_after(close: Callable[..., Any]) -> Callable[..., None]:
        def failing(*arguments: Any) -> None:
            close(*arguments)
            raise RuntimeError("this release fails")

        return failing

    def note(name: str, close: Callable[..., Any]) -> Callable[..., None]:
        def noted(*arguments: Any) -> None:
            made.append(name)
            close(*arguments)

        return noted

    monkeypatch.setattr(wiring.dispatcher, "close", fail_after(wiring.dispatcher.close))
    monkeypatch.setattr(wiring.changes, "close", note("changes", wiring.changes.close))
    monkeypatch.setattr(wiring.arena, "close", note("arena", wiring.arena.close))
    with pytest.raises(RuntimeError, match="this release fails"):
        stack.close(TIMEOUT_S)
    assert made == ["changes", "arena"]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_close_with_a_hung_copy_ends_within_its_time(
    tmp_path: Path, num_workers: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy that hangs, as on a GPU that was lost, kept the close for ever: the engine was killed instead."""
    clock, released = ManualClock(), threading.Event()
    disk = {"backend": "disk", "path": str(tmp_path), "capacity": "8MiB", "min_free_bytes": 0}
    runtime = Runtime(clock=clock, engine_sleep=clock.sleep)
    config, spec = worker_ranks.config_of(tiers=[disk]), worker_ranks.spec_of(num_workers)
    stack = tierkv.open_stack(config, spec, runtime=runtime)
    has_blocks = HostPages.has_blocks

    def hang(pages: HostPages, job: ChunksInBlocks) -> bool:
        assert released.wait(PATIENCE_S)
        return has_blocks(pages, job)

    monkeypatch.setattr(HostPages, "has_blocks", hang)
    driver = worker_ranks.Driver(stack, [worker_ranks.LocalRank(worker) for worker in stack.workers])
    driver.begin_store(driver.request(range(64)), [1, 2, 3, 4])
    began_s = clock.now_s
    assert not stack.close(TIMEOUT_S), "chunks that were not copied are no success"
    assert TIMEOUT_S <= clock.now_s - began_s <= TIMEOUT_S + CLOSE_GRACE_S
    assert len([record for record in caplog.records if "are abandoned" in record.getMessage()]) == num_workers
    released.set()
