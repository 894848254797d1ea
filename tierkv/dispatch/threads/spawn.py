"""Start of threads, behind an interface that a simulation can replace.

Work is a :class:`Runner`. The real :func:`start_thread` calls ``run`` on a daemon thread. A simulation keeps the runner
and calls ``step`` at a time of its choice; then no thread is started.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from tierkv.errors import NoThreadError


class Runner(Protocol):
    """Work for a thread of its own."""

    @property
    def done(self) -> bool:
        """Whether no work is left and none can arrive."""

    def run(self) -> None:
        """Work until done. Waits for work."""

    def step(self) -> bool:
        """Do one unit of work; False if none is ready. Never waits for work."""


@runtime_checkable
class SplitRunner(Runner, Protocol):
    """Runner whose unit of work has two halves. ``step`` does both; a simulation lets time pass between them."""

    def begin(self) -> bool:
        """Take one unit of work; False if none is ready. Call only after the previous unit was finished."""

    def finish(self) -> None:
        """Perform the unit that was taken."""


class Handle(Protocol):
    """Started runner. ``threading.Thread`` satisfies it."""

    def is_alive(self) -> bool:
        """Whether it still runs."""


class Spawn(Protocol):
    """Starts runners."""

    def __call__(self, name: str, runner: Runner) -> Handle:
        """Start ``runner``. name: shown in stack dumps."""


def start_thread(name: str, runner: Runner) -> Handle:
    """Start a daemon thread: one that hangs in a plugin must not block the exit of the interpreter.

    Raises:
        NoThreadError: the system refuses it.
    """
    thread = threading.Thread(target=runner.run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise no_thread(name, error) from error
    return thread


def no_thread(name: str, error: RuntimeError) -> NoThreadError:
    """Return the error of a thread that the system refuses."""
    fix = "raise the limit of threads (ulimit -u, or pids.max of the container), or lower io_threads of the tiers"
    return NoThreadError(f"thread {name!r} cannot be started beside {threading.active_count()} others ({error}): {fix}")


class OneShot:
    """Runner that calls one function once."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self.done = False

    def run(self) -> None:
        """Call the function."""
        try:
            self._function()
        finally:
            self.done = True

    def step(self) -> bool:
        """Call the function; False if it was called before."""
        if self.done:
            return False
        self.run()
        return True


POLL_INTERVAL_S = 0.002
"""Seconds between two checks of a condition at open, flush or close. No call of an engine step waits."""


def wait_until(
    condition: Callable[[], bool], timeout_s: float, clock: Callable[[], float], engine_sleep: Callable[[float], None]
) -> bool:
    """Wait on the caller's thread until a condition is true. Returns whether it is.

    The wait ends when ``timeout_s`` have passed on the clock, or when the sleeps add up to ``timeout_s``, whichever is
    first. A clock that does not advance must not cause an endless wait.
    """
    deadline_s, waited_s = clock() + timeout_s, 0.0
    while not condition():
        if waited_s >= timeout_s or clock() >= deadline_s:
            return condition()
        engine_sleep(POLL_INTERVAL_S)
        waited_s += POLL_INTERVAL_S
    return True
