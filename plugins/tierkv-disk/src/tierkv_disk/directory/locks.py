"""Lock of a namespace directory: one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from tierkv.abc.held_locks import HeldLock
from tierkv.errors import BackendUnavailableError
from tierkv_disk.directory.files import NotOurFileError, open_file, open_lock_file
from tierkv_disk.directory.watch import DirectoryWatch

LOCK_NAME = "lock"


class NamespaceLock:
    """Exclusive use of a namespace directory, until :meth:`release` or the end of the process, not of those it forks.

    The lock file of an open namespace holds the pid; its modification time is the time of the last use.
    """

    def __init__(self, directory: Path, *, note_pid: bool = True, is_use: bool = True) -> None:
        """Take the lock.

        Args:
            directory: of the namespace.
            note_pid: whether to write the pid to the lock file.
            is_use: whether now is the time of the last use, and that of :meth:`release` later.

        Raises:
            BackendUnavailableError: the lock is held; the message names the process that holds it.
            OSError: the lock file cannot be used.
        """
        self._is_use = is_use and note_pid
        self._path = directory / LOCK_NAME
        fd = open_lock_file(self._path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(fd)
            os.close(fd)
            is_own = owner == str(os.getpid())
            holder = "this process: close the other stack" if is_own else f"process {owner}: stop it"
            raise BackendUnavailableError(
                f"{directory} is in use by {holder}, or give this one another `path` "
                "(one stack at a time owns a namespace of a disk tier)"
            ) from None
        except OSError:
            os.close(fd)
            raise
        if note_pid:
            with contextlib.suppress(OSError):  # only messages use the pid; the lock is held without it
                before = os.fstat(fd)
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                if not is_use:
                    os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
        self._held = HeldLock(fd)

    def take_again(self) -> bool:
        """Create and lock the file again after it was removed. Returns False where another process has done so.

        Nothing may release the lock meanwhile.
        """
        try:
            fd = open_file(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            os.dup2(fd, self._held.fd, inheritable=False)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def watch(self, tier: str, clock: Callable[[], float], removed_files: Callable[[], int]) -> DirectoryWatch:
        """Make a watch on the locked directory; arguments as :class:`DirectoryWatch`."""
        return DirectoryWatch(self._path, self._held.fd, tier, clock, removed_files)

    def release(self) -> None:
        """Unlock the directory."""
        if self._is_use:
            with contextlib.suppress(OSError):  # the order of removal suffers; the lock must not stay
                os.utime(self._held.fd)
        self._held.release()


def lock_owner(directory: Path) -> str | None:
    """Pid in the lock file if the lock is held now, otherwise None. Changes nothing."""
    try:
        fd = open_file(directory / LOCK_NAME, os.O_RDWR)
    except (FileNotFoundError, NotOurFileError):
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner(fd)
    else:
        return None
    finally:
        os.close(fd)


def _owner(fd: int) -> str:
    return os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
