"""An operation on its way through the I/O shell, and the queue in which it waits."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from tierkv.dispatch.stats import Tally
from tierkv.tiers.retry import Performed
from tierkv.types.tier_ops import Outcome, OutcomeKind, TierOp, Verb

PRIORITY = (Verb.READ, Verb.PROBE, Verb.DELETE, Verb.WRITE)
"""Somebody waits for loads; deletions make room; stores can wait."""


@dataclass(frozen=True, slots=True)
class Result:
    """What an I/O thread found out."""

    outcomes: tuple[Outcome, ...]
    tally: Tally
    retries: int

    @classmethod
    def of(cls, performed: Performed) -> Result:
        """Counted here, so that the engine's thread need not."""
        return cls(tuple(performed.outcomes), Tally.of(performed.outcomes), performed.retries)


@dataclass(slots=True, eq=False)
class Ticket:
    """One operation in flight.

    Whoever claims it owns it: an I/O thread, to perform it; or the engine's thread, to cancel it before it began.
    ``result`` and ``done_s``, the time at which the I/O was over, are set once, by the I/O thread, before it hands the
    ticket back. ``announced`` and ``ended`` are the engine's thread's own: its deadline was told as missed; its last
    completion was made.
    """

    op: TierOp
    submitted_s: float
    is_trial: bool = False
    announced: bool = False
    ended: bool = False
    result: Result | None = None
    done_s: float | None = None
    task: asyncio.Task[None] | None = None
    _claim: list[None] = field(default_factory=lambda: [None])

    def claim(self) -> bool:
        """Whether the caller is the first to ask. ``list.pop`` is atomic, so exactly one is."""
        try:
            self._claim.pop()
        except IndexError:
            return False
        return True

    def failed(self, error: str) -> Result:
        """The result where not even a tier could say what went wrong."""
        outcomes = [Outcome(OutcomeKind.FAILED, error=error)] * len(self.op.keys)
        return Result.of(Performed(outcomes))


class TicketQueue:
    """Tickets that wait, by priority, first in first out among equals. Bounded.

    The engine's thread puts, I/O threads take; ``deque.append`` and ``popleft`` are atomic. A cancelled ticket stays
    until it is taken, and counts until then: so a tier that hangs for ever cannot make the queue grow.
    """

    def __init__(self, ops_max: int) -> None:
        self._ops_max = ops_max
        self._waiting: dict[Verb, deque[Ticket]] = {verb: deque() for verb in PRIORITY}
        self._in_order = tuple(self._waiting.values())

    def __len__(self) -> int:
        """How many wait, cancelled ones included."""
        return sum(map(len, self._in_order))

    def put(self, ticket: Ticket) -> bool:
        """Add a ticket; False if the queue is full."""
        if len(self) >= self._ops_max:
            return False
        self._waiting[ticket.op.verb].append(ticket)
        return True

    def take(self) -> Ticket | None:
        """The next ticket, perhaps a cancelled one; None if there is none."""
        for waiting in self._in_order:
            try:
                return waiting.popleft()
            except IndexError:
                continue
        return None
