"""Who uses the environment at this moment: nothing is unmapped, or mapped elsewhere, under a transaction."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tierkv.errors import BackendError

ALONE_TIMEOUT_S = 1.0
"""How long those who want the environment for themselves wait for the others, and keep new ones waiting. A use lasts as
long as reading one frame, or writing one transaction."""


class EnvironmentGate:
    """Counts uses of an environment. May be used on any threads; no lock is held during a use.

    ``release`` runs once, after :meth:`close` and after the last use has ended: on the thread of whichever comes last,
    so that ``close`` itself never waits.
    """

    def __init__(self, name: str, release: Callable[[], None], alone_timeout_s: float = ALONE_TIMEOUT_S) -> None:
        self._name = name
        self._release = release
        self._alone_timeout_s = alone_timeout_s
        self._changed = threading.Condition()
        self._uses = 0
        self._alone_wanted = False
        self._closed = False

    def enter(self) -> None:
        """Begin a use; waits while somebody wants to be alone.

        Raises:
            BackendError: closed.
        """
        with self._changed:
            while self._alone_wanted and not self._closed:
                self._changed.wait()
            if self._closed:
                raise BackendError(f"{self._name} is closed")
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
            BackendError: closed.
        """
        self.enter()
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """A use beside which there is no other. Not from within a use.

        Yields:
            Whether it is so: False where another use did not end in time, or somebody else is waiting to be alone.

        Raises:
            BackendError: closed.
        """
        self.enter()
        is_alone = False
        with self._changed:
            if not self._alone_wanted:
                self._alone_wanted = True
                deadline_s = time.monotonic() + self._alone_timeout_s
                while self._uses > 1 and (left_s := deadline_s - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                is_alone = self._uses == 1
                self._alone_wanted = is_alone
                self._changed.notify_all()
        try:
            yield is_alone
        finally:
            if is_alone:
                with self._changed:
                    self._alone_wanted = False
            self.leave()

    def close(self) -> None:
        """Let no further use begin. A second close does nothing."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            idle = self._uses == 0
        if idle:
            self._release()
