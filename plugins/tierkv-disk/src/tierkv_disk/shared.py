"""The whole directory of a tier: what all namespaces in it take together, and who has to go when it is too much.

Several stacks, models and ranks share a directory, in several processes. Each growth is decided under one lock, on what
lies there at that moment; so limits hold for all of them together, and after any restart. Namespaces that nobody has
open may be removed, the one unused for longest first; one that is open is never touched by others.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tierkv.errors import BackendUnavailableError
from tierkv_disk.files import temporary_name
from tierkv_disk.locks import LOCK_NAME, NamespaceLock

DIRECTORY_LOCK_NAME = "directory.lock"
LOCK_WAIT_S = 10.0
_POLL_S = 0.005
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
logger = logging.getLogger("tierkv_disk")


@dataclass(frozen=True, slots=True)
class SharedLimits:
    """Of everything below one path, and of the file system around it.

    bytes_max: lengths of all files together, or None. high, low: shares of it. No segment is allocated beyond ``high``;
    where one would be, unused namespaces are removed until the total is at ``low``. min_free_bytes: left free in the
    file system. reclaim: whether unused namespaces may be removed at all.
    """

    bytes_max: int | None
    high: float
    low: float
    min_free_bytes: int
    reclaim: bool


class SharedDirectory:
    """The directory as one of its namespaces sees it. Threads and processes take turns through :meth:`locked`."""

    def __init__(self, path: Path, limits: SharedLimits, tier: str) -> None:
        self.path = path
        self._limits = limits
        self._tier = tier

    @property
    def size(self) -> int:
        """Bytes that everything below may take at most: the limit, or the file system."""
        total = shutil.disk_usage(self.path).total
        return total if self._limits.bytes_max is None else min(total, self._limits.bytes_max)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else enters, grows or removes a namespace meanwhile.

        Raises:
            BackendUnavailableError: somebody holds the lock for long.
            OSError: the lock file cannot be used.
        """
        fd = os.open(self.path / DIRECTORY_LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._wait(fd)
            yield
        finally:
            os.close(fd)

    def room(self, wanted_bytes: int) -> int:
        """How many bytes may be added now; removes unused namespaces if it is less than wanted. Call it locked."""
        room = self._room()
        if room >= wanted_bytes:
            return room
        limits = self._limits
        for directory in self._removable():
            used = used_bytes(self.path)
            low_enough = limits.bytes_max is None or used + wanted_bytes <= limits.low * limits.bytes_max
            if low_enough and self._free() >= wanted_bytes:
                break
            self._remove(directory)
        return self._room()

    def excess(self) -> int:
        """How many bytes there are above ``bytes_max``, after removing unused namespaces. Call it locked."""
        limits = self._limits
        if limits.bytes_max is None:
            return 0
        if used_bytes(self.path) > limits.high * limits.bytes_max:
            for directory in self._removable():
                if used_bytes(self.path) <= limits.low * limits.bytes_max:
                    break
                self._remove(directory)
        return max(0, used_bytes(self.path) - limits.bytes_max)

    def _room(self) -> int:
        limits, free = self._limits, self._free()
        if limits.bytes_max is None:
            return free
        return min(free, int(limits.high * limits.bytes_max) - used_bytes(self.path))

    def _free(self) -> int:
        return shutil.disk_usage(self.path).free - self._limits.min_free_bytes

    def _removable(self) -> list[Path]:
        """Namespaces, the one that was used last at the end. Those that are open are left out when it comes to it."""
        return sorted(namespaces(self.path), key=last_used_s) if self._limits.reclaim else []

    def _remove(self, directory: Path) -> None:
        try:
            lock = NamespaceLock(directory, note_use=False)
        except BackendUnavailableError:
            return
        held = used_bytes(directory)
        try:
            # One step for everybody else; what a kill leaves behind is swept by the next one who opens.
            doomed = directory.rename(self.path / temporary_name(directory.name))
            shutil.rmtree(doomed, ignore_errors=True)
        finally:
            lock.release()
        message = "tier %s: %s is full: removed the namespace %s (%d bytes), which nobody has open"
        logger.warning(message, self._tier, self.path, directory.name, held)

    def _wait(self, fd: int) -> None:
        # In steps, because a blocking flock would wait for ever on a process that is stopped.
        deadline_s = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise BackendUnavailableError(
                        f"{self.path / DIRECTORY_LOCK_NAME} was held by another process for {LOCK_WAIT_S:g} seconds: "
                        "look for one that hangs, or is stopped"
                    ) from None
                time.sleep(_POLL_S)
            else:
                return


def namespaces(path: Path) -> list[Path]:
    """The directories of namespaces below ``path``."""
    with os.scandir(path) as entries:
        return sorted(Path(entry) for entry in entries if _NAMESPACE.fullmatch(entry.name) and entry.is_dir())


def used_bytes(directory: Path) -> int:
    """Lengths of all files below. What vanishes meanwhile counts as gone."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size  # noqa: PTH116, PTH118 - hundreds of files
            except FileNotFoundError:
                continue
    return total


def last_used_s(directory: Path) -> float:
    """When somebody last opened or closed the namespace, as a time of the file system."""
    try:
        return (directory / LOCK_NAME).stat().st_mtime
    except FileNotFoundError:
        return 0.0
