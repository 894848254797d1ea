"""Opening of backends within a deadline, each on a thread of its own: one that hangs keeps no engine waiting."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable

from tierkv.abc import AsyncBackend, Backend
from tierkv.dispatch.spawn import OneShot, start_thread
from tierkv.errors import DeadlineExceededError
from tierkv.logs.definitions import TIER_OPENED_LATE
from tierkv.logs.stack_log import StackLog


class OpenDeadlineError(DeadlineExceededError):
    """A backend was not opened within ``open_deadline_s``."""


def open_within(
    tier: str, make: Callable[[], Backend | AsyncBackend], deadline_s: float, log: StackLog
) -> Backend | AsyncBackend:
    """Open a backend on another thread. Waits up to ``deadline_s`` seconds on the caller's.

    Args:
        tier: name of the tier, for messages and the thread.
        make: opens the backend.
        deadline_s: seconds. A backend that is opened later is closed at once, so that its locks are released.
        log: receives a line then.

    Raises:
        OpenDeadlineError: the deadline passed.
        BaseException: any error of ``make``.
    """
    opening = _Opening(tier, make, log)
    start_thread(f"tierkv-{tier}-open", OneShot(opening.run))
    return opening.wait(deadline_s)


class _Opening:
    """Opening of one backend. Exactly one of the two threads owns the backend in the end."""

    def __init__(self, tier: str, make: Callable[[], Backend | AsyncBackend], log: StackLog) -> None:
        self._tier = tier
        self._log = log
        self._make = make
        self._ended = threading.Event()
        self._lock = threading.Lock()  # guards the three fields below
        self._backend: Backend | AsyncBackend | None = None
        self._error: BaseException | None = None
        self._is_late = False

    def run(self) -> None:
        backend, error = None, None
        try:
            backend = self._make()
        except BaseException as fault:  # noqa: BLE001 - raised again on the caller's thread
            error = fault
        with self._lock:
            self._backend, self._error = backend, error
            is_late = self._is_late
        self._ended.set()
        if is_late and backend is not None:
            self._log.report(TIER_OPENED_LATE, tier=self._tier)
            close_backend(backend)

    def wait(self, deadline_s: float) -> Backend | AsyncBackend:
        self._ended.wait(deadline_s)
        with self._lock:
            backend, error = self._backend, self._error
            self._is_late = backend is None
        if error is not None:
            raise error
        if backend is None:
            raise OpenDeadlineError(
                f"tier {self._tier!r}: its backend was not opened within {deadline_s:g} seconds; see what it waits for "
                "(a lock, a dead file system, a pipe in the place of a file), or raise open_deadline_s",
                tier=self._tier,
            )
        return backend


def close_backend(backend: Backend | AsyncBackend) -> None:
    """Close a backend that will not be used, so that its locks do not outlive the error."""
    result = backend.close()
    if inspect.iscoroutine(result):
        asyncio.run(result)
