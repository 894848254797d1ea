"""Bounds and bookkeeping of one tier in the dispatcher.

:class:`TierLimits` is what the configuration sets. :class:`TierState` is one tier's record while the dispatcher serves
it: its lane, its breaker, its counters, and how far a detach has come.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tierkv.dispatch.health.breaker import Breaker, State
from tierkv.dispatch.health.failed_reads import FailedReads
from tierkv.dispatch.health.failure_log import FailureLog
from tierkv.dispatch.health.write_gate import WriteGate
from tierkv.dispatch.lanes.lane import Lane
from tierkv.dispatch.lanes.ticket import Ticket, TicketResult
from tierkv.dispatch.scanning import Relisting, Scan
from tierkv.dispatch.stats import Tally, TierStats, io_histograms
from tierkv.metrics.definitions import READ_QUEUE_SECONDS, READ_SECONDS, WRITE_QUEUE_SECONDS, WRITE_SECONDS
from tierkv.metrics.histogram import Histogram
from tierkv.metrics.stack_stats import Series
from tierkv.metrics.watched import TierCondition, TierLoad
from tierkv.types.keys import Key
from tierkv.types.tier_ops import OutcomeKind, TierListing, TierOp, Verb

BREAKER_NUMBERS = {State.CLOSED: 0, State.HALF_OPEN: 1, State.OPEN: 2}
"""State of a breaker as the value of a gauge."""

TRIAL_OP_ID = -1
"""Number of every trial's operation."""

