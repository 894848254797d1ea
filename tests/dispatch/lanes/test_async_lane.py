"""Async lane: the same outcomes, bounds and deadlines as on threads, on one event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from dispatch_bench import KEYS, PATIENCE_S, DispatchBench, dispatching, wait_for
from plain_files import AsyncPlainFiles
from tier_bench import Bench, compressible, make_bench

from tierkv.abc import Capabilities
from tierkv.dispatch import TierLimits
from tierkv.types.tier_ops import Completion, OutcomeKind, Verb

OK, ABSENT, FAILED, TIMED_OUT = OutcomeKind.OK, OutcomeKind.ABSENT, OutcomeKind.FAILED, OutcomeKind.TIMED_OUT
REFUSED = OutcomeKind.REFUSED
TWO = Capabilities(preferred_batch=4, preferred_concurrency=2)


def spoil(bench: Bench, verb: str, fault: Callable[[Any], Awaitable[Any]]) -> Callable[[], None]:
    """Replace a verb of the async files; returns a function that restores it."""
    inner = getattr(bench.files, verb)

    async def spoiled(batch: Sequence[Any]) -> object:
        await fault(batch)
        return await inner(batch)

    setattr(bench.files, verb, spoiled)
    return lambda: setattr(bench.files, verb, inner)


class Hang:
    """Gate in which calls wait until it opens. Counts the calls, and those that were cancelled."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0
        self.cancelled = 0
        self.is_open = False

    async def __call__(self, batch: Any) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            while not self.is_open:  # noqa: ASYNC110 - an asyncio.Event could not be set from the test's thread
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.inside -= 1


def test_time_of_the_engine_is_not_counted_as_the_tiers(async_bench: Bench) -> None:
    """The duration of a read ends with its I/O on the loop, however long the engine's step takes."""
    with dispatching(async_bench, async_bench.tier(asynchronous=True)) as dispatch:
        dispatch.wait(dispatch.write(1, 1))
        read = dispatch.submit(Verb.READ, [1], [2])
        wait_for(lambda: bool(dispatch.dispatcher._done), "the read to end")
        dispatch.clock.advance(1.0)  # the engine's step
        dispatch.wait(read)
        assert dispatch.completions(read)[0].elapsed_s == 0.0


def test_every_verb_comes_back(async_bench: Bench) -> None:
    """Every verb completes on the loop."""
    with dispatching(async_bench, async_bench.tier("zstd", asynchronous=True)) as dispatch:
        written = [dispatch.write(number, number) for number in range(3)]
        assert dispatch.wait(*written) == [[OK]] * 3
        probe, read = dispatch.submit(Verb.PROBE, [1, 5]), dispatch.submit(Verb.READ, [2, 7, 0], [5, 6, 7])
        assert dispatch.wait(probe, read) == [[OK, ABSENT], [OK, ABSENT, OK]]
        assert async_bench.payload(5, KEYS[2]) == compressible(2)
        assert dispatch.wait(dispatch.submit(Verb.DELETE, [0, 1])) == [[OK, OK]]
        assert dispatch.dispatcher.stats.tiers[0].ops == 6


def test_calls_at_once_are_bounded(async_bench: Bench) -> None:
    """preferred_concurrency is a promise to the backend's author. On a loop, only the lane enforces it."""
    hang = Hang()
    spoil(async_bench, "contains", hang)
    with dispatching(async_bench, async_bench.tier(asynchronous=True, capabilities=TWO)) as dispatch:
        ops = [dispatch.submit(Verb.PROBE, [1]) for _ in range(20)]
        wait_for(lambda: hang.inside == 2, "two calls")
        hang.is_open = True
        assert dispatch.wait(*ops) == [[ABSENT]] * 20
        assert hang.most == 2


def test_loads_overtake_stores(async_bench: Bench) -> None:
    """The priorities are those of the threads."""
    hang, order = Hang(), list[str]()

    def note(verb: str) -> Callable[[Any], Awaitable[None]]:
        async def noted(batch: Any) -> None:
            order.append(verb)

        return noted

    undo = spoil(async_bench, "contains", hang)
    one = Capabilities(preferred_concurrency=1)
    with dispatching(async_bench, async_bench.tier(asynchronous=True, capabilities=one)) as dispatch:
        first = dispatch.submit(Verb.PROBE, [1])
        wait_for(lambda: hang.inside == 1, "the first call")
        undo()
        for verb in ("contains", "read_into", "write", "delete"):
            spoil(async_bench, verb, note(verb))
        ops = [
            dispatch.write(1, 1),
            dispatch.submit(Verb.DELETE, [2]),
            dispatch.submit(Verb.PROBE, [3]),
            dispatch.submit(Verb.READ, [4], [4]),
        ]
        hang.is_open = True
        dispatch.wait(first, *ops)
    assert order == ["contains", "read_into", "delete", "write"]


