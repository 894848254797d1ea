"""Opening of tiers side by side, each on a thread of its own: one that hangs keeps neither engine nor others waiting.

A tier that could not be opened is *absent*: the stack serves without it and tries it again
(:class:`tierkv.stack.tier_lifecycle.TierChanges`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from tierkv.abc import AsyncBackend, Backend
from tierkv.config.resolving import ResolvedTier
from tierkv.dispatch.health.breaker import Breaker, State
from tierkv.dispatch.threads.spawn import OneShot, Spawn, start_thread
from tierkv.errors import DeadlineExceededError, NoThreadError
from tierkv.logs.definitions import TIER_OPENED_LATE
from tierkv.logs.stack_log import StackLog
from tierkv.tiers.tier import Tier


class OpenDeadlineError(DeadlineExceededError):
    """A backend was not opened within ``open_deadline_s``."""


class Opening:
    """Opening of one tier on another thread, from :meth:`begin` on. The tier belongs to the caller of :meth:`wait`.

    The caller arranges for :meth:`abandon` before it begins: a key may interrupt it while the thread starts.

    Args:
        name: name of the tier, for messages and the thread.
        open_tier: opens the tier.
        log: receives a line if the tier is opened after it was abandoned.
    """

    def __init__(self, name: str, open_tier: Callable[[], Tier], log: StackLog) -> None:
        self._name = name
        self._log = log
        self._open_tier = open_tier
        self._began_s = time.monotonic()
        self._ended = threading.Event()
        self._lock = threading.Lock()  # guards the three fields below
        self._tier: Tier | None = None
        self._error: BaseException | None = None
        self._is_abandoned = False
        self._is_late = False  # written by the thread that waits

    def begin(self) -> None:
        """Start the thread.

        Raises:
            NoThreadError: the system refuses it.
        """
        start_thread(f"tierkv-{self._name}-open", OneShot(self._run))

    def _run(self) -> None:
        tier, error = None, None
        try:
            tier = self._open_tier()
        except BaseException as fault:  # noqa: BLE001 - raised again by wait
            error = fault
        with self._lock:
            self._tier, self._error = tier, error
            is_abandoned = self._is_abandoned
        self._ended.set()
        if is_abandoned and tier is not None:
            if self._is_late:
                self._log.report(TIER_OPENED_LATE, tier=self._name)
            close_backend(tier.backend)

    @property
    def has_ended(self) -> bool:
        """Whether :meth:`wait` would not wait."""
        return self._ended.is_set()

    def wait(self, deadline_s: float) -> Tier:
        """Wait until the tier is open, up to ``deadline_s`` seconds after the begin.

        Raises:
            OpenDeadlineError: the deadline passed. The opening goes on: wait again, or abandon it.
            BaseException: any error of ``open_tier``.
        """
        if not self._ended.wait(max(0.0, self._began_s + deadline_s - time.monotonic())):
            self._is_late = True
            raise OpenDeadlineError(
                f"tier {self._name!r}: its backend was not opened within {deadline_s:g} seconds; see what it waits for "
                "(a lock, a dead file system, a pipe in the place of a file), or raise open_deadline_s",
                tier=self._name,
            )
        with self._lock:
            tier, self._tier, error = self._tier, None, self._error
        if error is not None:
            raise error
        if tier is None:
            raise RuntimeError(f"tier {self._name!r} was abandoned, or belongs to another caller")
        return tier

    def abandon(self) -> None:
        """Close the tier now, or as soon as it is open, unless it belongs to a caller.

        Waits only where no thread can be started: a tier that stays open is locked.
        """
        with self._lock:
            tier, self._tier, self._is_abandoned = self._tier, None, True
        if tier is not None:
            try:
                start_thread(f"tierkv-{self._name}-close", OneShot(partial(close_backend, tier.backend)))
            except NoThreadError:
                close_backend(tier.backend)


def open_within(name: str, open_tier: Callable[[], Tier], deadline_s: float, log: StackLog) -> Tier:
    """Open one tier on another thread. Waits up to ``deadline_s`` seconds on the caller's.

    Raises:
        OpenDeadlineError: the deadline passed. A backend that is opened later is closed at once, so that its locks are
            released.
        BaseException: any error of ``open_tier``.
    """
    opening = Opening(name, open_tier, log)
    try:
        opening.begin()
        return opening.wait(deadline_s)
    except BaseException:
        opening.abandon()
        raise


class AbsentTier:
    """Tier of a stack's description that could not be opened. Tried again when its breaker allows, one try at a time.

    The engine's thread begins a try, and another thread ends it. The breaker belongs to the engine's thread.

    Args:
        resolved: its description.
        followers: names of the tiers that are searched after it, in order.
        opening: the first try, where it still hangs.
    """

    def __init__(self, resolved: ResolvedTier, followers: tuple[str, ...], opening: Opening | None = None) -> None:
        self.resolved = resolved
        self.name = resolved.config.name
        self.followers = followers
        self.opening = opening
        self.must_be_emptied = False
        """Whether the cache was reset meanwhile: what the tier holds is outdated."""
        self.tries = 1
        """Tries so far."""
        self._breaker = Breaker(self.name, 1, resolved.config.breaker_cooldown_s)
        self._idle = threading.Event()
        self._idle.set()

    def is_due(self, now_s: float) -> bool:
        """Whether the next try may begin."""
        if not self._idle.is_set():
            return False
        if self._breaker.usable:  # the first look: only now the time is known
            self._breaker.trip(now_s)
        elif self._breaker.state is State.HALF_OPEN:
            self._breaker.trial_ended(now_s, answered=False)
        return self._breaker.trial_is_due(now_s) if self.opening is None else self.opening.has_ended

    def try_began(self, now_s: float) -> None:
        """Note the begin of a try that is due."""
        self.tries += 1
        self._idle.clear()
        self._breaker.trial_began(now_s)

    def try_ended(self) -> None:
        """Note the end of a try that failed. Any thread."""
        self._idle.set()

    def abandon(self) -> None:
        """Close what the first try may still open."""
        opening, self.opening = self.opening, None
        if opening is not None:
            opening.abandon()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no try is under way. Returns whether none is."""
        return self._idle.wait(timeout_s)


def close_backend(backend: Backend | AsyncBackend) -> None:
    """Close a backend that will not be used, so that its locks do not outlive the error."""
    result = backend.close()
    if inspect.iscoroutine(result):
        asyncio.run(result)


class UnusedTiers:
    """Opened tiers that no stack uses. Each is closed on a thread of its own: until then it stays locked.

    Args:
        spawn: starts the threads.

    Attributes:
        waiting: tiers for which no thread could be started.
    """

    def __init__(self, spawn: Spawn) -> None:
        self._spawn = spawn
        self.waiting: deque[Tier] = deque()

    def close(self, tier: Tier) -> None:
        """Close a tier, without waiting."""
        self.waiting.append(tier)
        self.close_waiting()

    def close_waiting(self) -> None:
        """Close the tiers that wait, as far as threads can be started at present."""
        with contextlib.suppress(IndexError, RuntimeError):  # another thread may close a late tier at the same time
            while True:
                tier = self.waiting[0]
                self._spawn(f"tierkv-{tier.name}-close", OneShot(partial(close_backend, tier.backend)))
                self.waiting.remove(tier)
