"""Step loop of a stack, flush and release: the part that both kinds of stack hold.

An engine step has three parts. The first call of a step takes in what tiers have completed. The engine's calls reach
the scheduling half, which instructs the manager. The end of the step submits the manager's instructions to dispatch.
A step that only decodes may leave the first and the last part out: see :mod:`~tierkv.stack.rests`. There is no policy
in this module.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import get_args

from tierkv.dispatch.threads.spawn import OneShot, start_thread
from tierkv.errors import EngineProtocolError, wrong_value
from tierkv.manager.contract import ResetScope
from tierkv.stack.counter_watch import INTERVAL_S, CounterWatch
from tierkv.stack.journal import StepJournal
from tierkv.stack.rests import Rests
from tierkv.stack.views.events import StackEvents
from tierkv.stack.wiring import StackWiring
from tierkv.types.waits import bounded_seconds

VALIDATE = "TIERKV_VALIDATE"
"""Environment variable: 1 checks every invariant after every step (slow; for tests and for bug reports)."""

GRACE_S = 1.0
"""Seconds that each part that is released may take beyond the time of a close."""

CLOSE_GRACE_S = 7 * GRACE_S
"""Seconds that a close may take beyond its time: copies of the workers, calls of tiers, their backends, the event loop,
the copy threads and observers have ``GRACE_S`` each, the record and the file of tokens share one."""

CLOSED = "this stack is closed, and can neither load nor store: open another one"
"""Message of a call that begins a step, or flushes, after the close."""

UNCLOSED = (
    "a stack was dropped without close(): pending chunks are lost. Call close(), or use the stack in a `with` block"
)
"""Warning of a stack that was collected open."""

_POLL_S = 0.001


class StackCore:
    """Step loop, flush and release of one stack. Engine's scheduler thread.

    The calls of a step neither wait for a tier nor raise because of one: a broken tier is a miss, and counted.

    Args:
        wiring: the collaborators.
        begin_scheduling: called with the time at which a step begins, after completions are taken in; not in a rest.
        can_wait: whether no request of the scheduling half waits for a tier.
        check: checks every invariant; raises InvariantError.
        journal: records the steps.
        clock: seconds, monotonic.
        sleep: waits on the engine's thread, in :meth:`flush` only.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the composition root hands everything in
        self,
        wiring: StackWiring,
        begin_scheduling: Callable[[float], None],
        can_wait: Callable[[], bool],
        check: Callable[[], None],
        journal: StepJournal,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.wiring = wiring
        """The collaborators."""
        self.events = StackEvents(wiring.manager, wiring.events, wiring.observers, journal)
        """Cache events, taken by the engine."""
        self._manager = wiring.manager
        self._dispatcher = wiring.dispatcher
        self._completions = wiring.manager.budget.share()
        self._begin_scheduling = begin_scheduling
        self._can_wait = can_wait
        self._check = check
        self._journal = journal
        self._is_recorded = journal.is_kept
        self._clock = clock
        self._sleep = sleep
        self._validates = os.environ.get(VALIDATE) == "1"
        self.in_step = False
        """Whether a step has begun and not ended; only this class changes it."""
        self.rests = Rests(
            self._nothing_waits, wiring.counters, wiring.changes.waiting, wiring.manager.fills,
            wiring.arena.num_slots, clock, wiring.rest_steps_max,
        )  # fmt: skip
        """Steps that leave the tiers alone."""
        self._pid = os.getpid()
        self._closed_with: bool | None = None  # the answer of the first close
        self._is_closed = False  # from the end of its write-back on
        self.watch = CounterWatch(wiring.counters, wiring.log, wiring.manager.passages.waiting, self._busy_tiers)
        """Log lines about the counters."""
        self._look_s = clock()  # of the next look at the counters

    def _busy_tiers(self) -> list[str]:
        """Return the tiers with operations under way, those behind their deadlines first, then by the oldest one."""
        names = self.wiring.changes.names
        loads = {names[index]: state.load() for index, state in list(self._dispatcher.states().items())}
        busy = [name for name, load in loads.items() if load.queued_ops or load.running_ops]
        return sorted(busy, key=lambda name: (-loads[name].late_ops, -loads[name].queue_age_s))

    def __del__(self) -> None:
        """Warn of a stack that is collected open, and release it: its threads and locks would stay for ever.

        Any thread, at any moment, so the release is made on a thread of its own. Nothing is written back. Simulated
        threads end with their executor. A process made by ``os.fork`` has neither its threads nor its locks.
        """
        if getattr(self, "_look_s", None) is None or self._closed_with is not None or sys.is_finalizing():
            return  # construction failed, or the stack is closed, or the process ends
        if self.wiring.spawn is not start_thread or self._pid != os.getpid():
            return
        self._closed_with = False
        start_thread("tierkv-dropped-stack", OneShot(self._release))
        warnings.warn(UNCLOSED, ResourceWarning, stacklevel=2)

    def _release(self) -> None:
        with contextlib.ExitStack() as releases:
            self._add_releases(releases, self._clock())

    # -- step --------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Take in what tiers have completed, once per step; a later call in the same step does nothing.

        Raises:
            EngineProtocolError: the stack is closed.
        """
        if not self.in_step:
            if self._is_closed:
                raise EngineProtocolError(CLOSED)
            self.in_step = True
            self.rests.left = 0
            if self._is_recorded:
                self._journal.step_began()
            self._take_in()
            self._begin_scheduling(self._clock())

    def _take_in(self) -> None:
        manager, now_s = self._manager, self._clock()
        manager.begin_step(now_s)
        for completion in self._dispatcher.drain(self._completions.left):
            self._completions.take(completion.num_keys)
            if self._is_recorded:
                self._journal.completion(completion)
            manager.on_completion(completion)
        manager.step.is_behind = self._dispatcher.is_behind
        self.wiring.changes.apply()
        if now_s >= self._look_s:
            self._look_s = now_s + INTERVAL_S
            self.watch.look()

    def end_step(self, *, decodes: bool) -> None:
        """Submit the step's instructions; the next call of the engine begins a new step.

        A step that was never begun is a rest: its instructions wait. decodes: the step only decodes, so that a rest may
        follow it.
        """
        if self.in_step:
            self.in_step = False
            self.submit_ops()
            if decodes:
                self.rests.step_ended()
        elif self._validates:
            self._check()

    def _nothing_waits(self) -> bool:
        """Whether nothing in scheduler, manager, dispatch and changes of tiers waits for the next step."""
        wiring = self.wiring
        if not self._can_wait() or wiring.changes.pending or self._dispatcher.has_reports:
            return False
        return self._manager.can_wait()

    def update_time(self) -> None:
        """Update the manager's time between steps: a step may be long, and what moves now did not move at its begin."""
        self._manager.set_time(self._clock())

    def submit_ops(self) -> None:
        """Submit the manager's instructions to dispatch, and forward events. Also between steps."""
        for op in self._manager.take_ops():
            if self._is_recorded:
                self._journal.op_began(op)
            self._dispatcher.submit(op)
        if self.events.needs_every_step:
            self.events.forward()
        if self._validates:
            self._check()
        if self._is_recorded:
            self._journal.hand_over()

    def cache_was_reset(self, scope: ResetScope) -> None:
        """Submit the instructions of a reset. With "all", absent tiers are emptied as they join."""
        self.rests.left = 0
        if scope == "all":
            self.wiring.changes.cache_was_reset()
        self.submit_ops()

    # -- the end -----------------------------------------------------------------------------------------------------

    def flush(self, timeout_s: float, collect_reports: Callable[[float], object]) -> bool:
        """Write every pending chunk to the tiers below. Not for the engine's step path: it waits.

        Args:
            timeout_s: seconds to wait.
            collect_reports: takes in the reports of workers; called first, with the seconds that it may take.

        Returns:
            Whether all chunks were written in time, and none was dropped or failed meanwhile.

        Raises:
            EngineProtocolError: ``timeout_s`` is no number of seconds, or the stack is closed; nothing was done.
        """
        timeout_s = bounded_seconds("flush", timeout_s)
        if self._is_closed:
            raise EngineProtocolError(CLOSED)
        counters = self.wiring.counters
        self._manager.flush()  # counts what was lost before
        deadline_s, lost = self._clock() + timeout_s, counters.lost_below
        collect_reports(timeout_s)
        self._manager.flush()
        while True:
            self._take_in()
            self.submit_ops()
            if not self._manager.has_pending_changes:
                return counters.lost_below == lost
            if self._clock() >= deadline_s:
                return False
            self._sleep(_POLL_S)

    def close(self, timeout_s: float, write_back: Callable[[float], bool]) -> bool:
        """Write everything back, then release threads, files and memory. Idempotent.

        It ends within ``timeout_s`` and :data:`CLOSE_GRACE_S`. A release that fails keeps no other from being made.

        Args:
            timeout_s: seconds for everything together.
            write_back: stores and flushes what is pending; returns whether all of it reached its tiers.

        Returns:
            The answer of ``write_back``; a second call repeats it.

        Raises:
            EngineProtocolError: ``timeout_s`` is no number of seconds; the stack stays open.
        """
        timeout_s = bounded_seconds("close", timeout_s)
        if self._closed_with is None:
            self._closed_with = False
            self._manager.flush()  # counts what was lost before
            began_s, began = self._clock(), self.watch.written_and_lost()
            deadline_s = began_s + timeout_s
            with contextlib.ExitStack() as releases:
                releases.callback(lambda: self._log_end(began_s, began))
                self._add_releases(releases, deadline_s)
                releases.callback(self._end)
                is_written = write_back(timeout_s)
                self._closed_with = is_written and self.watch.written_and_lost()[1] == began[1]
        return self._closed_with

    def _end(self) -> None:
        """Refuse every further step. The first one of a closed stack would offer chunks that nothing can load."""
        self._is_closed, self.in_step = True, False

    def _log_end(self, began_s: float, began: tuple[int, int]) -> None:
        abandoned, seconds = self._dispatcher.close(0.0), self._clock() - began_s
        self.watch.closed(began, abandoned, seconds, complete=self._closed_with is True)

    def _add_releases(self, releases: contextlib.ExitStack, deadline_s: float) -> None:
        """Add the releases, the last one first."""

        def left_s(grace_s: float = GRACE_S) -> float:
            return max(grace_s, deadline_s - self._clock())

        wiring = self.wiring
        releases.callback(lambda: self._journal.close(left_s(GRACE_S / 2)))
        releases.callback(lambda: wiring.events.close(left_s(GRACE_S / 2)))
        if wiring.shared is not None:
            releases.callback(wiring.shared.close)
        releases.callback(wiring.arena.close)
        releases.callback(wiring.population.stop)
        releases.callback(lambda: wiring.observers.finish(left_s()))
        for copies in wiring.copies:
            releases.callback(lambda copies: copies.close(left_s(GRACE_S / len(wiring.copies))), copies)
        releases.callback(wiring.changes.close)
        releases.callback(lambda: self._dispatcher.close(left_s(0.0)))
        for worker in wiring.workers:
            releases.callback(lambda worker: worker.shutdown(left_s(GRACE_S / len(wiring.workers))), worker)


def check_scope(scope: object) -> None:
    """Refuse a scope of a reset that there is not: a misspelt one would empty the host tier alone.

    Raises:
        EngineProtocolError: it is neither "host" nor "all".
    """
    if scope not in get_args(ResetScope):
        raise wrong_value("reset_cache", "scope", scope, "give 'host', or 'all' for every tier")
