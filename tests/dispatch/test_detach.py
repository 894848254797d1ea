"""Detach of a tier: it takes no new operations, its backend is closed once, and its number is released last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from dispatch_bench import KEYS, PATIENCE_S, DispatchBench, dispatching, wait_for
from plain_files import AsyncPlainFiles
from tier_bench import Bench, compressible, make_bench

from tierkv.abc import Capabilities
from tierkv.dispatch import TierLimits
from tierkv.testing import faults
from tierkv.types.tier_ops import OP_KEYS, OutcomeKind, Verb


def detached(dispatch: DispatchBench) -> list[int]:
    """Drain until a detach has completed. Returns the detached tiers."""
    taken: list[int] = []

    def some() -> bool:
        dispatch.drain()
        taken.extend(dispatch.dispatcher.take_detached())
        return bool(taken)

    wait_for(some, "a tier to leave")
    return taken


def test_a_detached_tier_takes_nothing_and_is_closed_once(bench: Bench, tmp_path: Path) -> None:
    """Its lock and its threads are released, so that its disk can be repaired while the other tier works."""
    other = make_bench(tmp_path / "other", beside=bench)
    with dispatching(bench, bench.tier(), other.tier()) as dispatch:
        dispatch.dispatcher.detach(0, PATIENCE_S)
        late = dispatch.write(1, 1, deadline_s=1e9)
        fine = dispatch.write(2, 2, deadline_s=1e9, tier=1)
        assert detached(dispatch) == [0]
        assert dispatch.kinds(late) == [OutcomeKind.REFUSED]
        assert dispatch.wait(fine) == [[OutcomeKind.OK]]
        assert bench.backend.calls == ["close"]
        assert list(dispatch.dispatcher.stats.tiers) == [1]
    assert bench.backend.calls == ["close"], "closing the stack closed a backend that was closed before"


def test_running_calls_may_end_and_waiting_operations_are_refused(bench: Bench, gate: Event) -> None:
    """An acknowledged write is stored. A waiting operation fails at once."""
    bench.backend.add("write", faults.hang_until(gate))
    with dispatching(bench, bench.tier(capabilities=Capabilities(preferred_concurrency=1))) as dispatch:
        running = dispatch.write(0, 0, deadline_s=1e9)
        wait_for(lambda: bench.backend.calls == ["write"], "the running call")
        waiting = dispatch.write(1, 1, deadline_s=1e9)
        dispatch.dispatcher.detach(0, PATIENCE_S)
        dispatch.drain()
        assert dispatch.kinds(waiting) == [OutcomeKind.REFUSED]
        assert dispatch.dispatcher.take_detached() == []
        gate.set()
        assert detached(dispatch) == [0]
        assert dispatch.kinds(running) == [OutcomeKind.OK]
        assert bench.file(KEYS[0]).exists()
        assert bench.backend.calls == ["write", "close"]


def test_a_hanging_call_delays_the_end_of_the_detach(bench: Bench, gate: Event) -> None:
    """The backend is closed after the timeout. The detach completes only when the slots of the call are safe."""
    bench.backend.add("write", faults.hang_until(gate))
    with dispatching(bench, bench.tier(capabilities=Capabilities(preferred_concurrency=1))) as dispatch:
        hung = dispatch.write(0, 0, deadline_s=1e9)
        wait_for(lambda: bench.backend.calls == ["write"], "the hung call")
        dispatch.dispatcher.detach(0, 5.0)
        assert dispatch.dispatcher.take_detached() == []
        assert bench.backend.calls == ["write"]
        bench.clock.advance(6.0)
        assert dispatch.dispatcher.take_detached() == []
        wait_for(lambda: bench.backend.calls == ["write", "close"], "the close")
        assert dispatch.dispatcher.take_detached() == []
        gate.set()
        assert detached(dispatch) == [0]
        assert len(dispatch.completions(hung)) == 1


def test_a_full_queue_is_refused_over_several_steps(bench: Bench, gate: Event) -> None:
    """Promise 2: thousands of operations wait for a hung tier. Refusing them all at once took fifty milliseconds."""
    step, count = 64 * (1 + OP_KEYS), 192
    bench.backend.add("contains", faults.hang_until(gate))
    with dispatching(bench, bench.tier(capabilities=Capabilities(preferred_concurrency=1))) as dispatch:
        ops = [dispatch.submit(Verb.PROBE, [1], deadline_s=1e9) for _ in range(count)]
        wait_for(lambda: bench.backend.calls == ["contains"], "the hung call")
        dispatch.dispatcher.detach(0, 5.0)
        for refused in (64, 128, 191):
            dispatch.drain(step)
            assert dispatch.dispatcher.stats.tiers[0].refused == refused
            assert dispatch.dispatcher.take_detached() == []
        assert all(dispatch.kinds(op) == [OutcomeKind.REFUSED] for op in ops[1:])
        gate.set()
        assert detached(dispatch) == [0]
        assert len(dispatch.completions(ops[0])) == 1


def test_detaching_an_async_tier_keeps_the_loop_running(async_bench: Bench, tmp_path: Path) -> None:
    """Async tiers share a loop, which must not stop with one of them."""
    other = make_bench(tmp_path / "other", AsyncPlainFiles, beside=async_bench)
    with dispatching(async_bench, async_bench.tier(asynchronous=True), other.tier(asynchronous=True)) as dispatch:
        assert dispatch.wait(dispatch.write(1, 1, deadline_s=1e9)) == [[OutcomeKind.OK]]
        dispatch.dispatcher.detach(0, PATIENCE_S)
        assert detached(dispatch) == [0]
        assert dispatch.wait(dispatch.write(2, 2, deadline_s=1e9, tier=1)) == [[OutcomeKind.OK]]


def test_a_read_of_a_detaching_async_tier_is_not_cancelled(async_bench: Bench, gate: Event) -> None:
    """Promise 1:

    a library may continue in a thread of its own after a cancellation, and fill a slot with another chunk. The call
    keeps its time, and the slot stays leased until it has ended.
    """
    inside, ended = Event(), Event()
    inner = async_bench.files.read_into

    def blocking() -> None:
        inside.set()
        gate.wait(PATIENCE_S)
        ended.set()

    async def slow(requests: Sequence[Any]) -> object:
        await asyncio.to_thread(blocking)
        return await inner(requests)

    with dispatching(async_bench, async_bench.tier(asynchronous=True)) as dispatch:
        assert dispatch.wait(dispatch.write(0, 0, deadline_s=1e9)) == [[OutcomeKind.OK]]
        async_bench.files.read_into = slow
        read = dispatch.submit(Verb.READ, [0], [3], deadline_s=1e9)
        wait_for(inside.is_set, "the call")
        dispatch.dispatcher.detach(0, 5.0)
        for _ in range(20):
            dispatch.drain()
            assert dispatch.dispatcher.take_detached() == []
            time.sleep(0.002)
        assert not dispatch.completions(read), "its slot would be free while the library may still write to it"
        gate.set()
        assert detached(dispatch) == [0]
        assert ended.is_set()
        assert dispatch.kinds(read) == [OutcomeKind.OK]
        assert async_bench.payload(3, KEYS[0]) == compressible(0)


def test_a_detaching_tier_gets_no_trial(bench: Bench) -> None:
    """A trial would call a backend after its close."""
    with dispatching(bench, limits=TierLimits(breaker_failures=1, breaker_cooldown_s=1.0)) as dispatch:
        bench.backend.add("contains", faults.raise_error(lambda: OSError("taken")), times=1)
        dispatch.wait(dispatch.submit(Verb.PROBE, [1], deadline_s=1e9))
        dispatch.wait_health(False)
        dispatch.dispatcher.detach(0, PATIENCE_S)
        bench.clock.advance(100.0)
        assert detached(dispatch) == [0]
        assert [call for call in bench.backend.calls if call != "contains"] == ["close"]
        assert bench.backend.calls.count("contains") <= 3, "a trial was sent"
        assert dispatch.dispatcher.pending() == 0


def test_a_tier_attached_later_is_served(bench: Bench, tmp_path: Path) -> None:
    """Numbers may have gaps: a tier that failed to open has used one."""
    other = make_bench(tmp_path / "other", beside=bench)
    with dispatching(bench) as dispatch:
        dispatch.dispatcher.attach(7, other.tier(), TierLimits())
        assert dispatch.wait(dispatch.write(2, 2, deadline_s=1e9, tier=7)) == [[OutcomeKind.OK]]
        assert other.file(KEYS[2]).exists()
        assert dispatch.dispatcher.stats.tiers[7].keys == 1


def test_a_hanging_scan_is_a_running_call(bench: Bench, gate: Event) -> None:
    """A scan that never ended still reads the files of the tier."""
    bench.backend.add("scan", faults.hang_until(gate))
    scan = Capabilities(scan=True, authoritative_index=True)
    with dispatching(bench, bench.tier(capabilities=scan)) as dispatch:
        (late,) = dispatch.dispatcher.scan_all(0.05)
        assert late.timed_out
        dispatch.drain()
        dispatch.dispatcher.detach(0, 5.0)
        assert dispatch.dispatcher.take_detached() == []
        bench.clock.advance(6.0)
        assert dispatch.dispatcher.take_detached() == []
        state = dispatch.dispatcher._tier_states[0]
        wait_for(lambda: bench.backend.calls == ["scan", "close"] and not state.lane.is_closing(), "the close")
        assert dispatch.dispatcher.take_detached() == []
        gate.set()
        assert detached(dispatch) == [0]


def test_a_backend_is_closed_when_a_thread_is_available(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit of threads a detached tier stayed open, and locked, until the engine ended."""
    with dispatching(bench) as dispatch:
        (state,) = dispatch.dispatcher._tier_states.values()
        with monkeypatch.context() as patch:
            patch.setattr(state.lane, "_spawn", faults.raise_error(lambda: RuntimeError("can't start new thread")))
            dispatch.dispatcher.detach(0, PATIENCE_S)
            wait_for(lambda: not state.is_busy, "the end of its threads")
            for _ in range(3):
                dispatch.drain()
                assert dispatch.dispatcher.take_detached() == []
        assert detached(dispatch) == [0]
        assert bench.backend.calls == ["close"]
        assert dispatch.dispatcher.close_errors == []
