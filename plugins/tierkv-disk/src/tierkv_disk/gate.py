"""Closing behind calls that still run.

The framework gives up on a call that hangs, but the call goes on. Were its file closed under it, the descriptor's
number could come to mean another file in the middle of a write. So files close when the last call has left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tierkv.errors import BackendError


class Gate:
    """Counts calls in flight. ``release`` runs once: at :meth:`close`, or when the last call leaves after it."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._lock = threading.Lock()
        self._calls = 0
        self._closed = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Surround a call.

        Raises:
            BackendError: the gate is closed.
        """
        with self._lock:
            if self._closed:
                raise BackendError("the disk tier is closed")
            self._calls += 1
        try:
            yield
        finally:
            if self._leave():
                self._release()

    def close(self) -> None:
        """Let no call in any more. Closing twice does nothing."""
        with self._lock:
            idle = not self._closed and self._calls == 0
            self._closed = True
        if idle:
            self._release()

    def _leave(self) -> bool:
        with self._lock:
            self._calls -= 1
            return self._closed and self._calls == 0
