"""Total size of a tier's directory over all namespaces, and removal of unused namespaces at the limit.

Several stacks, models and ranks share a directory, in several processes. Each growth is decided under one lock, from
the sizes at that moment. Limits therefore hold for all of them together, and after any restart. Namespaces that no
process has open may be removed, least recently used first; an open namespace is never removed.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tierkv.abc.logs import plugin_logger
from tierkv.errors import BackendUnavailableError
from tierkv.types.sizes import round_size
from tierkv_disk.directory.files import NotOurFileError, is_removed_namespace, open_lock_file, temporary_name
from tierkv_disk.directory.locks import LOCK_NAME, NamespaceLock

DIRECTORY_LOCK_NAME = "directory.lock"
LOCK_WAIT_S = 10.0
_POLL_S = 0.005
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
logger = plugin_logger("tierkv_disk")


@dataclass(frozen=True, slots=True)
class SharedLimits:
    """Limits of everything below one path, and of its file system."""

    bytes_max: int | None
    """Bound of the lengths of all files together; None: no bound."""
    high: float
    """Share of ``bytes_max`` beyond which no segment is allocated."""
    low: float
    """Share of ``bytes_max`` down to which unused namespaces are removed when a segment would exceed ``high``."""
    min_free_bytes: int
    """Bytes to keep free in the file system."""
    reclaim: bool
    """Whether unused namespaces may be removed."""


class SharedDirectory:
    """Directory of all namespaces. Threads and processes take turns through :meth:`locked`."""

    def __init__(self, path: Path, limits: SharedLimits, tier: str) -> None:
        self.path = path
        self._limits = limits
        self._tier = tier

    @property
    def size_bytes(self) -> int:
        """Bytes that all files may take: the limit, or the size of the file system if that is less."""
        total = shutil.disk_usage(self.path).total
        return total if self._limits.bytes_max is None else min(total, self._limits.bytes_max)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock under which namespaces are created, grown and removed.

        Raises:
            BackendUnavailableError: another process held the lock for ``LOCK_WAIT_S``.
            OSError: the lock file cannot be used.
        """
        fd = open_lock_file(self.path / DIRECTORY_LOCK_NAME)
        try:
            self._wait(fd)
            yield
        finally:
            os.close(fd)

    def make_room(self, wanted_bytes: int, reserve_bytes: int = 0) -> int:
        """Bytes that may be added now; removes unused namespaces if they are fewer than wanted. Call it locked.

        reserve_bytes: bytes to keep free in the file system, if they are more than the limit of free bytes.
        """
        room = self._room(reserve_bytes)
        if room >= wanted_bytes:
            return room
        limits = self._limits
        for directory in self._removable():
            used = used_bytes(self.path)
            low_enough = limits.bytes_max is None or used + wanted_bytes <= limits.low * limits.bytes_max
            if low_enough and self._free(reserve_bytes) >= wanted_bytes:
                break
            self._remove(directory)
        return self._room(reserve_bytes)

    @property
    def free_bytes(self) -> int:
        """Free bytes of the file system."""
        return shutil.disk_usage(self.path).free

    def free_space(self) -> str:
        """Say how much the file system has free, and how much of it must stay free."""
        kept = round_size(self._limits.min_free_bytes)
        return f"{round_size(self.free_bytes)} are free on the disk, of which {kept} stay free (min_free_bytes)"

    def reduce_excess(self) -> int:
        """Bytes above ``bytes_max`` that remain after removing unused namespaces. Call it locked."""
        limits = self._limits
        if limits.bytes_max is None:
            return 0
        if used_bytes(self.path) > limits.high * limits.bytes_max:
            for directory in self._removable():
                if used_bytes(self.path) <= limits.low * limits.bytes_max:
                    break
                self._remove(directory)
        return max(0, used_bytes(self.path) - limits.bytes_max)

    def _room(self, reserve_bytes: int) -> int:
        limits, free = self._limits, self._free(reserve_bytes)
        if limits.bytes_max is None:
            return free
        return min(free, int(limits.high * limits.bytes_max) - used_bytes(self.path))

    def _free(self, reserve_bytes: int) -> int:
        return self.free_bytes - max(self._limits.min_free_bytes, reserve_bytes)

    def _removable(self) -> list[Path]:
        """Namespaces, least recently used first. Open ones are skipped by :meth:`_remove`."""
        return sorted(namespaces(self.path), key=last_used_s) if self._limits.reclaim else []

    def _remove(self, directory: Path) -> None:
        held = used_bytes(directory)
        try:
            remove_namespace(directory)
        except (BackendUnavailableError, NotOurFileError):
            return
        message = "tier %s: %s is full: removed the namespace %s (%d bytes), which no process has open"
        logger.warning(message, self._tier, self.path, directory.name, held)

    def _wait(self, fd: int) -> None:
        # In steps, because a blocking flock would wait without end for a process that is stopped.
        deadline_s = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise BackendUnavailableError(
                        f"{self.path / DIRECTORY_LOCK_NAME} was held by another process for {LOCK_WAIT_S:g} seconds: "
                        "look for a process that hangs, or is stopped"
                    ) from None
                time.sleep(_POLL_S)
            else:
                return


def remove_namespace(directory: Path) -> None:
    """Remove the directory of a namespace.

    Raises:
        BackendUnavailableError: a process has it open.
        OSError: it is no such directory, or cannot be removed.
    """
    lock = NamespaceLock(directory, note_pid=False)
    try:
        # A rename is atomic for other processes; the next removal or open removes what a kill leaves behind.
        directory.rename(directory.parent / temporary_name(directory.name))
        finish_removals(directory.parent)
    finally:
        lock.release()


def finish_removals(path: Path) -> int:
    """Remove the files of removed namespaces below ``path`` that are still there. Returns the bytes that went.

    Raises:
        OSError: ``path`` cannot be read.
    """
    gone_bytes = 0
    for doomed in path.iterdir():
        if is_removed_namespace(doomed.name):
            held_bytes = used_bytes(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            gone_bytes += held_bytes - used_bytes(doomed)
    return gone_bytes


def namespaces(path: Path) -> list[Path]:
    """Directories of the namespaces below ``path``."""
    with os.scandir(path) as entries:
        found = [entry for entry in entries if _NAMESPACE.fullmatch(entry.name)]
        return sorted(Path(entry) for entry in found if entry.is_dir(follow_symlinks=False))


def used_bytes(directory: Path) -> int:
    """Sum of the lengths of all files below ``directory``. Files that vanish meanwhile count as 0."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - hundreds of files
            except FileNotFoundError:
                continue
    return total


def last_used_s(directory: Path) -> float:
    """Time of the last open or close of the namespace for use, in seconds of the file system's clock."""
    try:
        return (directory / LOCK_NAME).lstat().st_mtime
    except FileNotFoundError:
        return 0.0