SILENT_FAILURES = 3
"""Failures as which an operation counts that failed late, or missed its deadline, while the tier answered nothing.

Each request that arrives waits for such a tier; with few operations in flight, five of them take several deadlines. One
alone is no hang: it may have lost its connection."""


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Bounds of one tier (promise 6).

    Raises:
        ValueError: a bound is out of range.
    """

    queue_ops_max: int = 4096
    """Operations that may be queued; further ones are refused."""
    io_threads: int | None = None
    """Concurrent calls to the backend. None: the backend's preference, which is also the upper limit."""
    breaker_failures: int = 5
    """Consecutive failed operations that open the breaker."""
    breaker_cooldown_s: float = 5.0
    """Longest time from the opening of the breaker to a trial, in seconds. The first trial is sooner."""
    trial_deadline_s: float = 2.0
    """Seconds within which a trial must be answered."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        threads = 1 if self.io_threads is None else self.io_threads
        if min(self.queue_ops_max, threads, self.breaker_failures) < 1:
            raise ValueError(f"queue_ops_max, io_threads and breaker_failures must be 1 or more: {self}")
        if self.breaker_cooldown_s < 0 or self.trial_deadline_s <= 0:
            raise ValueError(f"breaker_cooldown_s must be 0 or more, trial_deadline_s more than 0: {self}")

    def concurrency(self, preferred: int) -> int:
        """Return the number of concurrent calls for a backend that prefers ``preferred``."""
        return preferred if self.io_threads is None else min(preferred, self.io_threads)


@dataclass(slots=True)
class TierState:
    """Record of one tier that the dispatcher serves. Engine's thread."""

    index: int
    """Number of the tier; never reused within a stack."""
    lane: Lane
    """Path of its operations to the backend."""
    limits: TierLimits
    """Its bounds."""
    breaker: Breaker = field(init=False)
    """Refuses operations while the tier is unusable."""
    writes: WriteGate = field(init=False)
    """Refuses writes while they fail, also if reads succeed."""
    reads: FailedReads = field(init=False)
    """Counts reads that fail, also if other operations succeed."""
    failures: FailureLog = field(init=False)
    """Logs its failures and its service."""
    series: tuple[Series, ...] = field(init=False)
    """The histograms below, with its name."""
    stats: TierStats = field(default_factory=TierStats)
    """Its counters."""
    seconds: dict[Verb, Histogram] = field(default_factory=io_histograms)
    """Duration of reads and writes, from submission to the end of the I/O."""
    queue_seconds: dict[Verb, Histogram] = field(default_factory=io_histograms)
    """Part of it before a call to the backend began."""
    in_flight: int = 0
    """Operations whose I/O has not ended, trials included."""
    writes_in_flight: int = 0
    """Writes among them."""
    late: int = 0
    """Operations in a call whose deadline has passed."""
    detach_by_s: float | None = None
    """Time at which a detached tier's backend is closed at the latest. None: the tier is attached."""
    not_started: list[Ticket] = field(default_factory=list)
    """Operations that were in flight at the detach and may still be refused."""
    close_began: bool = False
    """Whether the close of the backend has begun."""
    answered_s: float = -math.inf
    """Time at which the latest operation that was answered ended."""
    hangs: bool = False
    """Whether it went out of service, the latest time, because it answered nothing."""
    relisting: Relisting | None = None
    """Content of the tier while it is unlisted: its scan at open failed, and it serves nothing. None: it is listed."""

    def __post_init__(self) -> None:
        """Close both breakers, and name the histograms."""
        tier = self.lane.tier
        bounds = (tier.name, self.limits.breaker_failures, self.limits.breaker_cooldown_s)
        self.breaker, self.writes = Breaker(*bounds), WriteGate(*bounds, tier.log)
        self.reads = FailedReads(self.limits.breaker_failures)
        self.failures = FailureLog(tier.name, tier.log)
        self.series = (
            Series(READ_SECONDS, (tier.name,), self.seconds[Verb.READ]),
            Series(READ_QUEUE_SECONDS, (tier.name,), self.queue_seconds[Verb.READ]),
            Series(WRITE_SECONDS, (tier.name,), self.seconds[Verb.WRITE]),
            Series(WRITE_QUEUE_SECONDS, (tier.name,), self.queue_seconds[Verb.WRITE]),
        )

    def refusal(self, verb: Verb, now_s: float) -> str:
        """Return why an operation is refused at present; empty if it may be queued."""
        if self.detach_by_s is not None:
            return "the tier is being detached"
        if not self.breaker.usable:
            return "the tier is not usable at present"
        if verb is Verb.WRITE and not self.writes.may_write(now_s):
            return "the tier cannot be written at present"
        return ""

    def deadline_s(self, ticket: Ticket) -> float:
        """Time at which an operation that has not ended is late. A queue that moves does not count: it is no delay."""
        if self._is_given_up:
            return -math.inf
        if ticket.began_s is not None:
            return ticket.deadline_s
        return max(ticket.submitted_s, self.lane.tickets.moved_s) + ticket.op.timeout_s

    @property
    def _is_given_up(self) -> bool:
        """Whether it left service because it answered nothing. Then nothing waits for it until its deadline."""
        return self.hangs and not self.breaker.usable

    def succeeded(self, ticket: Ticket, tally: Tally, now_s: float) -> None:
        """Count an operation that was answered."""
        op = ticket.op
        self.answered_s = max(self.answered_s, now_s if ticket.done_s is None else ticket.done_s)
        # A successful deletion does not count: each failed write is followed by one, and a disk that accepts no data
        # may still delete some.
        if op.verb is not Verb.DELETE:
            self.breaker.succeeded()
        else:
            is_undeleted = bool(op.keys) and tally.no_space == len(op.keys)
            self.writes.deletion_ended(now_s, tally.faults[OutcomeKind.NO_SPACE][1] if is_undeleted else None)
        if op.verb is Verb.READ and op.keys:
            self.reads.answered(op.keys[-1])
        if op.verb is Verb.WRITE and tally.no_space and not tally.frame_bytes:
            self.writes.found_no_room(op.op_id, now_s, tally.faults[OutcomeKind.NO_SPACE][1])
        elif op.verb is Verb.WRITE:
            self.writes.ended(op.op_id, now_s)
            if op.keys:
                self.reads.written(op.keys[-1])

    def measure(self, ticket: Ticket, elapsed_s: float) -> None:
        """Measure an operation that ended ``elapsed_s`` after its submission, if a call took it."""
        if (verb := ticket.op.verb) in self.seconds and ticket.began_s is not None:
            self.seconds[verb].observe(elapsed_s)
            self.queue_seconds[verb].observe(ticket.began_s - ticket.submitted_s)

    def ended_with_faults(self, verb: Verb, tally: Tally) -> None:
        """Count what the backend has set aside, and log the faults of an operation."""
        self.stats.quarantined = self.lane.tier.quarantined
        self.failures.ended(verb, tally)

    def load(self) -> TierLoad:
        """Return operations that wait and run, at this moment. Any thread."""
        queued, in_flight = len(self.lane.tickets), self.in_flight
        age_s = self.lane.tickets.age_s(self.lane.tier.clock())
        return TierLoad(queued, age_s, max(0, in_flight - queued), self.late, BREAKER_NUMBERS[self.breaker.state])

    def close_backend(self, *, may_wait: bool = False) -> None:
        """Begin to close the backend, unless that has begun; see :meth:`.Lane.close_backend`."""
        if not self.close_began:
            self.close_began = self.lane.close_backend(may_wait=may_wait)

    def runs_on(self, ticket: Ticket) -> None:
        """Count a call whose deadline has passed, and end it early if that is possible."""
        self.late += 1
        self.lane.cancel_overdue(ticket)

    def missed(self, ticket: Ticket, *, is_over: bool) -> None:
        """Count an operation that did not end in time, and log it, unless the tier went out of service before.

        is_over: whether no call took it.
        """
        self.stats.timed_out += len(ticket.op.keys)
        if is_over:
            self.stats.count_op(len(ticket.op.keys))
        if not self._is_given_up:
            self.failures.missed(ticket.op, ticket.op.timeout_s)

    def failed(self, ticket: Ticket, now_s: float, why: str) -> str:
        """Count a failed operation. Returns the reason if the tier went out of service by it, otherwise empty."""
        op = ticket.op
        if ticket.result is not None and ticket.result.tally.is_of_part:
            # What the other parts have is asked for once and not written again, so that such operations follow each
            # other although the others serve. They say nothing about the tier.
            if op.verb is Verb.WRITE:
                self.writes.failed_in_part(op.op_id, now_s)
            return ""
        if op.verb is Verb.WRITE and not self.writes.ended(op.op_id, now_s, why):
            return ""  # known already, and no reason to stop reading
        if op.verb is Verb.DELETE:
            self.writes.deletion_ended(now_s, why)
        was_usable = self.breaker.usable
        # Silent: it took longer than a trial may, and the tier has answered nothing since it was submitted.
        silent_s = (now_s if ticket.done_s is None else ticket.done_s) - ticket.submitted_s
        is_long = ticket.deadline_reported or silent_s >= self.limits.trial_deadline_s
        is_silent = is_long and self.answered_s <= ticket.submitted_s
        if op.verb is Verb.DELETE and not is_silent:
            return ""  # what cannot be written cannot be deleted either, and no reason to stop reading
        self.breaker.failed(now_s, SILENT_FAILURES if is_silent else 1)
        if op.verb is Verb.READ and was_usable and op.keys:
            self.reads.failed(op.keys[-1], ticket.op.timeout_s)
            if self.reads.are_too_many:  # other operations may succeed
                self.breaker.trip(now_s)
        if self.breaker.usable or not was_usable:
            return ""
        self.hangs = is_silent
        if is_silent:
            return f"it has answered nothing for {silent_s:.3g} s, and operations failed, the last with: {why}"
        failed = "reads" if self.reads.are_too_many else "operations"
        return f"{self.limits.breaker_failures} {failed} in a row failed, the last with: {why}"

    def trial(self, key: Key, now_s: float) -> Ticket:
        """Return a trial: a probe of ``key``, or reads if the latest reads failed."""
        keys = self.reads.trial_keys() if self.reads.are_too_many else ()
        if not keys:
            op = TierOp(TRIAL_OP_ID, self.index, Verb.PROBE, (key,), (), self.limits.trial_deadline_s)
        else:
            timeout_s = max(self.limits.trial_deadline_s, self.reads.timeout_s)
            op = TierOp(TRIAL_OP_ID, self.index, Verb.READ, keys, (), timeout_s)
        return Ticket(op, now_s, is_trial=True)

    def trial_ended(self, ticket: Ticket, result: TicketResult | None, now_s: float) -> None:
        """A trial ended. result: None if it missed its deadline."""
        answered = result is not None and result.tally.answered
        if answered and result is not None and ticket.op.verb is Verb.READ:
            answered = self.reads.trial_ended(result.outcomes)
        self.breaker.trial_ended(now_s, answered=answered)

    def scan_failed(self, scan: Scan, now_s: float) -> None:
        """Take the tier out of service until a scan succeeds. A scan that is late counts as the first trial."""
        self.relisting = Relisting(scan)
        self.breaker.trip(now_s)
        if scan.is_running:
            self.breaker.trial_began(now_s)

    def take_listing(self, keys_max: int, now_s: float) -> TierListing | None:
        """Take the next part of the content of an unlisted tier, if a scan has succeeded; see :class:`Relisting`.

        With the last part the tier may be used. After a failed scan the next trial scans again.
        """
        relisting = self.relisting
        if relisting is None or not self.is_being_listed or relisting.is_running:
            return None
        if relisting.has_failed:
            self.breaker.trial_ended(now_s, answered=False)
            return None
        listing = relisting.take(keys_max)
        if listing.is_last:
            self.relisting = None
            self.breaker.trial_ended(now_s, answered=True)
        return listing

    @property
    def is_being_listed(self) -> bool:
        """Whether a scan of an unlisted tier is under way, or its result is being reported."""
        return self.relisting is not None and self.detach_by_s is None and self.breaker.state is State.HALF_OPEN

    @property
    def condition(self) -> TierCondition:
        """Health of the tier."""
        usable = self.breaker.usable
        return TierCondition(usable, usable and self.writes.is_open)

    @property
    def is_busy(self) -> bool:
        """Whether a call to the backend may still run."""
        return bool(self.lane.running_calls()) or (self.relisting is not None and self.relisting.is_running)

    @property
    def has_detached(self) -> bool:
        """Whether all operations, all calls and the close of the backend have ended."""
        return self.close_began and not (self.in_flight or self.is_busy or self.lane.is_closing())


class UnlistedTiers:
    """Tiers whose scan at open failed. Each is scanned again by its trials, and then its content is reported."""

    def __init__(self) -> None:
        self._states: list[TierState] = []

    def __len__(self) -> int:
        """Number of unlisted tiers."""
        return len(self._states)

    @property
    def num_tried(self) -> int:
        """Number of tiers that are being scanned, or whose content is being reported."""
        return sum(state.is_being_listed for state in self._states)

    def add(self, state: TierState, scan: Scan, now_s: float) -> None:
        """Take a tier out of service until a scan succeeds. A scan that is only late counts as its first trial."""
        self._states.append(state)
        state.scan_failed(scan, now_s)

    def take(self, keys_max: int, now_s: float) -> list[TierListing]:
        """Take some of the content of these tiers, for ``keys_max`` key operations. The last part ends a trial."""
        listings = []
        for state in self._states:
            if keys_max > 0 and (listing := state.take_listing(keys_max, now_s)) is not None:
                listings.append(listing)
                keys_max -= listing.num_keys
        self._states = [state for state in self._states if state.relisting and state.detach_by_s is None]
        return listings
