"""Translation of errors of LMDB and the operating system into errors of the plugin interface."""

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
    """Factory of one tier's errors.

    Args:
        tier: name of the tier.
        where: directory of the namespace, named in every message.
    """

    def __init__(self, tier: str, where: Path) -> None:
        self._tier = tier
        self._where = where

    def from_cause(self, what: str, error: lmdb.Error | OSError, key: Key | None = None, size: int = 0) -> BackendError:
        """Error for a failed action. ``what`` names the action; ``size`` is the number of bytes to be written."""
        message = f"{self._where}: cannot {what}{' ' + key.hex() if key else ''}: {error}"
        if is_full(error, self._where, size):
            return OutOfSpaceError(f"{message} (the disk, its quota or the map is full)", tier=self._tier, key=key)
        if isinstance(error, lmdb.ReadersFullError | lmdb.LockError):
            return BackendUnavailableError(message, tier=self._tier, key=key)
        return BackendError(message, tier=self._tier, key=key)

    def backend_error(self, message: str, key: Key | None = None) -> BackendError:
        """Error that this plugin detected itself."""
        return BackendError(f"{self._where}: {message}", tier=self._tier, key=key)

    def unavailable(self, message: str, key: Key) -> BackendUnavailableError:
        """Error for a call that found the environment in trouble; it is opened afresh."""
        return BackendUnavailableError(f"{self._where}: {message}", tier=self._tier, key=key)

    def out_of_space(self, message: str, key: Key) -> OutOfSpaceError:
        """Error for a write beyond the tier's own limit."""
        return OutOfSpaceError(f"{self._where}: {message}", tier=self._tier, key=key)


def is_full(error: lmdb.Error | OSError, where: Path, size: int) -> bool:
    """Whether an error was caused by a full map or disk. size: bytes that were to be written below ``where``."""
    if isinstance(error, lmdb.MapFullError | lmdb.DiskError):
        return True
    # LMDB reports a write cut short by a full disk as an I/O error. Asking for as much space again decides.
    return size > 0 and not _disk_has_room(where, size)


def unusable_path(error: OSError, path: Path, root: Path, tier: str) -> BackendError:
    """Error for a directory that cannot be used; names the path and the remedy."""
    what = f"{path}: {error.strerror or error}"
    if root not in (path, *path.parents):
        what = f"{root}: cannot be used ({what})"
    return BackendError(f"{what}. Give a directory that this user can create and write", tier=tier)


def _disk_has_room(directory: Path, size: int) -> bool:
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        return error.errno not in _FULL
    return True
