"""Count of uses of an environment: it is never unmapped or remapped under a transaction."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tierkv.errors import BackendUnavailableError

EXCLUSIVE_TIMEOUT_S = 1.0
"""Longest wait for exclusive use, in seconds; new uses wait meanwhile. A use lasts as long as the
transaction of a read or a write."""


class EnvironmentGate:
    """Shared and exclusive uses of an environment. May be used on any threads; no lock is held during a use.

    ``release`` runs once, after :meth:`close` and after the last use, on the thread that ends last. ``close`` itself
    therefore never waits.
    """

    def __init__(
        self, name: str, release: Callable[[], None], exclusive_timeout_s: float = EXCLUSIVE_TIMEOUT_S
    ) -> None:
        self._name = name
        self._release = release
        self._exclusive_timeout_s = exclusive_timeout_s
        self._changed = threading.Condition()
        self._uses = 0
        self._exclusive_wanted = False
        self._closed = False

    def enter(self) -> None:
        """Begin a use; waits while an exclusive use is requested or active.

        Raises:
            BackendUnavailableError: closed.
        """
        with self._changed:
            while self._exclusive_wanted and not self._closed:
                self._changed.wait()
            if self._closed:  # it may have been opened afresh meanwhile, so the call is worth another try
                raise BackendUnavailableError(f"{self._name} is closed")
            self._uses += 1

    def leave(self) -> None:
        """End a use."""
        with self._changed:
            self._uses -= 1
            self._changed.notify_all()
            last = self._closed and self._uses == 0
        if last:
            self._release()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Surround a use.

        Raises:
            BackendUnavailableError: closed.
        """
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Request an exclusive use. Not from within a use.

        Yields:
            Whether the use is exclusive. It is not if another use did not end in time, or another thread waits for an
            exclusive use.

        Raises:
            BackendUnavailableError: closed.
        """
        self.enter()
        is_exclusive = False
        with self._changed:
            if not self._exclusive_wanted:
                self._exclusive_wanted = True
                deadline_s = time.monotonic() + self._exclusive_timeout_s
                while self._uses > 1 and (left_s := deadline_s - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                is_exclusive = self._uses == 1
                self._exclusive_wanted = is_exclusive
                self._changed.notify_all()
        try:
            yield is_exclusive
        finally:
            if is_exclusive:
                with self._changed:
                    self._exclusive_wanted = False
            self.leave()

    def close(self) -> None:
        """Refuse further uses. A second close does nothing."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            idle = self._uses == 0
        if idle:
            self._release()
