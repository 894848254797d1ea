"""Lane: path of one tier's operations from the engine's thread to the backend and back.

:class:`ThreadLane` serves blocking backends and has threads of its own.
:class:`~tierkv.dispatch.lanes.async_lane.AsyncLane` serves async backends on a shared event loop.
"""

from __future__ import annotations

import queue
from collections import deque
from typing import Protocol

from tierkv.dispatch.lanes.ticket import Ticket, TicketQueue, TicketResult
from tierkv.dispatch.threads.spawn import Handle, OneShot, Spawn
from tierkv.tiers.results import explain
from tierkv.tiers.tier import Tier
from tierkv.types.tier_ops import TierOp


class Lane(Protocol):
    """Interface between dispatcher and lane. Every method runs on the engine's thread and never waits."""

    tier: Tier
    """Performs the operations."""
    tickets: TicketQueue
    """Operations that wait for a call. Any thread may ask for its length and its age."""
    close_error: str
    """Error of the backend's close; empty if it raised none."""

    def offer(self, ticket: Ticket) -> bool:
        """Queue a ticket; False if the queue is full. The lane appends it to the deque of finished tickets later."""

    def cancel_overdue(self, ticket: Ticket) -> None:
        """End the call of a claimed ticket early, if that is possible. Called when its deadline has passed."""

    def stop(self) -> None:
        """End soon, because the stack closes. No ticket is offered after this call."""

    def retire(self) -> None:
        """End once running calls have ended, because the tier is detached. No ticket is offered after this call.

        Running calls are not cancelled: the stack stays open, and their slots will hold other chunks.
        """

    def running_calls(self) -> int:
        """Number of calls that are still under way after :meth:`stop` or :meth:`retire`."""

    def close_backend(self, *, may_wait: bool = False) -> bool:
        """Begin to close the backend on another thread. Returns whether it has begun: not where none can be started.

        may_wait: without another thread, close it on the caller's.
        """

    def is_closing(self) -> bool:
        """Whether the close of the backend has begun and not ended."""


class ThreadLane:
    """:class:`Lane` of a blocking backend, with threads that serve this tier only.

    Args:
        tier: performs the operations.
        threads: number of threads.
        queue_ops_max: operations that may wait.
        done: receives finished tickets.
        spawn: starts the threads.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(self, tier: Tier, threads: int, queue_ops_max: int, done: deque[Ticket], spawn: Spawn) -> None:
        self.tier = tier
        self.close_error = ""
        self.tickets = TicketQueue(queue_ops_max)
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._done = done
        self._spawn = spawn
        self._threads = threads
        self._workers: list[Handle] = []
        try:
            self._start_workers()
        except BaseException:  # a key may interrupt the caller while a thread starts
            for _ in range(threads):
                self._tokens.put(False)  # noqa: FBT003 - the queue's own signature
            raise
        self._closer: Handle | None = None

    def _start_workers(self) -> None:
        """Start the threads that are missing. Where the system refuses one, those that run are enough for now.

        Raises:
            RuntimeError: no thread runs, and none can be started.
        """
        while len(self._workers) < self._threads:
            worker = IoWorker(self.tier, self.tickets, self._tokens, self._done)
            try:
                self._workers.append(self._spawn(f"tierkv-{self.tier.name}-{len(self._workers)}", worker))
            except RuntimeError:
                if not self._workers:
                    raise
                return

    def offer(self, ticket: Ticket) -> bool:
        """Queue a ticket and wake one thread; False if the queue is full."""
        if len(self._workers) < self._threads:
            self._start_workers()
        if not self.tickets.put(ticket):
            return False
        self._tokens.put(True)  # noqa: FBT003 - the queue's own signature
        return True

    def cancel_overdue(self, ticket: Ticket) -> None:
        """Do nothing: a blocking call cannot be ended from outside."""

    def stop(self) -> None:
        """Let each thread end after the tickets that are queued before."""
        for _ in self._workers:
            self._tokens.put(False)  # noqa: FBT003 - the queue's own signature

    def retire(self) -> None:
        """Let each thread end, as in :meth:`stop`."""
        self.stop()

    def running_calls(self) -> int:
        """Number of threads that have not ended."""
        return sum(worker.is_alive() for worker in self._workers)

    def close_backend(self, *, may_wait: bool = False) -> bool:
        """Begin to close the backend on a thread of its own."""
        try:
            self._closer = self._spawn(f"tierkv-{self.tier.name}-close", OneShot(self._close))
        except RuntimeError:  # no thread available: not a reason to raise on the engine's thread
            if may_wait:
                self._close()
            return may_wait
        return True

    def is_closing(self) -> bool:
        """Whether the close has begun and not ended."""
        return self._closer is not None and self._closer.is_alive()

    def _close(self) -> None:
        try:
            self.tier.close()
        except BaseException as error:  # noqa: BLE001 - a plugin may raise anything; it is reported in close_errors
            self.close_error = explain(error)


class IoWorker:
    """Runner of one lane thread: takes tickets and performs them.

    It waits for tokens. A True token announces one ticket in the queue; a False token ends the thread. The ticket is
    chosen when the token is taken, so a load overtakes stores that were queued before it.
    """

    def __init__(self, tier: Tier, tickets: TicketQueue, tokens: queue.SimpleQueue[bool], done: deque[Ticket]) -> None:
        self._tier = tier
        self._tickets = tickets
        self._tokens = tokens
        self._done = done
        self._ticket: Ticket | None = None
        self.done = False

    def run(self) -> None:
        """Perform tickets until a False token is taken."""
        while not self.done:
            self._take(more=self._tokens.get())
            self.finish()

    def step(self) -> bool:
        """Take and perform one ticket; False if no token is ready."""
        begun = self.begin()
        self.finish()
        return begun

    def begin(self) -> bool:
        """Take one token and claim its ticket; False if no token is ready."""
        try:
            more = self._tokens.get_nowait()
        except queue.Empty:
            return False
        self._take(more=more)
        return True

    def _take(self, *, more: bool) -> None:
        if not more:
            self.done = True
            return
        ticket = self._tickets.take()
        if ticket is None or not ticket.claim():
            return
        now_s = self._tier.clock()
        if ticket.drop_unwanted(now_s):
            self._tickets.moved_s = now_s
            self._done.append(ticket)
        else:
            ticket.began_s, self._ticket = now_s, ticket

    @property
    def under_way(self) -> TierOp | None:
        """Operation that was taken and is not finished."""
        return None if self._ticket is None else self._ticket.op

    def finish(self) -> None:
        """Perform the claimed ticket, if any."""
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            return
        op = ticket.op
        try:
            performed = self._tier.perform(
                op.verb, op.keys, op.slots, ticket.deadline_s, ticket.outcomes, ranks=op.ranks
            )
            ticket.result = TicketResult.of(performed)
        except BaseException as error:  # noqa: BLE001 - any error ends the operation; the thread continues
            ticket.result = ticket.failed(explain(error))
        ticket.done_s = self._tickets.moved_s = self._tier.clock()
        self._done.append(ticket)
