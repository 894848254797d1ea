"""The dispatcher: performs tier operations on threads and loops of its own, and tells the engine's thread the outcome.

Tickets go down through the lanes and come back through one deque. Everything else, that is deadlines, breakers,
counters, completions, happens on the engine's thread in :meth:`Dispatcher.drain`, without a lock.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence

from tierkv.dispatch import scanning
from tierkv.dispatch.async_lane import AsyncLane, LoopRunner, start_loop
from tierkv.dispatch.breaker import Breaker
from tierkv.dispatch.deadlines import Deadlines
from tierkv.dispatch.lane import Lane, ThreadLane
from tierkv.dispatch.scanning import ScanResult
from tierkv.dispatch.spawn import Handle, Spawn, start_thread, wait_until
from tierkv.dispatch.stats import DispatchStats, TierStats
from tierkv.dispatch.ticket import Result, Ticket
from tierkv.dispatch.tier_state import TierLimits, TierState
from tierkv.tiers.retry import TIMED_OUT
from tierkv.tiers.tier import Tier
from tierkv.types.keys import make_key
from tierkv.types.tier_ops import Completion, Outcome, OutcomeKind, TierHealth, TierOp, Verb

TRIAL_KEY = make_key(b"tierkv: are you there?", 0)
"""What a half-open breaker asks for. No chunk hash is this text; that it is absent is a fine answer."""

_TRIAL_OP_ID = -1

REFUSED_PER_STEP_MAX = 256
"""Waiting operations of a tier that leaves that are refused in one step: a millisecond's work."""


