"""What a backend said, checked and put into our words.

This is where foreign code ends: whatever it returns or raises becomes an answer, never an exception of ours.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any

from tierkv.errors import BackendError, CorruptFrameError, OutOfSpaceError, TierKVError, UnreadableFrameError
from tierkv.tiers.framing import NotForThisTierError
from tierkv.tiers.retry import KeyResult
from tierkv.types.tier_ops import Outcome, OutcomeKind

ERROR_CHARS_MAX = 300
"""Longest error text that is kept: an outcome may live in a log line."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


def checked_results(results: object, count: int, is_allowed: Callable[[object], bool], tier: str) -> list[Any]:
    """A backend's results, one per key, none of an impossible kind.

    Args:
        results: what a verb returned.
        count: keys that it was given.
        is_allowed: whether a single result that is no exception is one that the verb may give.
        tier: for the message.

    Raises:
        BackendError: the backend breaks its contract, so nothing that it said of this batch can be believed.
    """
    if not isinstance(results, Sequence) or isinstance(results, str | bytes | bytearray | memoryview):
        raise BackendError(f"backend returned {type(results).__name__} instead of a list of results", tier=tier)
    checked = list(results)
    if len(checked) != count:
        raise BackendError(f"backend returned {len(checked)} results for {count} keys", tier=tier)
    for result in checked:
        if not isinstance(result, BaseException) and not is_allowed(result):
            raise BackendError(f"backend returned the impossible result {describe(result)}", tier=tier)
    return checked


def failed_result(error: BaseException) -> KeyResult:
    """The answer for a key whose operation raised or returned ``error``."""
    if isinstance(error, NotForThisTierError):
        kind = OutcomeKind.REFUSED
    elif isinstance(error, UnreadableFrameError):
        kind = OutcomeKind.UNREADABLE  # not ours to read, and not ours to call damaged
    elif isinstance(error, CorruptFrameError):
        kind = OutcomeKind.CORRUPT
    elif isinstance(error, OutOfSpaceError) or (isinstance(error, OSError) and error.errno in _FULL):
        kind = OutcomeKind.NO_SPACE
    else:
        kind = OutcomeKind.FAILED
    return KeyResult(Outcome(kind, error=explain(error)), retryable=kind is OutcomeKind.FAILED and _may_pass(error))


def explain(error: BaseException) -> str:
    """``Type: message``, of bounded length."""
    return f"{type(error).__name__}: {describe(error, str)}"[:ERROR_CHARS_MAX]


def describe(value: object, show: Callable[[object], str] = repr) -> str:
    """A short text for a foreign object, whose own methods may raise."""
    try:
        return show(value)[:ERROR_CHARS_MAX]
    except Exception:  # noqa: BLE001  # a plugin's __str__ may raise anything, and we are telling of its error
        return f"({type(value).__name__} that cannot be shown)"


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, TierKVError):
        return error.retryable
    return isinstance(error, ConnectionError | TimeoutError)
