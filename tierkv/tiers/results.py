"""Results of backends, checked and converted to outcomes.

Backends are foreign code. A value they return or an error they raise becomes a key result, never an exception here.
"""

from __future__ import annotations

import errno
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, cast

from tierkv.abc.backend import Entry
from tierkv.errors import (
    BackendError,
    CorruptFrameError,
    OutOfSpaceError,
    PartUnavailableError,
    TierKVError,
    UnreadableFrameError,
)
from tierkv.frames.frame import KEY_BYTES_MAX, CutFrameError, NoFrameError, OtherFrameError
from tierkv.structures.written_order import eviction_order, reordered
from tierkv.tiers.framing import ClearFrameError, NotForThisTierError
from tierkv.tiers.retry import KeyResult
from tierkv.types.keys import Key
from tierkv.types.tier_ops import Outcome, OutcomeKind, TierContent

ERROR_CHARS_MAX = 600
"""Characters of an error text that are kept, because outcomes are logged. Messages end with the fix."""

ENTRIES_AT_ONCE = 500
"""Entries of a scan that are checked at once. Garbage collections visit those that are alive: more take longer."""

_KEY_LENGTHS = frozenset(range(1, KEY_BYTES_MAX + 1))
_FULL = (errno.ENOSPC, errno.EDQUOT)


def checked_results(results: object, count: int, is_allowed: Callable[[object], bool], tier: str) -> list[Any]:
    """Check that a verb returned one result per key, each of an allowed kind.

    Args:
        results: return value of the verb.
        count: number of keys that it was given.
        is_allowed: whether a result other than an exception is valid for the verb.
        tier: name of the tier, for the message.

    Returns:
        The results as a list. Each is an allowed value or an exception.

    Raises:
        BackendError: the backend broke its contract; no result of this batch can be used.
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


def checked_content(entries: Iterable[object], tier: str) -> TierContent:
    """Check the entries of a scan. Written for speed: there may be millions.

    Args:
        entries: return value of the backend's scan.
        tier: name of the tier, for the message.

    Returns:
        The chunks, in the order of :func:`~tierkv.structures.written_order.eviction_order`.

    Raises:
        BackendError: an entry is invalid.
    """
    keys, sizes, ranks, rest = list[Key](), array("Q"), array("Q"), iter(entries)
    while some := [*islice(rest, ENTRIES_AT_ONCE)]:
        columns = _columns_of(some)
        if columns is None:
            wrong = next(entry for entry in some if _columns_of([entry]) is None)
            raise BackendError(f"backend returned the invalid entry {describe(wrong)}", tier=tier)
        keys += columns[0]
        sizes.extend(columns[1])
        ranks.extend(columns[2])
    order = eviction_order(ranks)
    if order is None:
        return TierContent(keys, sizes)
    return TierContent([*map(keys.__getitem__, order.tolist())], reordered(sizes, order), reordered(ranks, order))


def _columns_of(entries: Sequence[object]) -> tuple[Sequence[Key], array[int], array[int]] | None:
    """Keys, bytes and ranks of entries of a scan; None if one of them is invalid. No Python code runs per entry."""
    if not all(issubclass(kind, Entry) for kind in set(map(type, entries))):
        return None
    keys, sizes, ranks = zip(*cast("Sequence[Entry]", entries), strict=True)
    if set(map(type, keys)) != {bytes} or not {*map(len, keys)} <= _KEY_LENGTHS:
        return None
    try:
        return keys, array("Q", sizes), array("Q", ranks)
    except (TypeError, OverflowError):  # no integer, or out of bounds
        return None


def failed_result(error: BaseException) -> KeyResult:
    """Return the result of a key whose operation raised or returned ``error``."""
    if isinstance(error, NotForThisTierError):
        kind = OutcomeKind.REFUSED
    elif isinstance(error, UnreadableFrameError):
        kind = OutcomeKind.UNREADABLE  # not readable here, which does not mean damaged
    elif isinstance(error, CorruptFrameError):
        kind = OutcomeKind.CORRUPT
    elif isinstance(error, OutOfSpaceError) or (isinstance(error, OSError) and error.errno in _FULL):
        kind = OutcomeKind.NO_SPACE
    else:
        kind = OutcomeKind.FAILED
    outcome = Outcome(
        kind,
        error=explain(error),
        is_clear=isinstance(error, ClearFrameError),
        is_of_part=isinstance(error, PartUnavailableError),
    )
    return KeyResult(outcome, retryable=kind is OutcomeKind.FAILED and _may_pass(error))


def damaged_answer(error: CorruptFrameError) -> KeyResult:
    """Return the result of a read from a shared storage whose bytes are not the frame. It is tried again.

    The stored frame may be whole. The network may have damaged the bytes, and the next ones are good. A proxy may have
    ended the answer, or sent a page or another answer in its place: that is a failed read, and no damage.
    """
    if isinstance(error, CutFrameError | NoFrameError | OtherFrameError):
        return KeyResult(Outcome(OutcomeKind.FAILED, error=explain(error)), retryable=True)
    return failed_result(error)._replace(retryable=True)


def explain(error: BaseException) -> str:
    """Return ``Type: message``, cut to ``ERROR_CHARS_MAX`` characters."""
    return f"{type(error).__name__}: {describe(error, str)}"[:ERROR_CHARS_MAX]


def describe(value: object, show: Callable[[object], str] = repr) -> str:
    """Return a short text for a foreign object, whose own methods may raise."""
    try:
        return show(value)[:ERROR_CHARS_MAX]
    except Exception:  # noqa: BLE001  # a plugin's __str__ may raise anything
        return f"({type(value).__name__} that cannot be shown)"


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, TierKVError):
        return error.retryable
    return isinstance(error, ConnectionError | TimeoutError)
