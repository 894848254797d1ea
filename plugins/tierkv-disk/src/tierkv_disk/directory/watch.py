"""Notices that a directory in use was removed, renamed or replaced by another one, and that files in it were removed.

Open files outlive their names: without a look at the names a tier would go on to write into files that no later open
finds. The lock file is looked for, at a bounded rate, because it is created once and kept as long as the directory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from tierkv.abc.logs import plugin_logger
from tierkv.abc.places import has_other_file_system, mount_point_of
from tierkv.errors import BackendUnavailableError

CHECK_S = 1.0
"""Seconds between two looks."""
logger = plugin_logger("tierkv_disk")


class DirectoryWatch:
    """Watch on one locked directory. May be called on several threads; a call may block as long as the file system.

    Args:
        lock_file: path of the lock file.
        lock_fd: descriptor of the locked file.
        tier: name of the tier, for messages.
        clock: monotonic time in seconds.
        removed_files: counts the open segment files that have no name any more.
    """

    def __init__(
        self,
        lock_file: Path,
        lock_fd: int,
        tier: str,
        clock: Callable[[], float],
        removed_files: Callable[[], int] = lambda: 0,
    ) -> None:
        self._path = lock_file
        self._lock_fd = lock_fd
        self._identity = _identity(os.fstat(lock_fd))
        self._directory_identity = _identity(lock_file.parent.stat())
        self._mount_point = mount_point_of(lock_file.parent)
        self._is_directory_lost = False
        self._removed_files = removed_files
        self._files_lost = 0
        self._tier = tier
        self._clock = clock
        self._again_s = clock()
        self._is_lost = False
        self._refusal = ""  # why the lock file could not be looked at, where it may still be there
        self._looking = threading.Lock()

    def look(self, *, at_once: bool = False) -> bool:
        """Look if it is due or wanted at once, and log a change. Returns whether the directory is in its place."""
        if (at_once or self._clock() >= self._again_s) and self._looking.acquire(blocking=False):
            try:
                self._look()
                # A file system that fails once must not cost the writes of a second, and with them the tier's service.
                self._again_s = self._clock() + (0.0 if self._refusal else CHECK_S)
            finally:
                self._looking.release()
        return not self._is_lost

    def is_removed(self) -> bool:
        """Look if it is due. Returns whether the lock file was removed: one that was moved has a name elsewhere."""
        if self.look():
            return False
        try:
            return os.fstat(self._lock_fd).st_nlink == 0
        except OSError:  # it was closed meanwhile, by the end of the tier or by its renewal
            return False

    def has_new_place(self) -> bool:
        """Look if it is due. Returns whether another file system is mounted where that of the directory was."""
        return not self.look() and has_other_file_system(self._mount_point, self._directory_identity[0])

    def take_again(self, take: Callable[[], bool]) -> None:
        """Lock the directory again if its lock file alone was removed. take: returns whether it did, on the descriptor.

        No file can have been created there by another process then: it creates the lock file first, and leaves it.
        """
        if self._has_directory() and take():
            self._identity = _identity(os.fstat(self._lock_fd))
            self.look(at_once=True)

    def require(self, *, at_once: bool = False) -> None:
        """Look if it is due, or wanted at once.

        Raises:
            BackendUnavailableError: the directory is not in its place.
        """
        if not self.look(at_once=at_once):
            raise BackendUnavailableError(self._why())

    def _look(self) -> None:
        try:
            is_lost = _identity(os.lstat(self._path)) != self._identity
            self._refusal = ""
        except FileNotFoundError:
            is_lost, self._refusal = True, ""
        except OSError as error:
            is_lost, self._refusal = True, error.strerror or str(error)
        self._is_directory_lost = is_lost and not self._refusal and not self._has_directory()
        if is_lost and not self._is_lost:
            logger.warning("tier %s: %s; nothing more is stored", self._tier, self._why())
        elif self._is_lost and not is_lost:
            logger.warning("tier %s: %s is in its place again", self._tier, self._path.parent)
        self._is_lost = is_lost
        if not is_lost and (count := self._removed_files()) > self._files_lost:
            self._files_lost = count
            logger.warning(
                "tier %s: %d segment files in %s were removed while they were in use: their chunks are read until the "
                "tier is closed, and are lost then; the file system gets their room back at that moment",
                self._tier,
                count,
                self._path.parent,
            )

    def _has_directory(self) -> bool:
        try:
            return _identity(self._path.parent.stat()) == self._directory_identity
        except OSError:
            return False

    def _why(self) -> str:
        if self._refusal:
            return f"{self._path.parent} cannot be reached while it is in use ({self._refusal}): give this user access"
        if not self._is_directory_lost:
            return (
                f"{self._path} was removed or replaced while it was in use, so that another process may own the "
                "directory: detach and attach the tier, which then has its chunks again"
            )
        return (
            f"{self._path.parent} was removed or replaced while it was in use: "
            "put it back, or detach and attach the tier, which then starts empty; one that is gone, or has another "
            "file system mounted in its place, is begun again"
        )


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
