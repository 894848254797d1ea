"""Calls of vLLM that tierkv refuses, or fails at: logged once per kind, the engine goes on. Does not import vLLM."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from typing import TypeVar

from tierkv.errors import EngineProtocolError
from tierkv.metrics.counters import CoreCounters
from tierkv.stack.core import VALIDATE

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_PARTICULARS = re.compile(r"b?'[^']*'|-?\d+")
"""Names, values and numbers, in which messages of one kind differ."""

KINDS_MAX = 64
"""Kinds that are logged; a bound, should a message contain something else that differs each time."""


def contains_errors() -> bool:
    """Whether errors are kept from vLLM: unless ``TIERKV_VALIDATE=1``, so that tests and debuggers see them."""
    return os.environ.get(VALIDATE) != "1"


def _kind_of(error: Exception) -> str:
    return _PARTICULARS.sub("", str(error) if isinstance(error, EngineProtocolError) else repr(error))


class Refusals:
    """Logs the first refusal of each kind. Engine's thread."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def log(self, error: Exception) -> None:
        """Log an error, unless one of its kind was logged before."""
        refused = isinstance(error, EngineProtocolError)
        kind = _kind_of(error)
        if kind in self._kinds or len(self._kinds) >= KINDS_MAX:
            return
        self._kinds.add(kind)
        _log.error(
            "vLLM goes on without tierkv for this request; further errors of this kind are only counted "
            "(tierkv_requests_dropped_total): %s",
            error if refused else repr(error),
            exc_info=None if refused else error,
        )


class WorkerErrors:
    """Errors in a worker's process, which has no counters: logged once per kind. Worker's thread.

    Args:
        logger: gets the lines.
        contains: whether errors are contained; otherwise they are raised.
    """

    def __init__(self, logger: logging.Logger, *, contains: bool) -> None:
        self._log = logger
        self._contains = contains
        self._kinds: set[str] = set()

    def contain(self, error: Exception, what: str) -> None:
        """Log an error, unless one of its kind was logged before. what: the consequence."""
        if not self._contains:
            raise error
        kind = f"{what}: {_kind_of(error)}"
        if kind not in self._kinds and len(self._kinds) < KINDS_MAX:
            self._kinds.add(kind)
            self._log.error(
                "a worker of tierkv %s, and vLLM goes on; further errors of this kind are not logged: %r",
                what, error, exc_info=error,
            )  # fmt: skip


class Containment:
    """Answer to the errors of one seam. Scheduler's thread.

    An error of a call about one request drops that request. Any other error stops tierkv, because the state of the
    stack is unknown then.

    Args:
        counters: of the stack.
        drop: goes on without tierkv for a request.
        on_stop: called once, at the stop.
        contains: whether errors are contained; otherwise they are raised.
    """

    def __init__(
        self,
        counters: CoreCounters,
        drop: Callable[[str, Exception], None],
        on_stop: Callable[[], None] | None = None,
        *,
        contains: bool = True,
    ) -> None:
        self._counters = counters
        self._drop = drop
        self._on_stop = on_stop
        self._contains = contains
        self._refusals = Refusals()
        self.is_stopped = False
        """Whether tierkv has stopped."""

    def _count(self, error: Exception) -> None:
        if not self._contains:
            raise error
        self._counters.errors_contained += 1

    def drop(self, request_id: str, error: Exception) -> None:
        """Go on without tierkv for a request."""
        self._count(error)
        try:
            self._drop(request_id, error)
        except Exception as second:  # noqa: BLE001 - nothing of tierkv may end the engine
            self.stop(second)

    def stop(self, error: Exception) -> None:
        """Go on without tierkv."""
        if self.is_stopped:
            return
        self._count(error)
        self.is_stopped = True
        if self._on_stop is not None:
            self._on_stop()
        _log.critical(
            "tierkv stopped after an error, and vLLM goes on without it until it restarts "
            "(tierkv_errors_contained_total): %s: %s",
            type(error).__name__,
            error,
            exc_info=error,
        )

    def run(self, call: Callable[[], _T], otherwise: _T) -> _T:
        """Run a call that changes the stack; stop if it fails. ``otherwise`` after a stop."""
        if not self.is_stopped:
            try:
                return call()
            except Exception as error:  # noqa: BLE001 - nothing of tierkv may end the engine
                self.stop(error)
        return otherwise

    def observe(self, call: Callable[[], _T], otherwise: _T) -> _T:
        """Return the result of a call that changes nothing; ``otherwise`` if it fails."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - nothing of tierkv may end the engine
            self.note(error)
            return otherwise

    def note(self, error: Exception) -> None:
        """Count and log an error of a call that changes nothing."""
        self._count(error)
        self._refusals.log(error)
