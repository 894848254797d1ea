"""Errors of LMDB and the disk, in words of ours."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import lmdb

from tierkv.errors import BackendError, BackendUnavailableError, OutOfSpaceError
from tierkv.types.keys import Key

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Failures:
    """Makes the errors of one tier."""

    def __init__(self, tier: str, where: Path) -> None:
        self._tier = tier
        self._where = where

    def of(self, what: str, error: lmdb.Error | OSError, key: Key | None = None, size: int = 0) -> BackendError:
        """The error for something that was tried. size: bytes that were to be written."""
        message = f"{self._where}: cannot {what}{' ' + key.hex() if key else ''}: {error}"
        if self._is_full(error, size):
            return OutOfSpaceError(f"{message} (the disk, its quota or the map is full)", tier=self._tier, key=key)
        if isinstance(error, lmdb.ReadersFullError | lmdb.LockError):
            return BackendUnavailableError(message, tier=self._tier, key=key)
        return BackendError(message, tier=self._tier, key=key)

    def error(self, message: str, key: Key | None = None) -> BackendError:
        """One that nobody else found."""
        return BackendError(f"{self._where}: {message}", tier=self._tier, key=key)

    def full(self, message: str, key: Key) -> OutOfSpaceError:
        """There is no room by our own account."""
        return OutOfSpaceError(f"{self._where}: {message}", tier=self._tier, key=key)

    def _is_full(self, error: lmdb.Error | OSError, size: int) -> bool:
        if isinstance(error, lmdb.MapFullError | lmdb.DiskError):
            return True
        # LMDB tells a write cut short by a full disk as an I/O error. Asking for as much room again tells which it was.
        return size > 0 and not _disk_has_room(self._where, size)


def _disk_has_room(directory: Path, size: int) -> bool:
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        return error.errno not in _FULL
    return True
