"""Where threads come from, behind a door small enough for a simulation to stand in it.

Work is a :class:`Runner`. The real :func:`start_thread` calls ``run`` on a daemon thread. A simulation keeps the runner
instead and calls ``step`` when its time has come; then nothing here starts a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, runtime_checkable


class Runner(Protocol):
    """Something to do on a thread of its own."""

    @property
    def done(self) -> bool:
        """Whether there will never be anything to do again."""

    def run(self) -> None:
        """Work until done; waits for work."""

    def step(self) -> bool:
        """Do one thing that can be done now; False if there is none. Never waits for work."""


@runtime_checkable
class SplitRunner(Runner, Protocol):
    """A runner whose steps take time: a simulation lets some pass between the halves of each. ``step`` is both."""

    def begin(self) -> bool:
        """Take something to do; False if there is nothing. Only when the last one is finished."""

    def finish(self) -> None:
        """Do what was taken."""


class Handle(Protocol):
    """A runner that was started. ``threading.Thread`` is one."""

    def is_alive(self) -> bool:
        """Whether it still runs."""


class Spawn(Protocol):
    """Starts runners."""

    def __call__(self, name: str, runner: Runner) -> Handle:
        """Start ``runner``; ``name`` is for people who look at a stack dump."""


def start_thread(name: str, runner: Runner) -> Handle:
    """A daemon thread: one that hangs in a plugin must not keep the interpreter from exiting."""
    thread = threading.Thread(target=runner.run, name=name, daemon=True)
    thread.start()
    return thread


class OneShot:
    """A runner that calls one function once."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self.done = False

    def run(self) -> None:
        """Call it."""
        try:
            self._function()
        finally:
            self.done = True

    def step(self) -> bool:
        """Call it, the first time."""
        if self.done:
            return False
        self.run()
        return True


POLL_INTERVAL_S = 0.002
"""How often a wait at open or close looks again. Nothing on the engine's step path waits."""


def wait_until(
    condition: Callable[[], bool], timeout_s: float, clock: Callable[[], float], engine_sleep: Callable[[float], None]
) -> bool:
    """Wait for a condition on the caller's thread; whether it came true.

    Ends when the clock says so, or when the pauses add up to the timeout, whichever is first: a clock that stands
    still must not make it wait for ever.
    """
    deadline_s, waited_s = clock() + timeout_s, 0.0
    while not condition():
        if waited_s >= timeout_s or clock() >= deadline_s:
            return condition()
        engine_sleep(POLL_INTERVAL_S)
        waited_s += POLL_INTERVAL_S
    return True
