"""Troubles that end an environment: after them it is closed and opened afresh."""

from __future__ import annotations

from typing import NamedTuple

import lmdb

_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.PageFullError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
)
"""Errors that a healthy file never causes."""

_DOUBT = (lmdb.BadDbiError, lmdb.BadTxnError)
"""Errors of a page that was overwritten while it was open: the check at the next opening decides what is lost."""


class Trouble(NamedTuple):
    """Reason why an environment cannot go on."""

    reason: str
    """Cause, for messages."""
    is_damage: bool
    """Whether the stored data is lost: the namespace then starts empty."""

    def __str__(self) -> str:
        """Return the cause."""
        return self.reason


def trouble_of(error: BaseException) -> Trouble | None:
    """Trouble that an error reveals; None if the environment can go on after it.

    LMDB refuses every call after a failed write of a meta page (``MDB_PANIC``). The file itself is whole then.
    """
    if isinstance(error, lmdb.PanicError):
        return Trouble(f"a meta page could not be written ({error})", is_damage=False)
    if isinstance(error, _DAMAGE):
        return Trouble(f"its data is damaged ({error})", is_damage=True)
    if isinstance(error, _DOUBT):
        return Trouble(f"its data may be damaged ({error})", is_damage=False)
    return None
