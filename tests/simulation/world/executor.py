"""Simulated time and threads: all work that a stack would run elsewhere happens here, one step after the other.

A simulated thread takes a piece of work, time passes, and then it performs the work. So an operation can be in flight
while its deadline passes, as on a real thread. Durations are passed in. No thread is started, and the computer's clock
is never read.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

from simulation.checks.failure import Violation
from tierkv.dispatch.lanes.async_lane import LoopRunner
from tierkv.dispatch.lanes.lane import IoWorker
from tierkv.dispatch.threads.spawn import Runner, SplitRunner
from tierkv.testing.manual_clock import ManualClock
from tierkv.types.tier_ops import TierOp

QUANTUM_S = 0.004
"""Seconds between two turns of an event loop."""

PAUSE_MIN_S = 0.03
"""Shortest wait of the engine's thread between two looks, at open and close."""

TURNS_MAX = 64
"""Turns of the event loop within one wait; a long wait gets longer quanta."""

IDLE_TURNS = 4
"""Turns without a task after which an event loop is idle."""

WAIT_MAX_S = 120.0
"""Longest wait for copies; none takes that long."""


class SimThread:
    """Runner with its time. ``due_s``: end of its current work, None while it has none."""

    __slots__ = ("_divisible", "due_s", "name", "runner")

    def __init__(self, name: str, runner: Runner) -> None:
        self.name = name
        self.runner = runner
        self._divisible = runner if isinstance(runner, SplitRunner) else None
        self.due_s: float | None = None

    def is_alive(self) -> bool:
        """Whether the runner may still have work."""
        return not self.runner.done

    def begin(self) -> bool:
        """Begin the next piece of work. A runner that cannot be split begins when it is stepped."""
        return not self.runner.done if self._divisible is None else self._divisible.begin()

    def finish(self) -> None:
        """Perform the work that was begun."""
        self.due_s = None
        if self._divisible is None:
            self.runner.step()
        else:
            self._divisible.finish()


class Executor:
    """All threads of one stack, and the clock.

    Its methods are those of :class:`tierkv.dispatch.threads.runtime.Runtime`.

    Args:
        clock: simulated time; moved here alone.
        duration: seconds that the thread of this name needs for what it has just taken; ``math.inf``: it hangs.
    """

    def __init__(self, clock: ManualClock, duration: Callable[[str], float]) -> None:
        self.clock = clock
        self.threads: list[SimThread] = []
        self.loops: list[LoopRunner] = []
        self._duration = duration

    def spawn(self, name: str, runner: Runner) -> SimThread:
        """Start a thread."""
        thread = SimThread(name, runner)
        if isinstance(runner, LoopRunner):
            vars(runner.loop)["time"] = self.clock  # its timers read simulated time
            self.loops.append(runner)
        else:
            self.threads.append(thread)
        return thread

    def engine_sleep(self, seconds: float) -> None:
        """Let the engine's thread wait while others run. It looks less often than a real one, without effect."""
        self.run_until(self.clock.now_s + max(seconds, PAUSE_MIN_S))

    def io_sleep(self, seconds: float) -> None:
        """Do nothing: an I/O thread's wait between two tries takes no simulated time."""

    def wait(self, futures: Collection[Future[Any]]) -> None:
        """Let the engine's thread wait for copies."""
        give_up_s = self.clock.now_s + WAIT_MAX_S
        while not all(future.done() for future in futures):
            if self.clock.now_s >= give_up_s:
                raise Violation("never in the way", f"the engine has waited {WAIT_MAX_S:g} s for copies")
            self.run_until(self.clock.now_s + QUANTUM_S)

    def run_until(self, time_s: float) -> None:
        """Move the clock to ``time_s``, and run everything that is due meanwhile, in order."""
        quantum_s = max(QUANTUM_S, (time_s - self.clock.now_s) / TURNS_MAX)
        while True:
            self._turn()
            now_s = self.clock.now_s
            if now_s >= time_s:
                return
            due_s = min((thread.due_s for thread in self.threads if thread.due_s is not None), default=math.inf)
            step_s = quantum_s if self.loops else math.inf
            self.clock.now_s = min(time_s, now_s + step_s, max(due_s, now_s))

    def _turn(self) -> None:
        """Run everything that is due now."""
        now_s = self.clock.now_s
        due = [thread for thread in self.threads if thread.due_s is not None and thread.due_s <= now_s]
        for thread in sorted(due, key=lambda thread: thread.due_s or 0.0):
            thread.finish()
        for thread in self.threads:
            if thread.due_s is None and thread.is_alive() and thread.begin():
                # Never at the same moment: time must move for the next thing to happen.
                thread.due_s = now_s + max(1e-6, self._duration(thread.name))
        for loop in self.loops:
            if not loop.done and _has_callbacks(loop.loop):
                loop.step()
        self.threads = [thread for thread in self.threads if thread.is_alive() or thread.due_s is not None]

    def release(self, prefix: str) -> None:
        """End hanging calls on threads whose name begins with ``prefix``."""
        for thread in self.threads:
            if thread.due_s == math.inf and thread.name.startswith(prefix):
                thread.due_s = self.clock.now_s

    def ops_under_way(self, prefix: str) -> list[TierOp]:
        """Operations in flight on threads whose name begins with ``prefix``."""
        runners = [thread.runner for thread in self.threads if thread.name.startswith(prefix)]
        return [runner.under_way for runner in runners if isinstance(runner, IoWorker) and runner.under_way is not None]

    def halt(self) -> None:
        """Stop everything: the process has died."""
        self.threads.clear()
        for loop in self.loops:
            idle = 0
            while idle < IDLE_TURNS:  # each call that ends lets the next one in
                tasks = asyncio.all_tasks(loop.loop)
                idle = 0 if tasks else idle + 1
                for task in tasks:
                    task.cancel()
                loop.step()
            loop.stop()
            loop.step()
        self.loops.clear()


def _has_callbacks(loop: Any) -> bool:
    """Whether a turn of an event loop would call anything. Most turns would not, and each costs system calls."""
    if loop._ready:
        return True
    return any(timer._when <= loop.time() + loop._clock_resolution for timer in loop._scheduled[:1])