class Dispatcher:
    """All I/O of a stack's lower tiers. All methods belong to one thread, the engine's.

    ``submit`` and ``drain`` never wait. ``scan_all`` (at open), ``flush`` and ``close`` do, within their bounds.

    Args:
        tiers: the tiers, first below the host first; ``TierOp.tier`` counts them.
        limits: their bounds, one each.
        clock: the stack's clock; deadlines are on it.
        spawn: starts threads.
        engine_sleep: waits on the caller's thread, in the methods that may.
        close_grace_s: seconds that threads, backends and the event loop each get at least in :meth:`close`, however
            long writes took.

    Attributes:
        stats: counters.
        close_errors: what backends said when they were closed.
    """

    def __init__(  # noqa: PLR0913 - three are what it is about, three are doors for tests and simulations
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
        self._pause = engine_sleep
        self._close_grace_s = close_grace_s
        self._done: deque[Ticket] = deque()
        self._outbox: deque[Completion | TierHealth] = deque()
        self._deadlines = Deadlines()
        self._live = 0
        self._trials = 0
        self._is_closing = False
        self._abandoned: int | None = None
        self._loop: tuple[LoopRunner, Handle] | None = None
        self._lines: dict[int, TierState] = {}
        self._leaving: list[TierState] = []
        self.stats = DispatchStats()
        for index, (tier, limit) in enumerate(zip(tiers, limits, strict=True)):
            self.attach(index, tier, limit)
        self.close_errors: list[str] = []

    def attach(self, index: int, tier: Tier, limits: TierLimits) -> None:
        """Begin to serve a tier, under a number that no other has had.

        Raises:
            ValueError: the tier has a clock of its own.
        """
        if tier.clock != self._clock:
            raise ValueError(f"tier {tier.name!r} reads another clock than its dispatcher: deadlines would not hold")
        breaker = Breaker(tier.name, limits.breaker_failures, limits.breaker_cooldown_s)
        line = self._lines[index] = TierState(index, self._open_lane(tier, limits), limits, breaker, TierStats())
        self.stats.tiers[index] = line.stats
        self.stats.seconds[index] = line.seconds

    def detach(self, index: int, timeout_s: float) -> None:
        """Take nothing more for a tier. Never waits; :meth:`take_left` tells when everything in it has ended.

        What no thread has begun is refused, over the next steps if it is much. What runs has ``timeout_s`` to end; then
        the backend is closed under it.
        """
        line = self._lines[index]
        line.leave_by_s = self._clock() + timeout_s
        self._leaving.append(line)
        line.waiting = self._deadlines.of_tier(index)
        self._refuse_waiting(line)
        line.lane.retire()

    def take_left(self) -> list[int]:
        """The detached tiers in which nothing goes on any more. Their numbers mean nothing from now on."""
        for line in self._leaving:
            self._refuse_waiting(line)
        if self._outbox:  # some of it may still be about them
            return []
        for line in self._leaving:
            if not line.close_began and (not line.is_busy or self._clock() >= (line.leave_by_s or 0.0)):
                self._close_backend(line)
        left = [line for line in self._leaving if line.has_left]
        for line in left:
            self._leaving.remove(line)
            self._note_close_error(line)
            for by_index in (self._lines, self.stats.tiers, self.stats.seconds):
                del by_index[line.index]
        return [line.index for line in left]

    def submit(self, op: TierOp) -> None:
        """Take an operation. Its completion comes through :meth:`drain`, also where it is refused. O(1)."""
        line = self._lines[op.tier]
        if self._is_closing:
            self._refuse(op, "the stack is closing")
        elif line.leave_by_s is not None:
            self._refuse(op, "the tier is being detached")
        elif not line.breaker.usable:
            self._refuse(op, "the tier is not usable at present")
        elif not self._start(line, Ticket(op, self._clock())):
            self._refuse(op, f"{line.limits.queue_ops_max} operations wait for the tier already")
        elif op.verb is Verb.WRITE:
            line.writes += 1

    def drain(self, limit: int) -> list[Completion | TierHealth]:
        """At most ``limit`` of what happened since the last call, in order. O(limit), amortised."""
        now_s = self._clock()
        self._collect(limit, now_s)
        self._expire(limit, now_s)
        if not self._is_closing:
            self._try_again(now_s)
        outbox = self._outbox
        return [outbox.popleft() for _ in range(min(limit, len(outbox)))]

    def pending(self) -> int:
        """Operations whose I/O has not ended, as far as this thread has looked."""
        return self._live - self._trials

    def scan_all(self, timeout_s: float) -> list[ScanResult]:
        """Ask every tier that can be scanned what it holds; waits ``timeout_s`` at most.

        A tier whose scan fails or is late is not usable until a trial succeeds; what it held is not known then.
        """
        results = scanning.scan_all(self._tiers, timeout_s, self._clock, self._pause, self._spawn)
        for result in results:
            if result.error:
                line = self._lines[result.tier]
                line.scan = result.handle
                line.breaker.trip(self._clock())
                self._tell_unusable(line, f"scan failed: {result.error}")
        return results

    def flush(self, timeout_s: float) -> bool:
        """Wait until no write is queued or under way; whether that came about. For shutdown, not for a step."""

        def written() -> bool:
            now_s = self._clock()
            self._collect(len(self._done), now_s)
            self._expire(self._live, now_s)
            return not any(line.writes for line in self._lines.values())

        return wait_until(written, timeout_s, self._clock, self._pause)

    def close(self, timeout_s: float) -> int:
        """End everything: refuse new work, finish writes, cancel what waits, close backends. Idempotent.

        Waits at most ``timeout_s`` for writes and running calls, and a grace of one second each for threads, backends
        and the event loop. What hangs beyond that is abandoned on its daemon threads.

        Returns:
            How many calls were abandoned. Their completions with ``ended=True`` never come.
        """
        if self._abandoned is not None:
            return self._abandoned
        self._is_closing = True
        deadline_s = self._clock() + timeout_s
        self.flush(timeout_s)
        self._cancel_waiting()
        lines = list(self._lines.values())
        lanes = [line.lane for line in lines]
        for lane in lanes:
            lane.stop()
        self._wait(lambda: not any(lane.busy() for lane in lanes), deadline_s)
        self._announce_running()
        for line in lines:
            self._close_backend(line)
        self._wait(lambda: not any(lane.closing() for lane in lanes), deadline_s)
        self._abandoned = sum(lane.busy() + lane.closing() for lane in lanes)
        for line in lines:
            self._note_close_error(line)
        if self._loop is not None:
            runner, handle = self._loop
            runner.stop()
            self._wait(lambda: not handle.is_alive(), deadline_s)
        return self._abandoned

    def _open_lane(self, tier: Tier, limits: TierLimits) -> Lane:
        concurrency = limits.concurrency(tier.capabilities.preferred_concurrency)
        if not tier.is_async:
            return ThreadLane(tier, concurrency, limits.queue_ops_max, self._done, self._spawn)
        if self._loop is None:
            self._loop = start_loop(self._spawn)
        return AsyncLane(tier, concurrency, limits.queue_ops_max, self._done, self._loop[0])

    @staticmethod
    def _close_backend(line: TierState) -> None:
        if not line.close_began:
            line.close_began = True
            line.lane.close_backend()

    def _note_close_error(self, line: TierState) -> None:
        if line.lane.close_error:
            self.close_errors.append(f"{line.lane.tier.name}: {line.lane.close_error}")

    def _start(self, line: TierState, ticket: Ticket) -> bool:
        """Queue a ticket and watch its deadline; False if the queue is full."""
        if not line.lane.offer(ticket):
            return False
        self._live += 1
        line.live += 1
        self._deadlines.watch(ticket, self._live)
        return True

    def _refuse(self, op: TierOp, why: str) -> None:
        self._lines[op.tier].stats.refused += len(op.keys)
        refused = Outcome(OutcomeKind.REFUSED, error=why)
        self._outbox.append(Completion(op.op_id, (refused,) * len(op.keys)))

    def _collect(self, limit: int, now_s: float) -> None:
        """Take in at most ``limit`` tickets whose I/O has ended."""
        for _ in range(min(limit, len(self._done))):
            ticket = self._done.popleft()
            line = self._lines[ticket.op.tier]
            result = ticket.result
            if result is None:  # lanes set it before they hand a ticket back; without it nothing is known
                result = ticket.failed("the lane lost the result")
            if ticket.is_trial:
                self._end(line, ticket)
                if not ticket.announced:
                    self._end_trial(line, now_s, result)
                continue
            line.stats.count_io(ticket.op.verb, result.tally, result.retries)
            if ticket.announced:  # late data is never accepted
                self._finish(line, ticket, (TIMED_OUT,) * len(ticket.op.keys), now_s)
                continue
            line.stats.count_outcomes(ticket.op.verb, result.tally)
            self._finish(line, ticket, result.outcomes, now_s)
            if result.tally.answered or not ticket.op.keys:
                # What went well says that the tier is well, but for deletions: each failed write has one behind it, and
                # a disk that takes no data may still forget some.
                if ticket.op.verb is not Verb.DELETE:
                    line.breaker.succeeded(now_s)
            else:
                self._count_failure(line, now_s, result.outcomes[-1].error or "deadline missed")

    def _expire(self, limit: int, now_s: float) -> None:
        """Tell of at most ``limit`` missed deadlines."""
        for ticket in itertools.islice(self._deadlines.overdue(now_s), limit):
            line, op = self._lines[ticket.op.tier], ticket.op
            is_over = ticket.claim()
            ticket.announced = True
            if is_over:
                self._end(line, ticket)
            else:
                line.lane.expired(ticket)
            if ticket.is_trial:
                self._end_trial(line, now_s, None)
                continue
            timed_out = (TIMED_OUT,) * len(op.keys)
            line.stats.timed_out += len(op.keys)
            self._outbox.append(Completion(op.op_id, timed_out, is_over, now_s - ticket.submitted_s))
            if is_over:
                self._count_ended(line, ticket)
            self._count_failure(line, now_s, "deadline missed")

    def _try_again(self, now_s: float) -> None:
        """Send a trial to every tier whose breaker has cooled down."""
        for line in self._lines.values():
            if line.leave_by_s is not None or not line.breaker.trial_is_due(now_s):
                continue
            line.breaker.trial_began(now_s)
            deadline_s = now_s + line.limits.trial_deadline_s
            op = TierOp(_TRIAL_OP_ID, line.index, Verb.PROBE, (TRIAL_KEY,), (), deadline_s)
            if self._start(line, Ticket(op, now_s, is_trial=True)):
                self._trials += 1
            else:  # full of operations that nobody took: as good an answer as a missed deadline
                line.breaker.trial_ended(now_s, answered=False)

    def _end_trial(self, line: TierState, now_s: float, result: Result | None) -> None:
        line.breaker.trial_ended(now_s, answered=result is not None and result.tally.answered)
        if line.breaker.usable:
            self._outbox.append(TierHealth(line.index, usable=True, reason="a trial was answered"))

    def _finish(self, line: TierState, ticket: Ticket, outcomes: tuple[Outcome, ...], now_s: float) -> None:
        """Make the last completion of an operation."""
        self._end(line, ticket)
        self._count_ended(line, ticket)
        # Not until now: the engine computes between two steps, and that would count as the tier's slowness.
        elapsed_s = (now_s if ticket.done_s is None else ticket.done_s) - ticket.submitted_s
        if ticket.op.verb in line.seconds:
            line.seconds[ticket.op.verb].observe(elapsed_s)
        self._outbox.append(Completion(ticket.op.op_id, outcomes, elapsed_s=elapsed_s))

    def _end(self, line: TierState, ticket: Ticket) -> None:
        ticket.ended = True
        self._live -= 1
        line.live -= 1
        if ticket.is_trial:
            self._trials -= 1
        elif ticket.op.verb is Verb.WRITE:
            line.writes -= 1

    @staticmethod
    def _count_ended(line: TierState, ticket: Ticket) -> None:
        line.stats.ops += 1
        line.stats.keys += len(ticket.op.keys)

    def _count_failure(self, line: TierState, now_s: float, why: str) -> None:
        was_usable = line.breaker.usable
        line.breaker.failed(now_s)
        if was_usable and not line.breaker.usable:
            failures = line.limits.breaker_failures
            self._tell_unusable(line, f"{failures} operations in a row failed, the last with: {why}")

    def _tell_unusable(self, line: TierState, reason: str) -> None:
        line.stats.breaker_opens += 1
        self._outbox.append(TierHealth(line.index, usable=False, reason=reason))

    def _refuse_waiting(self, line: TierState) -> None:
        for _ in range(min(len(line.waiting), REFUSED_PER_STEP_MAX)):
            self._cancel(line.waiting.pop(), "the tier is being detached")

    def _cancel_waiting(self) -> None:
        """Refuse everything that no thread has begun."""
        for ticket in self._deadlines.unannounced():
            self._cancel(ticket, "the stack is closing")

    def _cancel(self, ticket: Ticket, why: str) -> None:
        if ticket.claim():
            self._end(self._lines[ticket.op.tier], ticket)
            if not ticket.is_trial:
                self._refuse(ticket.op, why)

    def _announce_running(self) -> None:
        """Tell of calls that did not end in time, as if their deadlines were now."""
        now_s = self._clock()
        self._collect(len(self._done), now_s)
        for ticket in self._deadlines.unannounced():
            ticket.announced = True
            if not ticket.is_trial:
                self._lines[ticket.op.tier].stats.timed_out += len(ticket.op.keys)
                timed_out = (TIMED_OUT,) * len(ticket.op.keys)
                elapsed_s = now_s - ticket.submitted_s
                self._outbox.append(Completion(ticket.op.op_id, timed_out, ended=False, elapsed_s=elapsed_s))

    def _wait(self, condition: Callable[[], bool], deadline_s: float) -> None:
        wait_until(condition, max(self._close_grace_s, deadline_s - self._clock()), self._clock, self._pause)
