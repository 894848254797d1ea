"""Ticket of one operation in flight, its result, and the bounded queue in which tickets wait for a lane."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from tierkv.dispatch.stats import Tally
from tierkv.tiers.retry import NOT_TRIED, TIMED_OUT, OpResult
from tierkv.types.tier_ops import OP_KEYS, UNWANTED, Outcome, OutcomeKind, TierOp, Verb

_NOT_ASKED = Outcome(OutcomeKind.REFUSED, error=NOT_TRIED.error)

CHANGES = (Verb.DELETE, Verb.WRITE)
"""Operations that no request waits for, the more urgent ones first: deletions free space, writes can wait."""


@dataclass(frozen=True, slots=True)
class TicketResult:
    """Result of one operation, as computed on an I/O thread."""

    outcomes: tuple[Outcome, ...]
    """One per key, in order."""
    tally: Tally
    """The outcomes, counted."""
    retries: int
    """Tries of a key after its first one, over all keys."""

    @classmethod
    def of(cls, performed: OpResult) -> TicketResult:
        """Count the outcomes here, on the I/O thread, to keep that work off the engine's thread."""
        return cls(tuple(performed.outcomes), Tally.of(performed.outcomes), performed.retries)


@dataclass(slots=True, eq=False)
class Ticket:
    """One operation in flight.

    The thread that claims a ticket owns it: an I/O thread to perform it, or the engine's thread to cancel it before it
    starts.
    """

    op: TierOp
    """The operation."""
    submitted_s: float
    """Time of the submission."""
    is_trial: bool = False
    """Whether the dispatcher itself sends it, to probe a tier whose breaker is half open."""
    deadline_reported: bool = False
    """Whether a missed deadline was reported. Engine's thread."""
    ended: bool = False
    """Whether its last completion was made. Engine's thread."""
    result: TicketResult | None = None
    """Set once, by the I/O thread, before it hands the ticket back."""
    began_s: float | None = None
    """Time at which a call took it. Set by the thread that claims it."""
    done_s: float | None = None
    """Time at which the I/O ended. Set with ``result``."""
    outcomes: list[Outcome] | None = None
    """Of a probe: the outcomes so far. The I/O thread sets each as soon as it is known. None for other operations."""
    _claim: list[None] = field(default_factory=lambda: [None])

    def __post_init__(self) -> None:
        """Prepare to collect the answers to a probe."""
        if self.op.verb is Verb.PROBE:
            self.outcomes = [NOT_TRIED] * len(self.op.keys)

    @property
    def has_answers(self) -> bool:
        """Whether the backend has answered a part of a probe."""
        return any(outcome.kind in {OutcomeKind.OK, OutcomeKind.ABSENT} for outcome in self.outcomes or ())

    def outcomes_at_deadline(self) -> tuple[Outcome, ...]:
        """Outcomes to report at a missed deadline: of a probe, the answers that have arrived."""
        return self.reported([TIMED_OUT] * len(self.op.keys) if self.outcomes is None else self.outcomes)

    def reported(self, outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
        """Outcomes as they are reported. A key of a probe that no call included is REFUSED: nothing is known of it."""
        if self.outcomes is None:
            return tuple(outcomes)
        return tuple([_NOT_ASKED if outcome is NOT_TRIED else outcome for outcome in outcomes])

    @property
    def num_keys(self) -> int:
        """Key operations that its end counts as; see :class:`~tierkv.types.tier_ops.Completion`."""
        return len(self.op.keys) + OP_KEYS

    @property
    def deadline_s(self) -> float:
        """Time by which its call must have ended: the time in the queue does not count."""
        return (self.submitted_s if self.began_s is None else self.began_s) + self.op.timeout_s

    @property
    def queued_s(self) -> float:
        """Seconds before a call took it; 0 if none did."""
        return 0.0 if self.began_s is None else self.began_s - self.submitted_s

    def claim(self) -> bool:
        """Whether the caller is the first to claim it. ``list.pop`` is atomic, so exactly one caller is."""
        try:
            self._claim.pop()
        except IndexError:
            return False
        return True

    def drop_unwanted(self, now_s: float) -> bool:
        """Set the result of a read that nothing waits for any more, without a call. Returns whether it is one.

        On the thread that claimed it.
        """
        if self.op.is_wanted():
            return False
        self.result, self.done_s = TicketResult.of(OpResult([UNWANTED] * len(self.op.keys))), now_s
        return True

    def failed(self, error: str) -> TicketResult:
        """Return a result in which every key failed with ``error``."""
        outcomes = [Outcome(OutcomeKind.FAILED, error=error)] * len(self.op.keys)
        return TicketResult.of(OpResult(outcomes))


class TicketQueue:
    """Bounded queue of tickets. Reads and probes go first, because requests wait for them.

    Among these, a ticket is due when the tier has done as many keys as the ticket's request lacks. So a short load
    passes a long one, which waits at most for as many keys as it has itself; equal ones go first in, first out.

    The engine's thread puts, I/O threads take. Calls of heapq on tuples of numbers and those of deque are atomic, so no
    thread waits for another one. A cancelled ticket stays in the queue, and counts, until a lane takes it. So a tier
    that hangs forever cannot make the queue grow.

    Args:
        ops_max: number of tickets that may wait. As many reads and probes are accepted whatever changes wait.
    """

    def __init__(self, ops_max: int) -> None:
        self._ops_max = ops_max
        self._awaited: list[tuple[int, int, Ticket]] = []  # a heap by due keys and number
        self._changes: dict[Verb, deque[Ticket]] = {verb: deque() for verb in CHANGES}
        self._numbers = itertools.count()
        self._keys_taken = 0
        self._taken: deque[int] = deque()  # keys of awaited tickets that lanes took, not yet added up
        self.moved_s = -math.inf
        """Time at which the latest call of the lane ended, or an unwanted read was dropped. Set by I/O threads."""

    def __len__(self) -> int:
        """Number of waiting tickets, cancelled ones included."""
        return len(self._awaited) + sum(map(len, self._changes.values()))

    def age_s(self, now_s: float) -> float:
        """Seconds for which the oldest ticket has waited; 0 if none waits. O(n)."""
        oldest_s = min((ticket.submitted_s for _, _, ticket in self._awaited.copy()), default=now_s)
        for waiting in self._changes.values():
            try:
                oldest_s = min(oldest_s, waiting[0].submitted_s) if waiting else oldest_s
            except IndexError:  # another thread has just taken the last one
                continue
        return now_s - oldest_s

    def put(self, ticket: Ticket) -> bool:
        """Add a ticket; False if the queue is full."""
        op = ticket.op
        if op.verb in self._changes:
            if len(self) >= self._ops_max:
                return False
            self._changes[op.verb].append(ticket)
            return True
        if len(self._awaited) >= self._ops_max:
            return False
        while self._taken:
            self._keys_taken += self._taken.popleft()
        due = self._keys_taken + (op.turn_chunks or len(op.keys))
        heappush(self._awaited, (due, next(self._numbers), ticket))
        return True

    def take(self) -> Ticket | None:
        """Return the next ticket, which may be a cancelled one; None if the queue is empty."""
        try:
            ticket = heappop(self._awaited)[2]
        except IndexError:
            pass
        else:
            if ticket.op.is_wanted():  # otherwise the lane does not perform it, and it delays no other
                self._taken.append(len(ticket.op.keys))
            return ticket
        for waiting in self._changes.values():
            try:
                return waiting.popleft()
            except IndexError:
                continue
        return None
