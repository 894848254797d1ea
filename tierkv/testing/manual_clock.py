"""Time and threads under a test's control: a clock that the test moves, and runners that it steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tierkv.dispatch.threads.spawn import Runner

THREADS_RUN_S = 0.001
"""Seconds of real time for which :meth:`ManualClock.sleep` lets other threads run."""


@dataclass
class ManualClock:
    """Clock that is constant until it is moved. Call it to read it, in seconds."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        """Current time in seconds."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward."""
        self.now_s += seconds

    def sleep(self, seconds: float) -> None:
        """Move the clock forward, and let other threads run: an ``engine_sleep`` for real threads."""
        self.advance(seconds)
        time.sleep(THREADS_RUN_S)


@dataclass
class SteppedHandle:
    """Runner that runs when it is stepped."""

    name: str
    runner: Runner

    def is_alive(self) -> bool:
        """Whether the runner may still have work."""
        return not self.runner.done


@dataclass
class Stepper:
    """Replacement for threads: pass it as ``spawn`` to a dispatcher, and its ``pause`` as ``engine_sleep``.

    Attributes:
        clock: moved by ``pause``.
        handles: what was started, in order.
        frozen: names of runners that hang: they are not stepped.
    """

    clock: ManualClock
    handles: list[SteppedHandle] = field(default_factory=list)
    frozen: set[str] = field(default_factory=set)

    def __call__(self, name: str, runner: Runner) -> SteppedHandle:
        """Add a runner that :meth:`step` steps."""
        handle = SteppedHandle(name, runner)
        self.handles.append(handle)
        return handle

    def step(self, name: str) -> bool:
        """Step one runner once; returns whether it had work."""
        return any(
            handle.runner.step() for handle in self.handles if handle.name == name and handle.name not in self.frozen
        )

    def step_all(self) -> None:
        """Step every runner once, in the order of their start."""
        for handle in list(self.handles):
            if handle.name not in self.frozen and handle.is_alive():
                handle.runner.step()

    def engine_sleep(self, seconds: float) -> None:
        """Step the runners while the caller waits."""
        self.clock.advance(seconds)
        self.step_all()
