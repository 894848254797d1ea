"""Runners in two halves, between which a simulation lets time pass."""

from __future__ import annotations

import asyncio
import gc
import queue
import warnings
from collections import deque

from dispatch_bench import KEYS
from tier_bench import Bench

from tierkv.dispatch.lanes.async_lane import LoopRunner
from tierkv.dispatch.lanes.lane import IoWorker
from tierkv.dispatch.lanes.ticket import Ticket, TicketQueue
from tierkv.dispatch.threads.copy_pool import CopyPool
from tierkv.dispatch.threads.spawn import SplitRunner, start_thread
from tierkv.testing.manual_clock import ManualClock, Stepper
from tierkv.types.tier_ops import TierOp, Verb


def test_an_operation_is_claimed_between_its_halves(bench: Bench) -> None:
    """A begun operation is claimed and cannot be cancelled. Its result is set in the second half only."""
    tickets, tokens, done = TicketQueue(4), queue.SimpleQueue[bool](), deque[Ticket]()
    worker = IoWorker(bench.tier(), tickets, tokens, done)
    assert isinstance(worker, SplitRunner)
    assert not worker.begin()
    ticket = Ticket(TierOp(1, 0, Verb.PROBE, (KEYS[0],), (), 1e9), 0.0)
    tickets.put(ticket)
    tokens.put(True)
    assert worker.begin()
    assert worker.under_way is ticket.op
    assert not ticket.claim()
    assert ticket.result is None
    assert not done
    worker.finish()
    assert worker.under_way is None
    assert list(done) == [ticket]


def test_a_copy_runs_in_its_second_half() -> None:
    """Beginning a copy moves no bytes."""
    stepper = Stepper(ManualClock())
    pool, seen = CopyPool(spawn=stepper), list[int]()
    future = pool.submit(lambda: seen.append(1))
    runner = stepper.handles[0].runner
    assert isinstance(runner, SplitRunner)
    assert runner.begin()
    assert not seen
    assert not future.done()
    runner.finish()
    assert seen == [1]
    assert future.done()


def test_no_task_remains_when_a_loop_ends() -> None:
    """A call that is cancelled at the end needs more than one turn. Otherwise asyncio prints a warning for the user."""

    async def slow_goodbye() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)

    runner = LoopRunner(start_thread)
    task = runner.loop.create_task(slow_goodbye())
    runner.step()
    runner.stop()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner.step()
        assert runner.loop.is_closed()
        assert task.done()
        del task
        gc.collect()
