"""A lane: the way of one tier's operations from the engine's thread to its backend and back.

:class:`ThreadLane` has threads of its own, for blocking backends. :class:`~tierkv.dispatch.async_lane.AsyncLane` shares
an event loop.
"""

from __future__ import annotations

import queue
from collections import deque
from typing import Protocol

from tierkv.dispatch.spawn import Handle, OneShot, Spawn
from tierkv.dispatch.ticket import Ticket, TicketQueue, TicketResult
from tierkv.tiers.results import explain
from tierkv.tiers.tier import Tier
from tierkv.types.tier_ops import TierOp


class Lane(Protocol):
    """What the dispatcher needs of a lane. Called on the engine's thread; nothing waits."""

    tier: Tier
    close_error: str

    def offer(self, ticket: Ticket) -> bool:
        """Queue a ticket; it comes back through the deque of finished ones. False if the queue is full."""

    def cancel_overdue(self, ticket: Ticket) -> None:
        """The deadline of a claimed ticket has passed: whatever can be done to end it soon."""

    def stop(self) -> None:
        """End once the queue is empty, as soon as can be: the whole stack does. Nothing is offered any more."""

    def retire(self) -> None:
        """The same where the stack goes on: what runs has its time, since its slots will have other chunks."""

    def running_calls(self) -> int:
        """Calls that are still under way after :meth:`stop` or :meth:`retire`."""

    def close_backend(self) -> None:
        """Begin to close the backend, off the caller's thread."""

    def is_closing(self) -> bool:
        """Whether the backend's close has begun and not ended."""


class ThreadLane:
    """Threads that do nothing but one tier's blocking calls.

    Args:
        tier: whose operations these are.
        threads: how many.
        queue_ops_max: operations that may wait.
        done: where finished tickets go.
        spawn: starts the threads.
    """

    def __init__(self, tier: Tier, threads: int, queue_ops_max: int, done: deque[Ticket], spawn: Spawn) -> None:
        self.tier = tier
        self.close_error = ""
        self._tickets = TicketQueue(queue_ops_max)
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._spawn = spawn
        self._workers: list[Handle] = [
            spawn(f"tierkv-{tier.name}-{number}", IoWorker(tier, self._tickets, self._tokens, done))
            for number in range(threads)
        ]
        self._closer: Handle | None = None

    def offer(self, ticket: Ticket) -> bool:
        """See :class:`Lane`."""
        if not self._tickets.put(ticket):
            return False
        self._tokens.put(True)  # noqa: FBT003 - the queue's own signature
        return True

    def cancel_overdue(self, ticket: Ticket) -> None:
        """A blocking call cannot be ended from outside."""

    def stop(self) -> None:
        """See :class:`Lane`."""
        for _ in self._workers:
            self._tokens.put(False)  # noqa: FBT003 - the queue's own signature

    def retire(self) -> None:
        """See :class:`Lane`."""
        self.stop()

    def running_calls(self) -> int:
        """See :class:`Lane`."""
        return sum(worker.is_alive() for worker in self._workers)

    def close_backend(self) -> None:
        """See :class:`Lane`."""
        try:
            self._closer = self._spawn(f"tierkv-{self.tier.name}-close", OneShot(self._close))
        except RuntimeError as error:  # no thread to be had: that is no reason to raise on the engine's
            self.close_error = explain(error)

    def is_closing(self) -> bool:
        """See :class:`Lane`."""
        return self._closer is not None and self._closer.is_alive()

    def _close(self) -> None:
        try:
            self.tier.close()
        except BaseException as error:  # noqa: BLE001 - a plugin's last word, on a thread that ends here anyway
            self.close_error = explain(error)


class IoWorker:
    """Takes tickets and performs them. One token is one ticket in the queue; a False one means: end.

    Waiting for a token costs nothing, and which ticket it stands for is decided when it is taken: so a load overtakes
    stores that came before it.
    """

    def __init__(self, tier: Tier, tickets: TicketQueue, tokens: queue.SimpleQueue[bool], done: deque[Ticket]) -> None:
        self._tier = tier
        self._tickets = tickets
        self._tokens = tokens
        self._done = done
        self._ticket: Ticket | None = None
        self.done = False

    def run(self) -> None:
        """See :class:`~tierkv.dispatch.spawn.Runner`."""
        while not self.done:
            self._take(more=self._tokens.get())
            self.finish()

    def step(self) -> bool:
        """See :class:`~tierkv.dispatch.spawn.Runner`."""
        begun = self.begin()
        self.finish()
        return begun

    def begin(self) -> bool:
        """See :class:`~tierkv.dispatch.spawn.SplitRunner`."""
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
        if ticket is not None and ticket.claim():
            self._ticket = ticket

    @property
    def under_way(self) -> TierOp | None:
        """What it has taken and not done yet."""
        return None if self._ticket is None else self._ticket.op

    def finish(self) -> None:
        """See :class:`~tierkv.dispatch.spawn.SplitRunner`."""
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            return
        op = ticket.op
        try:
            ticket.result = TicketResult.of(self._tier.perform(op.verb, op.keys, op.slots, op.deadline_s))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the operation ends and the thread goes on
            ticket.result = ticket.failed(explain(error))
        ticket.done_s = self._tier.clock()
        self._done.append(ticket)
