"""Delayed release of resources until the calls in flight have ended.

The framework gives up on a call that hangs, but the call continues. If its file were closed meanwhile, the descriptor's
number could be reused for another file in the middle of a write. Files are therefore closed when the last call ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tierkv.errors import BackendError


class CallGate:
    """Count of calls in flight. ``release`` runs once: at :meth:`close`, or when the last call ends after it."""

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
        """Refuse further calls. Closing twice does nothing."""
        with self._lock:
            idle = not self._closed and self._calls == 0
            self._closed = True
        if idle:
            self._release()

    def _leave(self) -> bool:
        with self._lock:
            self._calls -= 1
            return self._closed and self._calls == 0
