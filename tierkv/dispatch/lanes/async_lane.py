"""Lane of async backends: one event loop on one thread, shared by all of them.

The dispatcher watches the deadlines, as for threads. A probe or deletion that missed its deadline is cancelled. A read
or write is not: a library may continue in a thread of its own after a cancellation, and would fill a slot that by then
belongs to another chunk. The slot stays leased until the call has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from tierkv.dispatch.lanes.ticket import Ticket, TicketQueue, TicketResult
from tierkv.dispatch.threads.copy_pool import CopyPool
from tierkv.dispatch.threads.spawn import Handle, Spawn
from tierkv.tiers.results import explain
from tierkv.tiers.retry import TIMED_OUT, OpResult
from tierkv.tiers.tier import Tier
from tierkv.types.tier_ops import Verb

_HELPER_THREADS_MAX = 32
_LAST_TURNS = 8


class LoopRunner:
    """Event loop as a :class:`~tierkv.dispatch.threads.spawn.Runner`.

    Args:
        spawn: starts the helper threads of ``asyncio.to_thread``.
    """

    def __init__(self, spawn: Spawn) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(_DaemonExecutor(spawn))
        self.done = False

    def run(self) -> None:
        """Run the loop until :meth:`stop`. An exception of a plugin's stray task does not end it, and is logged."""
        asyncio.set_event_loop(self.loop)
        while not self.done:
            try:
                self.loop.run_forever()
            except BaseException as error:  # noqa: BLE001 - SystemExit of a foreign task; every other tier needs the loop
                passed = "a task or callback of a plugin passed an exception through the loop of all asynchronous tiers"
                self.loop.call_exception_handler({"message": passed, "exception": error})
        self._close()

    def step(self) -> bool:
        """Run the callbacks that are ready; False once the loop is closed."""
        if self.loop.is_closed():
            return False
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()
        if self.done:
            self._close()
        return True

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Schedule a call on the loop. Any thread. Never waits; does nothing once the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """Schedule the end of the loop; calls that still run are abandoned."""
        self.call(self._stop)

    def _stop(self) -> None:
        self.done = True
        self.loop.stop()

    def _close(self) -> None:
        for _ in range(_LAST_TURNS):  # a cancelled task needs a few turns to end
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
            if not tasks:
                break
        self.loop.close()


class AsyncLane:
    """:class:`~tierkv.dispatch.lanes.lane.Lane` of an async backend, with a bounded number of concurrent calls.

    Args:
        tier: performs the operations.
        concurrency: number of concurrent calls.
        queue_ops_max: operations that may wait.
        done: receives finished tickets.
        runner: the shared loop.
    """

    def __init__(
        self, tier: Tier, concurrency: int, queue_ops_max: int, done: deque[Ticket], runner: LoopRunner
    ) -> None:
        self.tier = tier
        self.close_error = ""
        self._concurrency = concurrency
        self.tickets = TicketQueue(queue_ops_max)
        self._done = done
        self._runner = runner
        self._running: dict[Ticket, asyncio.Task[None]] = {}  # in the order in which they are cancelled
        self._closing: asyncio.Task[None] | None = None
        self._close_runs = False

    def offer(self, ticket: Ticket) -> bool:
        """Queue a ticket and wake the loop; False if the queue is full."""
        if not self.tickets.put(ticket):
            return False
        self._runner.call(self._pump)
        return True

    def cancel_overdue(self, ticket: Ticket) -> None:
        """Cancel the call if it touches no slot."""
        if ticket.op.verb in {Verb.PROBE, Verb.DELETE}:
            self._runner.call(self._cancel, ticket)

    def stop(self) -> None:
        """Cancel all running calls. The arena's memory stays mapped while a view of it exists."""
        self._runner.call(self._cancel_all)

    def retire(self) -> None:
        """Do nothing: running calls end by themselves, and the lane has no thread of its own."""

    def running_calls(self) -> int:
        """Number of calls that are under way."""
        return len(self._running)

    def close_backend(self, *, may_wait: bool = False) -> bool:  # noqa: ARG002 - the loop's thread runs already
        """Begin to close the backend, on the loop."""
        self._close_runs = True
        self._runner.call(self._begin_close)
        return True

    def is_closing(self) -> bool:
        """Whether the close has begun and not ended."""
        return self._close_runs

    # Everything below runs on the loop.

    def _pump(self) -> None:
        while len(self._running) < self._concurrency and (ticket := self.tickets.take()) is not None:
            if not ticket.claim():
                continue
            now_s = self.tier.clock()
            if ticket.drop_unwanted(now_s):
                self.tickets.moved_s = now_s
                self._done.append(ticket)
            else:
                ticket.began_s = now_s
                task = self._running[ticket] = self._runner.loop.create_task(self._perform(ticket))
                # A callback, not the end of the coroutine: a task cancelled before its first turn never begins.
                task.add_done_callback(partial(self._ended, ticket))

    async def _perform(self, ticket: Ticket) -> None:
        op = ticket.op
        try:
            performed = await self.tier.perform_async(
                op.verb, op.keys, op.slots, ticket.deadline_s, ticket.outcomes, ranks=op.ranks
            )
            ticket.result = TicketResult.of(performed)
        except Exception as error:  # noqa: BLE001 - any error ends the operation; the loop continues
            ticket.result = ticket.failed(explain(error))

    def _ended(self, ticket: Ticket, _task: asyncio.Task[None]) -> None:
        if ticket.result is None:
            ticket.result = TicketResult.of(OpResult([TIMED_OUT] * len(ticket.op.keys)))
        self._running.pop(ticket, None)
        ticket.done_s = self.tickets.moved_s = self.tier.clock()
        self._done.append(ticket)
        self._pump()

    def _cancel(self, ticket: Ticket) -> None:
        if (task := self._running.get(ticket)) is not None:
            task.cancel()

    def _cancel_all(self) -> None:
        for task in self._running.values():
            task.cancel()

    def _begin_close(self) -> None:
        self._closing = self._runner.loop.create_task(self._close())

    async def _close(self) -> None:
        try:
            await self.tier.close_async()
        except BaseException as error:  # noqa: BLE001 - a plugin may raise anything; it is reported in close_errors
            self.close_error = explain(error)
        finally:
            self._close_runs = False


class _DaemonExecutor(ThreadPoolExecutor):
    """Executor behind ``asyncio.to_thread`` of plugins, on daemon threads.

    The standard executor joins its threads at exit, so a plugin that hangs would block it. asyncio accepts only a
    ``ThreadPoolExecutor`` as the default executor, hence the base class.
    """

    def __init__(self, spawn: Spawn) -> None:
        super().__init__(max_workers=1)  # the base class never starts a thread of its own
        self._pool = CopyPool(_HELPER_THREADS_MAX, name="tierkv-loop-helper", spawn=spawn)

    def submit(self, fn: Callable[..., Any], /, *args: object, **kwargs: object) -> Future[Any]:
        """Run ``fn`` on a helper thread."""
        return self._pool.submit(partial(fn, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - the base class's signature
        """Release the threads without waiting."""
        self._pool.close()


def start_loop(spawn: Spawn) -> tuple[LoopRunner, Handle]:
    """Start an event loop on a thread of its own."""
    runner = LoopRunner(spawn)
    return runner, spawn("tierkv-loop", runner)