def test_late_data_is_never_accepted(async_bench: Bench) -> None:
    """A late read is not cancelled. It keeps its slot until it has ended, and its data is dropped."""
    hang = Hang()
    with dispatching(async_bench, async_bench.tier(asynchronous=True)) as dispatch:
        dispatch.wait(dispatch.write(0, 0))
        spoil(async_bench, "read_into", hang)
        read = dispatch.submit(Verb.READ, [0], [3], deadline_s=5.0)
        wait_for(lambda: hang.inside == 1, "the call")
        dispatch.clock.advance(5.0)
        dispatch.drain()
        assert (dispatch.kinds(read), dispatch.completions(read)[0].ended) == ([TIMED_OUT], False)
        for _ in range(50):
            assert dispatch.drain() == []
        assert hang.inside == 1
        hang.is_open = True
        assert dispatch.wait(read) == [[TIMED_OUT]]
        assert (hang.cancelled, dispatch.dispatcher.stats.tiers[0].bytes_verified) == (0, 0)


def test_probes_are_cancelled_at_their_deadline(async_bench: Bench) -> None:
    """A hung probe would occupy one of few calls forever. Its cancellation endangers no slot."""
    hang = Hang()
    spoil(async_bench, "contains", hang)
    with dispatching(async_bench, async_bench.tier(asynchronous=True)) as dispatch:
        probe = dispatch.submit(Verb.PROBE, [0, 1], deadline_s=5.0)
        wait_for(lambda: hang.inside == 1, "the call")
        dispatch.clock.advance(5.0)
        dispatch.drain()
        assert dispatch.wait(probe) == [[TIMED_OUT] * 2]
        assert [report.ended for report in dispatch.completions(probe)] == [False, True]
        assert hang.cancelled == 1


def test_a_silent_tier_recovers_by_itself(async_bench: Bench) -> None:
    """Breaker and trial belong to the dispatcher, not to the threads."""
    hang = Hang()
    spoil(async_bench, "contains", hang)
    limits = TierLimits(breaker_failures=2, breaker_cooldown_s=10.0, trial_deadline_s=2.0)
    tier = async_bench.tier(asynchronous=True, capabilities=TWO)
    with dispatching(async_bench, tier, limits=limits) as dispatch:
        for _ in range(2):
            dispatch.submit(Verb.PROBE, [1])
        dispatch.clock.advance(10.0)
        dispatch.wait_health(False)
        for _ in range(5):
            dispatch.clock.advance(10.0)
            dispatch.drain()
            dispatch.clock.advance(2.0)
            dispatch.drain()
        assert dispatch.health() == [False]
        hang.is_open = True
        dispatch.clock.advance(10.0)
        dispatch.wait_health(False, True)


