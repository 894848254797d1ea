"""Watch over the files of an open environment: LMDB reads both through maps, which end the process if a file shrank."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tierkv_lmdb.environments.trouble import Trouble

DATA_FILE = "data.mdb"
LOCK_FILE = "lock.mdb"
_LOCK_HEADER_BYTES = 8
"""Length of LMDB's magic number and version at the start of the lock file."""


class FileWatch:
    """Files of one environment, as they were at its opening. May be used on any threads.

    A change of either file is damage: with another lock file, the writer would overwrite pages that readers still use.

    A file that is truncated within a transaction is not noticed in time. Closing any descriptor of ``lock.mdb``
    releases LMDB's own locks, so :meth:`close` comes after the end of the environment.

    Args:
        directory: of the environment, which is open.

    Raises:
        OSError: a file is missing.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.identity = _identity(directory)
        """Device and inode of the directory."""
        self._data, self._lock = str(directory / DATA_FILE), str(directory / LOCK_FILE)
        data, lock = os.stat(self._data), os.stat(self._lock)  # noqa: PTH116  runs before each transaction
        self._data_file, self._lock_file = (data.st_dev, data.st_ino), (lock.st_dev, lock.st_ino)
        self._data_bytes, self._lock_bytes = data.st_size, lock.st_size
        self._lock_fd = os.open(self._lock, os.O_RDONLY | os.O_CLOEXEC)
        self._lock_header = os.pread(self._lock_fd, _LOCK_HEADER_BYTES, 0)
        if len(self._lock_header) < _LOCK_HEADER_BYTES:
            os.close(self._lock_fd)
            raise OSError(f"{self._lock} was read in part")

    def find_trouble(self) -> Trouble | None:
        """Trouble with a file: it was removed, replaced, truncated or overwritten, or cannot be looked at.

        Takes three system calls.
        """
        data_bytes = self._data_bytes  # before the call: the file may grow meanwhile, and another thread may see that
        try:
            data, lock = os.stat(self._data), os.stat(self._lock)  # noqa: PTH116  runs before each transaction
            lock_header = os.pread(self._lock_fd, _LOCK_HEADER_BYTES, 0)
        except (FileNotFoundError, NotADirectoryError) as error:
            return self._absence(f"a file cannot be found ({error})")
        except OSError as error:  # it may pass, and costs no chunk: the next opening checks the file
            return Trouble(f"a file cannot be looked at ({error})", is_damage=False)
        if (data.st_dev, data.st_ino) != self._data_file or (lock.st_dev, lock.st_ino) != self._lock_file:
            return self._absence("a file was replaced")
        for name, size, needed in (
            (self._data, data.st_size, data_bytes),
            (self._lock, lock.st_size, self._lock_bytes),
        ):
            if size < needed:
                _fill_up(name, needed)
                return Trouble(f"{name} was truncated to {size} bytes", is_damage=True)
        if lock_header != self._lock_header:
            is_whole = len(lock_header) == _LOCK_HEADER_BYTES  # otherwise the read failed: the file is long enough
            return Trouble(f"{self._lock} {'was overwritten' if is_whole else 'was read in part'}", is_damage=is_whole)
        self._data_bytes = data.st_size
        return None

    def _absence(self, what: str) -> Trouble:
        """Trouble of a file that is not there: it was removed, or went with its directory, which may return."""
        if _identity(self._directory) != self.identity:
            return Trouble("its directory is not in its place", is_damage=False)
        return Trouble(what, is_damage=True)

    def close(self) -> None:
        """Close the descriptor of the lock file. The environment is closed."""
        os.close(self._lock_fd)


def _identity(directory: Path) -> tuple[int, int] | None:
    """Device and inode of a directory; None: there is none."""
    try:
        status = directory.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _fill_up(name: str, needed: int) -> None:
    """Restore the length of a truncated file: closing the environment accesses its maps once more."""
    with contextlib.suppress(OSError):
        os.truncate(name, needed)
