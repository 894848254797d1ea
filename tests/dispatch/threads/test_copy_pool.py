"""Pool for host copies: results, errors, bounds and shutdown."""

from __future__ import annotations

import gc
import threading
import weakref
from threading import Event

import pytest
from dispatch_bench import PATIENCE_S, wait_for

from tierkv.dispatch import CopyPool
from tierkv.dispatch.threads.spawn import Handle, Runner, start_thread
from tierkv.errors import TierKVError
from tierkv.testing.manual_clock import ManualClock, Stepper


def test_results_and_errors_come_through_futures() -> None:
    """A failed copy must neither end its thread nor be lost."""
    pool = CopyPool()

    def broken() -> int:
        raise SystemExit("no")

    futures = [pool.submit(lambda: 1), pool.submit(broken), pool.submit(lambda: 3)]
    assert (futures[0].result(PATIENCE_S), futures[2].result(PATIENCE_S)) == (1, 3)
    assert isinstance(futures[1].exception(PATIENCE_S), SystemExit)
    assert pool.close(PATIENCE_S) == 0


def test_one_thread_keeps_the_order() -> None:
    """Copies of one worker are submitted in the order in which they must run."""
    pool, seen = CopyPool(), list[int]()
    futures = [pool.submit(lambda number=number: seen.append(number)) for number in range(200)]  # type: ignore[misc]
    futures[-1].result(PATIENCE_S)
    assert seen == list(range(200))
    pool.close(PATIENCE_S)


def test_threads_are_few_named_and_daemons(gate: Event) -> None:
    """The number of threads is bounded, and no thread keeps a process alive."""
    pool = CopyPool(3, name="few-and-named")  # threads of pools of other tests may still end
    futures = [pool.submit(gate.wait) for _ in range(10)]
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("few-and-named")]
    assert sorted(thread.name for thread in ours) == [f"few-and-named-{number}" for number in range(3)]
    assert all(thread.daemon for thread in ours)
    gate.set()
    assert [future.result(PATIENCE_S) for future in futures] == [True] * 10
    assert pool.close(PATIENCE_S) == 0


def test_the_queue_is_bounded(gate: Event) -> None:
    """Promise 6. And submit never blocks or raises on the engine's thread."""
    pool = CopyPool(jobs_max=5)
    running = pool.submit(gate.wait)
    wait_for(running.running, "the first job")
    futures = [pool.submit(gate.wait) for _ in range(7)]
    errors = [future.exception(0) if future.done() else None for future in futures]
    assert [error is not None for error in errors] == [False] * 5 + [True] * 2
    assert isinstance(errors[-1], TierKVError)
    gate.set()
    assert futures[4].result(PATIENCE_S)
    pool.close(PATIENCE_S)


def test_close_cancels_waiting_jobs_and_counts_hanging_ones(gate: Event) -> None:
    """A hung copy is abandoned. Later jobs fail with an error."""
    pool = CopyPool()
    hung = pool.submit(gate.wait)
    wait_for(hung.running, "the first job")
    waiting = [pool.submit(gate.wait) for _ in range(3)]
    assert pool.close(0.02) == 1
    assert all(future.cancelled() for future in waiting)
    assert isinstance(pool.submit(gate.wait).exception(0), TierKVError)
    gate.set()
    assert hung.result(PATIENCE_S)
    assert pool.close(PATIENCE_S) == 0


def test_a_failed_job_keeps_nothing_alive() -> None:
    """A traceback refers to frames. A failed copy must not hold a view of the arena until a garbage collection."""

    class Arena:
        pass

    pool, arena = CopyPool(), Arena()
    alive = weakref.ref(arena)

    def copy(held: Arena) -> None:
        raise ValueError(str(held is None))

    def submit(held: Arena) -> str:
        future = pool.submit(lambda: copy(held))
        return str(future.exception(PATIENCE_S))

    gc.disable()
    try:
        assert submit(arena) == "False"
        del arena
        pool.submit(lambda: None).result(PATIENCE_S)
        wait_for(lambda: alive() is None, "the arena to be let go")
    finally:
        gc.enable()
        pool.close(PATIENCE_S)


def test_a_thread_that_cannot_start_costs_no_exception() -> None:
    """Threads start when they are first needed, on the engine's thread, and a memory limit may be reached by then."""
    allowed: list[bool] = []

    def spawn(name: str, runner: Runner) -> Handle:
        if allowed and allowed.pop():
            return start_thread(name, runner)
        raise RuntimeError("can't start new thread")

    pool = CopyPool(2, name="few", spawn=spawn)
    error = pool.submit(lambda: 1).exception(0)
    assert isinstance(error, TierKVError)
    assert "no thread of 'few' can be started at present" in str(error)
    allowed.append(True)
    assert pool.submit(lambda: 2).result(PATIENCE_S) == 2
    assert pool.submit(lambda: 3).result(PATIENCE_S) == 3, "the one that there is"
    assert pool.close(PATIENCE_S) == 0


def test_it_runs_without_threads() -> None:
    """A simulation chooses the times at which copies run."""
    stepper = Stepper(ManualClock())
    pool = CopyPool(name="no-thread", spawn=stepper)
    futures = [pool.submit(lambda: 1), pool.submit(lambda: 2)]
    assert [future.done() for future in futures] == [False, False]
    stepper.step_all()
    assert [future.done() for future in futures] == [True, False]
    stepper.step_all()
    assert futures[1].result(0) == 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("no-thread")]


@pytest.mark.parametrize(("threads", "jobs_max"), [(0, 1), (1, 0)])
def test_invalid_bounds_are_refused(threads: int, jobs_max: int) -> None:
    """In a pool without threads no copy would ever end."""
    with pytest.raises(ValueError, match="1 or more"):
        CopyPool(threads, jobs_max=jobs_max)
