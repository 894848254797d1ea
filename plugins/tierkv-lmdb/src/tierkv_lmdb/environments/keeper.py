"""Keeper of a namespace's environment: closes one that cannot go on, and opens it afresh."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Protocol

import lmdb

from tierkv.abc.logs import plugin_logger
from tierkv.errors import BackendError, BackendUnavailableError, TierKVError
from tierkv_lmdb.environments.environment import Environment, Release
from tierkv_lmdb.environments.trouble import Trouble

PAUSE_MIN_S, PAUSE_MAX_S = 0.1, 0.5
"""Shortest and longest pause before an environment is opened afresh, in seconds. The first time there is none. A tier
that is out of service is tried less often than that, so each trial opens it."""
STEADY_S = 5.0
"""Time after which an open environment counts as healthy, in seconds: the next pause is none again."""
_log = plugin_logger(__name__)


class Opener(Protocol):
    """Function that opens the environment of one namespace."""

    def __call__(self, release: Release, trouble: Trouble | None) -> Environment:
        """Open it; after damage, start empty.

        Args:
            release: called once, when the environment has been closed.
            trouble: why the previous environment was closed; None for the first one.

        Raises:
            BackendError: it cannot be opened.
            lmdb.Error: it cannot be opened.
            OSError: the directory cannot be used.
        """


class EnvironmentKeeper:
    """Environment of one namespace. May be used on any threads.

    An environment in trouble is closed. It ends with the last call in flight. The next call opens it afresh, on its
    own thread; calls meanwhile are refused. Attempts that fail are repeated after growing pauses.

    Args:
        name: name of the tier, for messages.
        open_environment: opens the environment.
        release: called once, when the last environment has been closed.
        clock: monotonic time in seconds.

    Raises:
        BackendError: the environment cannot be opened.
        lmdb.Error: the environment cannot be opened.
        OSError: the directory cannot be used.
    """

    def __init__(
        self,
        name: str,
        open_environment: Opener,
        release: Release,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._open = open_environment
        self._release = release
        self._clock = clock
        self._mutex = threading.Lock()
        self._is_open = False
        self._is_opening = False
        self._is_closed = False
        self._is_released = False
        self._all_synced = True
        self._trouble: Trouble | None = None
        self._refusal = ""  # why the last attempt to open it afresh failed
        self._pause_s = 0.0
        self._next_try_s = 0.0
        self.restarts = 0
        self._env: Environment | None = self._open(self._ended, None)
        self._is_open = True
        self._opened_s = clock()

    def current(self) -> Environment:
        """Environment in service, opened afresh by this call if necessary.

        Raises:
            BackendUnavailableError: it cannot be opened at present.
            BackendError: closed.
        """
        env = self._env
        if env is not None and env.is_sound():
            return env
        with self._mutex:
            if self._is_closed:
                raise BackendError(f"{self._name} is closed")
            if self._env is not None and self._env is not env:
                return self._env  # opened by another thread meanwhile
            failed = self._retire()
        if failed is not None:
            with contextlib.suppress(OSError):  # its device may report the failure once more
                failed.close()  # not under the lock: it may end here, and waits for the disk
        self._claim()
        try:
            return self._reopen()
        finally:
            with self._mutex:
                self._is_opening = False
            self._release_when_over()

    def close(self) -> None:
        """Refuse further calls. Closes the environment now, or when the last call in flight has ended."""
        with self._mutex:
            self._is_closed = True
            env = self._env
        if env is not None:
            env.close()
        self._release_when_over()

    def _retire(self) -> Environment | None:
        """Take an environment in trouble out of service. Returns it; None if another thread has done so."""
        env, self._env = self._env, None
        if env is None:
            return None
        self._trouble = env.trouble
        now_s = self._clock()
        self._pause_s = 0.0 if now_s - self._opened_s >= STEADY_S or not self.restarts else self._longer_pause()
        self._next_try_s = now_s + self._pause_s
        return env

    def _claim(self) -> None:
        """Make this thread the one that opens the environment."""
        with self._mutex:
            if self._is_open:
                raise BackendUnavailableError(f"calls in flight still use the failed environment: {self._trouble}")
            if self._is_opening or self._env is not None or self._clock() < self._next_try_s:
                raise BackendUnavailableError(
                    self._refusal or f"the environment is to be opened afresh: {self._trouble}"
                )
            self._is_opening = True

    def _reopen(self) -> Environment:
        try:
            env = self._open(self._ended, self._trouble)
        except (TierKVError, lmdb.Error, OSError) as error:
            with self._mutex:
                self._pause_s = self._longer_pause()
                self._next_try_s = self._clock() + self._pause_s
                is_first, self._refusal = not self._refusal, f"the environment cannot be opened afresh: {error}"
            if is_first:
                _log.warning("tier %s: %s; it was closed: %s", self._name, self._refusal, self._trouble)
            raise BackendUnavailableError(self._refusal) from error
        with self._mutex:
            trouble = self._trouble
            self._env, self._trouble, self._refusal = env, None, ""
            self._is_open = True
            self._opened_s = self._clock()
            self.restarts += 1
            is_closed = self._is_closed
        outcome = "empty" if trouble and trouble.is_damage else "opened afresh"
        _log.warning("tier %s: %s: in service again, %s: %s", self._name, env.path, outcome, trouble)
        if is_closed:
            env.close()
        return env

    def _longer_pause(self) -> float:
        return min(max(PAUSE_MIN_S, 2 * self._pause_s), PAUSE_MAX_S)

    def _ended(self, *, synced: bool) -> None:
        with self._mutex:
            self._is_open = False
            self._all_synced &= synced
        self._release_when_over()

    def _release_when_over(self) -> None:
        with self._mutex:
            is_over = self._is_closed and not (self._is_open or self._is_opening or self._is_released)
            self._is_released |= is_over
        if is_over:
            self._release(synced=self._all_synced)
