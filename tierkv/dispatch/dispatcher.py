"""Dispatcher: performs tier operations on other threads and returns their completions to the engine's thread.

Tickets go down through the lanes and return through one deque. Deadlines, breakers, counters and completions are
handled on the engine's thread, in :meth:`Dispatcher.drain`, without a lock.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from tierkv.dispatch import scanning
from tierkv.dispatch.health.breaker import trial_keys
from tierkv.dispatch.lanes.async_lane import AsyncLane, LoopRunner, start_loop
from tierkv.dispatch.lanes.deadlines import Deadlines
from tierkv.dispatch.lanes.lane import Lane, ThreadLane
from tierkv.dispatch.lanes.ticket import Ticket, TicketResult
from tierkv.dispatch.scanning import ScanResult
from tierkv.dispatch.stats import DispatchStats
from tierkv.dispatch.threads.spawn import Handle, Spawn, start_thread, wait_until
from tierkv.dispatch.tier_state import TierLimits, TierState, UnlistedTiers
from tierkv.metrics.watched import TierCondition
from tierkv.tiers.retry import TIMED_OUT
from tierkv.tiers.tier import Tier
from tierkv.types.tier_ops import Completion, Outcome, OutcomeKind, TierHealth, TierOp, TierReport, Verb


class Dispatcher:
    """All I/O of a stack's lower tiers. Every method runs on the engine's thread.

    ``submit`` and ``drain`` never wait. ``scan_all``, ``flush`` and ``close`` wait within their bounds.

    Args:
        tiers: the tiers in order, the one below the host tier first. ``TierOp.tier`` is an index into it.
        limits: bounds of each tier.
        clock: the stack's clock; deadlines are on it.
        spawn: starts threads.
        engine_sleep: waits on the caller's thread, in the methods that wait.
        close_grace_s: minimum seconds that :meth:`close` gives to threads, to backends and to the event loop, however
            long the writes took.

    Attributes:
        stats: counters.
        close_errors: errors that backends raised when they were closed.

    Raises:
        ValueError: the numbers of tiers and limits differ, or a tier reads another clock.
    """

    def __init__(  # noqa: PLR0913 - three collaborators, and three hooks for tests and simulations
        self,
        tiers: Sequence[Tier],
        limits: Sequence[TierLimits],
        clock: Callable[[], float],
        *,
        spawn: Spawn = start_thread,
        engine_sleep: Callable[[float], None] = time.sleep,
        close_grace_s: float = 1.0,
    ) -> None:
        if len(tiers) != len(limits):
            raise ValueError(f"{len(tiers)} tiers came with {len(limits)} limits")
        self._tiers = tuple(tiers)
        self._clock = clock
        self._spawn = spawn
        self._engine_sleep = engine_sleep
        self._close_grace_s = close_grace_s
        self._done: deque[Ticket] = deque()
        self._outbox: deque[TierReport] = deque()
        self._deadlines = Deadlines()
        self._in_flight = self._trials = 0
        self._trial_keys = trial_keys()
        self._is_closing = False
        self._abandoned: int | None = None
        self._loop: tuple[LoopRunner, Handle] | None = None
        self._tier_states: dict[int, TierState] = {}
        self._detaching: list[TierState] = []
        self._unlisted = UnlistedTiers()
        self.stats = DispatchStats()
        self.close_errors: list[str] = []
        try:
            for index, (tier, limit) in enumerate(zip(tiers, limits, strict=True)):
                self.attach(index, tier, limit)
        except BaseException:
            self.close(0.0)  # of the tiers so far
            raise

    def attach(self, index: int, tier: Tier, limits: TierLimits) -> None:
        """Begin to serve a tier.

        Args:
            index: number of the tier; must not have been used before.
            tier: the tier.
            limits: its bounds.

        Raises:
            ValueError: the tier reads another clock.
        """
        if tier.clock != self._clock:
            raise ValueError(f"tier {tier.name!r} reads another clock than its dispatcher: deadlines would not hold")
        state = self._tier_states[index] = TierState(index, self._open_lane(tier, limits), limits)
        self.stats.tiers[index] = state.stats

    def detach(self, index: int, timeout_s: float) -> None:
        """Begin to detach a tier: refuse new operations. Never waits; :meth:`take_detached` reports the end.

        Waiting operations are refused by :meth:`drain`, some in each step. Running calls have ``timeout_s`` to end, and
        the backend is closed then.
        """
        state = self._tier_states[index]
        state.detach_by_s = self._clock() + timeout_s
        self._detaching.append(state)
        state.not_started = self._deadlines.tickets_of(index)
        state.lane.retire()

    def take_detached(self) -> list[int]:
        """Return the tiers whose detach has completed since the last call. Their numbers are invalid from now on."""
        if self._outbox:  # some of these completions may belong to a detached tier
            return []
        for state in self._detaching:
            if not state.close_began and (not state.is_busy or self._clock() >= (state.detach_by_s or 0.0)):
                state.close_backend()
        detached = [state for state in self._detaching if state.has_detached]
        for state in detached:
            self._detaching.remove(state)
            self._record_close_error(state)
            del self._tier_states[state.index], self.stats.tiers[state.index]
        return [state.index for state in detached]

    def submit(self, op: TierOp) -> None:
        """Queue an operation. :meth:`drain` returns its completion, also if it is refused. O(1)."""
        state, now_s = self._tier_states[op.tier], self._clock()
        if why := "the stack is closing" if self._is_closing else state.refusal(op.verb, now_s):
            self._refuse(op, why)
        elif not self._offer(state, Ticket(op, now_s)):
            self._refuse(op, f"{state.limits.queue_ops_max} operations wait for the tier already")
            state.failures.queue_is_full(op)
        elif op.verb is Verb.WRITE:
            state.writes_in_flight += 1
            state.writes.submitted(op.op_id, now_s)

    def health(self) -> dict[int, TierCondition]:
        """Return the health of each tier."""
        return {index: state.condition for index, state in list(self._tier_states.items())}

    def drain(self, keys_max: int) -> list[TierReport]:
        """Return completions and health changes that count as ``keys_max`` keys together, or at least one."""
        now_s = self._clock()
        if self._in_flight:
            self._collect(keys_max, now_s)
            self._expire(keys_max, now_s)
        for state in self._detaching:
            self._refuse_waiting(state, keys_max)
        if not self._is_closing:
            self._start_trials(now_s)
        reports: list[TierReport] = []
        while self._outbox and keys_max > 0 and (not reports or self._outbox[0].num_keys <= keys_max):
            reports.append(self._outbox.popleft())
            keys_max -= reports[-1].num_keys
        for listing in self._unlisted.take(keys_max, now_s) if self._unlisted and not self._is_closing else ():
            reports.append(listing)
            if listing.is_last:
                self._report_health(self._tier_states[listing.tier], "its content is listed", usable=True)
        return reports

    @property
    def has_reports(self) -> bool:
        """Whether a ``drain`` left reports for the next one, or a tier is not listed."""
        return bool(self._outbox or self._unlisted)

    @property
    def is_behind(self) -> bool:
        """Whether the latest ``drain`` left operations that have ended."""
        return bool(self._outbox or self._done)

    def pending(self) -> int:
        """Number of operations whose I/O has not ended, as of the last ``drain``. Trials are not counted."""
        return self._in_flight - self._trials

    def states(self) -> dict[int, TierState]:
        """Records of the tiers, by number: a copy. Any thread; to be read only."""
        return self._tier_states.copy()

    def pending_trials(self) -> int:
        """Trials of unusable tiers that have not ended."""
        return self._trials + self._unlisted.num_tried

    def scan_all(self, timeout_s: float) -> list[ScanResult]:
        """Scan every tier that supports it. Waits up to ``timeout_s``.

        A tier whose scan fails or times out is unusable until a later scan succeeds; :meth:`drain` reports its content.
        """
        scans = scanning.start_scans(self._tiers, timeout_s, self._clock, self._engine_sleep, self._spawn)
        results = [scanning.result_of(scan, timeout_s) for scan in scans]
        for scan, result in zip(scans, results, strict=True):
            if result.error:
                state = self._tier_states[result.tier]
                self._unlisted.add(state, scan, self._clock())
                self._report_health(state, f"scan failed: {result.error}", usable=False)
        return results

    def flush(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` until no write is queued or under way; not in a step. Returns whether that is so."""

        def written() -> bool:
            now_s = self._clock()
            self._collect(math.inf, now_s)
            self._expire(math.inf, now_s)
            return not any(state.writes_in_flight for state in self._tier_states.values())

        return wait_until(written, timeout_s, self._clock, self._engine_sleep)

    def close(self, timeout_s: float) -> int:
        """Refuse new operations, finish writes, cancel waiting operations and close backends. Idempotent.

        Waits up to ``timeout_s`` for writes and running calls. Threads, backends and the event loop each have
        ``close_grace_s`` beyond that. Calls that still hang are abandoned on their daemon threads.

        Returns:
            Number of abandoned calls. Their completions with ``ended=True`` are never made.
        """
        if self._abandoned is not None:
            return self._abandoned
        self._is_closing = True
        deadline_s = self._clock() + timeout_s
        self.flush(timeout_s)
        self._cancel_waiting()
        states = list(self._tier_states.values())
        lanes = [state.lane for state in states]
        for lane in lanes:
            lane.stop()
        self._wait(lambda: not any(lane.running_calls() for lane in lanes), deadline_s)
        self._report_running()
        for state in states:
            state.close_backend(may_wait=True)
        self._wait(lambda: not any(lane.is_closing() for lane in lanes), deadline_s)
        self._abandoned = sum(lane.running_calls() + lane.is_closing() for lane in lanes)
        for state in states:
            self._record_close_error(state)
        if self._loop is not None:
            runner, handle = self._loop
            runner.stop()
            self._wait(lambda: not handle.is_alive(), deadline_s)
        return self._abandoned

    def _open_lane(self, tier: Tier, limits: TierLimits) -> Lane:
        concurrency = limits.concurrency(tier.capabilities.preferred_concurrency)
        if not tier.is_async:
            return ThreadLane(tier, concurrency, limits.queue_ops_max, self._done, self._spawn)
        self._loop = self._loop or start_loop(self._spawn)
        return AsyncLane(tier, concurrency, limits.queue_ops_max, self._done, self._loop[0])

    def _record_close_error(self, state: TierState) -> None:
        if error := state.lane.close_error:
            self.close_errors.append(f"{state.lane.tier.name}: {error}")
            state.failures.not_closed(error)

    def _offer(self, state: TierState, ticket: Ticket) -> bool:
        """Queue a ticket and watch its deadline; False if the queue is full."""
        if not state.lane.offer(ticket):
            return False
        self._in_flight += 1
        state.in_flight += 1
        self._deadlines.add_ticket(ticket, self._in_flight)
        return True

    def _refuse(self, op: TierOp, why: str) -> None:
        self._tier_states[op.tier].stats.refused += len(op.keys)
        self._outbox.append(Completion(op.op_id, (Outcome(OutcomeKind.REFUSED, error=why),) * len(op.keys)))

    def _collect(self, keys_max: float, now_s: float) -> None:
        """Take finished tickets from the lanes, until they count as ``keys_max`` keys or more."""
        while self._done and keys_max > 0:
            ticket = self._done.popleft()
            keys_max -= ticket.num_keys
            state = self._tier_states[ticket.op.tier]
            # Lanes set it before they hand a ticket back.
            result = ticket.result or ticket.failed("the lane lost the result")
            if ticket.is_trial:
                self._end(state, ticket)
                if not ticket.deadline_reported:
                    self._end_trial(state, now_s, ticket, result)
                continue
            state.stats.count_io(ticket.op.verb, result.tally, result.retries)
            if ticket.deadline_reported:  # late data is never accepted
                self._finish(state, ticket, (TIMED_OUT,) * len(ticket.op.keys), now_s)
                continue
            state.stats.count_outcomes(ticket.op.verb, result.tally)
            if result.tally.faults or result.tally.clear:
                state.ended_with_faults(ticket.op.verb, result.tally)
            self._finish(state, ticket, ticket.reported(result.outcomes), now_s)
            if result.tally.answered or not ticket.op.keys:
                state.succeeded(ticket, result.tally, now_s)
            elif not result.tally.unwanted:
                self._count_failure(state, ticket, now_s, result.outcomes[-1].error or "deadline missed")

    def _expire(self, keys_max: float, now_s: float) -> None:
        """Report missed deadlines, until they count as ``keys_max`` keys or more."""
        while keys_max > 0 and (ticket := self._deadlines.take_overdue(now_s)) is not None:
            state, op = self._tier_states[ticket.op.tier], ticket.op
            if (until_s := state.deadline_s(ticket)) > now_s:
                self._deadlines.postpone(ticket, until_s)
                keys_max -= 1
                continue
            keys_max -= ticket.num_keys
            is_over = ticket.claim()
            ticket.deadline_reported = True
            if is_over:
                self._end(state, ticket)
            else:
                state.runs_on(ticket)
            if ticket.is_trial:
                self._end_trial(state, now_s, ticket, None)
                continue
            state.missed(ticket, is_over=is_over)
            elapsed_s, waited_s = now_s - ticket.submitted_s, ticket.queued_s
            self._outbox.append(Completion(op.op_id, ticket.outcomes_at_deadline(), is_over, elapsed_s, waited_s))
            if not ticket.has_answers:
                self._count_failure(state, ticket, now_s, "deadline missed")

    def _start_trials(self, now_s: float) -> None:
        """Submit a trial to every tier whose breaker has cooled down."""
        for state in self._tier_states.values():
            if state.breaker.usable or state.detach_by_s is not None or not state.breaker.trial_is_due(now_s):
                continue
            state.breaker.trial_began(now_s)
            if state.relisting is not None:
                state.relisting.begin()
                continue
            if self._offer(state, state.trial(next(self._trial_keys), now_s)):
                self._trials += 1
            else:  # the queue is full of operations that no thread took: the same as a missed deadline
                state.breaker.trial_ended(now_s, answered=False)

    def _end_trial(self, state: TierState, now_s: float, ticket: Ticket, result: TicketResult | None) -> None:
        state.trial_ended(ticket, result, now_s)
        if state.breaker.usable:
            self._report_health(state, "a trial was answered", usable=True)

    def _finish(self, state: TierState, ticket: Ticket, outcomes: tuple[Outcome, ...], now_s: float) -> None:
        """Make the last completion of an operation."""
        self._end(state, ticket)
        state.stats.count_op(len(ticket.op.keys))
        # The end of the I/O, not now_s: the time that the engine computes between two steps is not the tier's.
        elapsed_s = (now_s if ticket.done_s is None else ticket.done_s) - ticket.submitted_s
        state.measure(ticket, elapsed_s)
        self._outbox.append(Completion(ticket.op.op_id, outcomes, elapsed_s=elapsed_s, queued_s=ticket.queued_s))

    def _end(self, state: TierState, ticket: Ticket) -> None:
        ticket.ended = True
        self._in_flight -= 1
        state.in_flight -= 1
        state.late -= ticket.deadline_reported and ticket.began_s is not None
        if ticket.is_trial:
            self._trials -= 1
        elif ticket.op.verb is Verb.WRITE:
            state.writes_in_flight -= 1

    def _count_failure(self, state: TierState, ticket: Ticket, now_s: float, why: str) -> None:
        if reason := state.failed(ticket, now_s, why):
            self._report_health(state, reason, usable=False)
            if state.hangs:  # no request waits for the rest of what it was asked
                self._deadlines.hasten(state.index, now_s)

    def _report_health(self, state: TierState, reason: str, *, usable: bool) -> None:
        state.stats.breaker_opens += not usable
        self._outbox.append(TierHealth(state.index, usable, reason))
        state.failures.service_changed(reason, self._clock(), usable=usable)

    def _refuse_waiting(self, state: TierState, keys_max: int) -> None:
        while state.not_started and keys_max > 0:
            ticket = state.not_started.pop()
            keys_max -= ticket.num_keys
            self._cancel(ticket, "the tier is being detached")

    def _cancel_waiting(self) -> None:
        for ticket in self._deadlines.unreported():
            self._cancel(ticket, "the stack is closing")

    def _cancel(self, ticket: Ticket, why: str) -> None:
        if ticket.claim():
            self._end(self._tier_states[ticket.op.tier], ticket)
            if not ticket.is_trial:
                self._refuse(ticket.op, why)

    def _report_running(self) -> None:
        """Report the calls that did not end in time as timed out."""
        now_s = self._clock()
        self._collect(math.inf, now_s)
        for ticket in self._deadlines.unreported():
            ticket.deadline_reported = True
            self._tier_states[ticket.op.tier].late += 1
            if not ticket.is_trial:
                self._tier_states[ticket.op.tier].stats.timed_out += len(ticket.op.keys)
                outcomes, elapsed_s = (TIMED_OUT,) * len(ticket.op.keys), now_s - ticket.submitted_s
                self._outbox.append(Completion(ticket.op.op_id, outcomes, ended=False, elapsed_s=elapsed_s))

    def _wait(self, condition: Callable[[], bool], deadline_s: float) -> None:
        wait_until(condition, max(self._close_grace_s, deadline_s - self._clock()), self._clock, self._engine_sleep)