@pytest.mark.parametrize("error", [OSError("x"), SystemExit("x"), KeyboardInterrupt("x"), asyncio.CancelledError("x")])
def test_an_error_of_a_plugin_ends_neither_loop_nor_operation(async_bench: Bench, error: BaseException) -> None:
    """Asyncio lets SystemExit pass through its loop: the exit of one plugin would stop every async tier."""

    async def broken(batch: Any) -> None:
        raise error

    with dispatching(async_bench, async_bench.tier(asynchronous=True)) as dispatch:
        undo = spoil(async_bench, "contains", broken)
        was_cancelled = isinstance(error, asyncio.CancelledError)
        assert dispatch.wait(dispatch.submit(Verb.PROBE, [1])) == [[TIMED_OUT if was_cancelled else FAILED]]
        undo()
        assert dispatch.wait(dispatch.submit(Verb.PROBE, [1])) == [[ABSENT]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("is_task", [True, False], ids=["task", "callback"])
def test_an_exit_in_a_stray_task_does_not_end_the_loop(
    async_bench: Bench, is_task: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Libraries start tasks and callbacks of their own. The line is all that tells of one that wanted to exit."""

    async def stray() -> None:
        sys.exit("stray")

    tasks: list[asyncio.Task[None]] = []

    async def start_stray(batch: Any) -> None:
        if is_task:
            tasks.append(asyncio.create_task(stray()))
        else:
            asyncio.get_running_loop().call_soon(sys.exit, "stray")
        await asyncio.sleep(0.01)

    with dispatching(async_bench, async_bench.tier(asynchronous=True)) as dispatch:
        undo = spoil(async_bench, "contains", start_stray)
        assert dispatch.wait(dispatch.submit(Verb.PROBE, [1])) == [[ABSENT]]
        undo()
        assert dispatch.wait(dispatch.submit(Verb.PROBE, [1])) == [[ABSENT]]
        assert [type(task.exception()) for task in tasks] == [SystemExit] * is_task
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == [
        "a task or callback of a plugin passed an exception through the loop of all asynchronous tiers"
    ]


def test_a_blocked_loop_delays_neither_submit_nor_drain(async_bench: Bench, gate: threading.Event) -> None:
    """A plugin that blocks in a coroutine stops all async tiers, but neither submit nor drain (promise 2)."""

    async def block(batch: Any) -> None:
        gate.wait()

    spoil(async_bench, "contains", block)
    limits = TierLimits(queue_ops_max=10, breaker_failures=1000)
    with dispatching(async_bench, async_bench.tier(asynchronous=True), limits=limits) as dispatch:
        first = dispatch.submit(Verb.PROBE, [1])
        wait_for(lambda: dispatch.dispatcher._tier_states[0].lane.running_calls() == 1, "the call")

        def engine() -> None:
            for _ in range(300):
                dispatch.submit(Verb.PROBE, [1])
                dispatch.drain()
                dispatch.clock.advance(1.0)

        steps = threading.Thread(target=engine, daemon=True)
        steps.start()
        steps.join(PATIENCE_S)
        assert not steps.is_alive()
        kinds = {dispatch.kinds(op_id)[0] for op_id in range(290)}
        assert kinds == {TIMED_OUT, REFUSED}
        gate.set()
        dispatch.wait(first)


def test_tiers_share_one_loop(async_bench: Bench, tmp_path: Path) -> None:
    """All async tiers use one thread, whatever their number."""
    other = make_bench(tmp_path / "other", AsyncPlainFiles, beside=async_bench)
    tiers = [async_bench.tier(asynchronous=True), other.tier(asynchronous=True)]
    with dispatching(async_bench, *tiers) as dispatch:
        ops = [dispatch.submit(Verb.PROBE, [1], tier=index % 2) for index in range(10)]
        assert dispatch.wait(*ops) == [[ABSENT]] * 10
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("tierkv")]
        assert names.count("tierkv-loop") == 1
        assert not [name for name in names if name.startswith("tierkv-files")]
    assert not [thread for thread in threading.enumerate() if thread.name == "tierkv-loop"]


def test_close_finishes_writes_then_cancels_then_closes(async_bench: Bench) -> None:
    """Running calls end or are cancelled first, so that no call is in the backend when it is closed."""
    hang, closed_with = Hang(), list[int]()
    spoil(async_bench, "read_into", hang)
    inner = async_bench.files.close

    async def close() -> None:
        closed_with.append(hang.inside)
        await inner()  # type: ignore[misc]  # it is the async kind

    async_bench.files.close = close  # type: ignore[method-assign, assignment]  # the test listens
    with dispatching(async_bench, async_bench.tier(asynchronous=True, capabilities=TWO)) as dispatch:
        read = dispatch.submit(Verb.READ, [9], [7], deadline_s=1e9)
        wait_for(lambda: hang.inside == 1, "the call")
        writes = [dispatch.write(number, number, deadline_s=1e9) for number in range(6)]
        assert dispatch.dispatcher.close(0.5) == 0
        dispatch.drain()
        assert [dispatch.kinds(op_id) for op_id in writes] == [[OK]] * 6
        assert (dispatch.kinds(read), dispatch.completions(read)[-1].ended) == ([TIMED_OUT], True)
        assert (hang.cancelled, closed_with) == (1, [0])


def test_close_abandons_calls_that_ignore_cancellation(async_bench: Bench) -> None:
    """A coroutine that catches every exception must not block the shutdown of a server."""
    ignored = [0]

    async def stubborn(batch: Any) -> None:
        while ignored[0] < 3:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                ignored[0] += 1

    spoil(async_bench, "contains", stubborn)
    with dispatching(async_bench, async_bench.tier(asynchronous=True)) as dispatch:
        dispatch.submit(Verb.PROBE, [1], deadline_s=1e9)
        wait_for(lambda: dispatch.dispatcher._tier_states[0].lane.running_calls() == 1, "the call")
        assert dispatch.dispatcher.close(0.05) == 1
        assert ignored[0] >= 1


def completed_ops(dispatch: DispatchBench) -> list[int]:
    """Operations with a completion, in order."""
    return [report.op_id for report in dispatch.reports if isinstance(report, Completion)]


def test_every_operation_is_reported_at_close(async_bench: Bench) -> None:
    """As with threads, every operation gets a completion."""
    hang = Hang()
    spoil(async_bench, "contains", hang)
    with dispatching(async_bench, async_bench.tier(asynchronous=True, capabilities=TWO)) as dispatch:
        ops = [dispatch.submit(Verb.PROBE, [1], deadline_s=1e9) for _ in range(30)]
        dispatch.dispatcher.close(0.05)
        dispatch.drain()
        assert sorted(completed_ops(dispatch)) == ops
        assert all(dispatch.completions(op_id)[0].ended for op_id in ops)
        assert dispatch.dispatcher.pending() == 0


def test_calls_are_cancelled_in_the_order_in_which_they_began(async_bench: Bench) -> None:
    """A simulation replays a seed exactly: the order of the ends must not depend on memory addresses."""
    begun: list[int] = []
    cancelled: list[int] = []

    async def hang(batch: Sequence[Any]) -> None:
        number = KEYS.index(batch[0])
        begun.append(number)
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    spoil(async_bench, "contains", hang)
    many = Capabilities(preferred_concurrency=32)
    with dispatching(async_bench, async_bench.tier(asynchronous=True, capabilities=many)) as dispatch:
        for number in range(32):
            dispatch.submit(Verb.PROBE, [number])
        wait_for(lambda: len(begun) == 32, "all calls")
        dispatch.dispatcher.close(0.1)
    assert cancelled == begun == list(range(32))
