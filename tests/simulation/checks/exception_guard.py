"""Guard of the third promise: no exception reaches the engine, and none is hidden in a log."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from simulation.checks.failure import Violation, demand
from tierkv.errors import InvariantError
from tierkv.tiers.results import explain

FATAL = "never fatal"
INSIDE = "the stack's own invariants"
LOGS = "no error is hidden in a log"


@contextmanager
def guarded(what: str, allowed: str = "") -> Iterator[list[str]]:
    """Run calls of a stack on behalf of ``what``. Yields the errors that were logged and are allowed.

    allowed: text of errors that may be logged here; empty: none.

    Raises:
        Violation: an exception came out of it, or an error was logged. Nothing that tiers do is an error.
    """
    errors = _Errors(allowed)
    logger = logging.getLogger("tierkv")
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(errors)
    try:
        yield errors.allowed_texts
    except Violation:
        raise
    except Exception as error:
        trace = "".join(traceback.format_exception(error)[-6:])
        invariant = INSIDE if isinstance(error, InvariantError) else FATAL
        raise Violation(invariant, f"{what} raised {explain(error)}\n{trace}") from error
    finally:
        logger.removeHandler(errors)
        logger.propagate = propagate
    demand(not errors.texts, LOGS, "; ".join(errors.texts))


class _Errors(logging.Handler):
    """Collects errors that are logged, and keeps other records from the terminal."""

    def __init__(self, allowed: str) -> None:
        super().__init__()
        self._allowed = allowed
        self.texts: list[str] = []
        self.allowed_texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            text = record.getMessage()
            if record.exc_info and record.exc_info[0]:
                text += f": {record.exc_info[0].__name__}: {record.exc_info[1]}"
            (self.allowed_texts if self._allowed and self._allowed in text else self.texts).append(text)
