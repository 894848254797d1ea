"""Counts calls in progress, so that nothing is unmapped under a reader."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tierkv.errors import BackendError


class CallGate:
    """Every call of a backend runs inside ``with gate:``.

    ``release`` runs once, after :meth:`close` and after the last call in progress is out: on the thread of whichever
    comes last, so that ``close`` itself never waits.
    """

    def __init__(self, name: str, release: Callable[[], None]) -> None:
        self._name = name
        self._release = release
        self._lock = threading.Lock()
        self._calls = 0
        self._closed = False

    def __enter__(self) -> None:
        """Start a call.

        Raises:
            BackendError: closed.
        """
        with self._lock:
            if self._closed:
                raise BackendError(f"{self._name} is closed")
            self._calls += 1

    def __exit__(self, *exc_info: object) -> None:
        """End a call."""
        with self._lock:
            self._calls -= 1
            last = self._closed and self._calls == 0
        if last:
            self._release()

    def close(self) -> None:
        """Let no further call in. A second close does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            idle = self._calls == 0
        if idle:
            self._release()
