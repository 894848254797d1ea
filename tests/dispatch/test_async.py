"""Async backends: the same outcomes, bounds and deadlines on one event loop."""

from __future__ import annotations

import asyncio
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
    """Do something else before a verb of the async files; returns what undoes it."""
    inner = getattr(bench.files, verb)

    async def spoiled(batch: Sequence[Any]) -> object:
        await fault(batch)
        return await inner(batch)

    setattr(bench.files, verb, spoiled)
    return lambda: setattr(bench.files, verb, inner)


class Hang:
    """Calls wait in here until they are let go; counts them, and those that were cancelled."""

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


def test_an_engine_that_computes_does_not_make_a_tier_slow(async_bench: Bench) -> None:
    """What a read has taken is known on the loop, however long the engine's step takes that asks for it."""
    with dispatching(async_bench, async_bench.tier(asynchronous=True)) as dispatch:
        dispatch.wait(dispatch.write(1, 1))
        read = dispatch.submit(Verb.READ, [1], [2])
        wait_for(lambda: bool(dispatch.dispatcher._done), "the read to end")
        dispatch.clock.advance(1.0)  # the engine's step
        dispatch.wait(read)
        assert dispatch.completions(read)[0].elapsed_s == 0.0


def test_every_verb_comes_back(async_bench: Bench) -> None:
    """The main job, on the loop."""
    with dispatching(async_bench, async_bench.tier("zstd", asynchronous=True)) as dispatch:
        written = [dispatch.write(number, number) for number in range(3)]
        assert dispatch.wait(*written) == [[OK]] * 3
        probe, read = dispatch.submit(Verb.PROBE, [1, 5]), dispatch.submit(Verb.READ, [2, 7, 0], [5, 6, 7])
        assert dispatch.wait(probe, read) == [[OK, ABSENT], [OK, ABSENT, OK]]
        assert async_bench.payload(5, KEYS[2]) == compressible(2)
        assert dispatch.wait(dispatch.submit(Verb.DELETE, [0, 1])) == [[OK, OK]]
        assert dispatch.dispatcher.stats.tiers[0].ops == 6


def test_calls_at_once_are_bounded(async_bench: Bench) -> None:
    """preferred_concurrency is a promise to the backend's author; on a loop nothing else would hold it."""
    hang = Hang()
    spoil(async_bench, "contains", hang)
    with dispatching(async_bench, async_bench.tier(asynchronous=True, capabilities=TWO)) as dispatch:
        ops = [dispatch.submit(Verb.PROBE, [1]) for _ in range(20)]
        wait_for(lambda: hang.inside == 2, "two calls")
        hang.is_open = True
        assert dispatch.wait(*ops) == [[ABSENT]] * 20
        assert hang.most == 2


def test_loads_overtake_stores(async_bench: Bench) -> None:
    """The same order as on threads."""
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
    assert order == ["read_into", "contains", "delete", "write"]


def test_late_data_is_never_accepted(async_bench: Bench) -> None:
    """A read that missed its deadline is not cancelled, and keeps its slot until it has ended; its data is dropped."""
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


def test_what_touches_no_slot_is_cancelled_at_its_deadline(async_bench: Bench) -> None:
    """A hung probe would hold one of few places for ever; ending it harms nobody."""
    hang = Hang()
    spoil(async_bench, "contains", hang)
    with dispatching(async_bench, async_bench.tier(asynchronous=True)) as dispatch:
        probe = dispatch.submit(Verb.PROBE, [0, 1], deadline_s=5.0)
        wait_for(lambda: hang.inside == 1, "the call")
        dispatch.clock.advance(5.0)
        dispatch.drain()
        assert dispatch.wait(probe) == [[TIMED_OUT] * 2]
        assert [said.ended for said in dispatch.completions(probe)] == [False, True]
        assert hang.cancelled == 1


def test_a_tier_that_was_silent_recovers_alone(async_bench: Bench) -> None:
    """Breaker and trial are the dispatcher's, not the threads'."""
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
def test_what_a_plugin_raises_neither_ends_loop_nor_operation(async_bench: Bench, error: BaseException) -> None:
    """Asyncio lets SystemExit out of its loop: one plugin's exit would silence every async tier."""

    async def broken(batch: Any) -> None:
        raise error

    with dispatching(async_bench, async_bench.tier(asynchronous=True)) as dispatch:
        undo = spoil(async_bench, "contains", broken)
        (kinds,) = dispatch.wait(dispatch.submit(Verb.PROBE, [1]))
        assert kinds in ([FAILED], [TIMED_OUT])
        undo()
        assert dispatch.wait(dispatch.submit(Verb.PROBE, [1])) == [[ABSENT]]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exit_in_a_stray_task_does_not_end_the_loop(async_bench: Bench) -> None:
    """Libraries start tasks of their own."""

    async def stray() -> None:
        raise SystemExit("stray")

    tasks: list[asyncio.Task[None]] = []

    async def start_stray(batch: Any) -> None:
        tasks.append(asyncio.create_task(stray()))
        await asyncio.sleep(0.01)

    with dispatching(async_bench, async_bench.tier(asynchronous=True)) as dispatch:
        undo = spoil(async_bench, "contains", start_stray)
        assert dispatch.wait(dispatch.submit(Verb.PROBE, [1])) == [[ABSENT]]
        undo()
        assert dispatch.wait(dispatch.submit(Verb.PROBE, [1])) == [[ABSENT]]
        assert isinstance(tasks[0].exception(), SystemExit)


def test_a_blocked_loop_is_never_in_the_way(async_bench: Bench, gate: threading.Event) -> None:
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
    """One thread for all of them, whatever their number."""
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
    """What can be ended is ended, so that the backend is closed with nobody inside."""
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


def test_close_gives_up_what_ignores_cancellation(async_bench: Bench) -> None:
    """A coroutine that catches everything must not keep a server from stopping."""
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


def said_of(dispatch: DispatchBench) -> list[int]:
    """Operations that were told of, in order."""
    return [said.op_id for said in dispatch.completion if isinstance(said, Completion)]


def test_every_operation_is_told_of_at_close(async_bench: Bench) -> None:
    """As for threads: no operation without a word."""
    hang = Hang()
    spoil(async_bench, "contains", hang)
    with dispatching(async_bench, async_bench.tier(asynchronous=True, capabilities=TWO)) as dispatch:
        ops = [dispatch.submit(Verb.PROBE, [1], deadline_s=1e9) for _ in range(30)]
        dispatch.dispatcher.close(0.05)
        dispatch.drain()
        assert sorted(said_of(dispatch)) == ops
        assert all(dispatch.completions(op_id)[0].ended for op_id in ops)
        assert dispatch.dispatcher.pending() == 0


def test_calls_are_cancelled_in_the_order_in_which_they_began(async_bench: Bench) -> None:
    """A simulation plays the same seed twice: what ends first must not hang on where objects lie in memory."""
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
