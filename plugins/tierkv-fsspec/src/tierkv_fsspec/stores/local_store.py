"""Store in a directory, possibly shared: atomic, flushed writes, which fsspec's own local file system lacks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from tierkv.abc.places import has_other_file_system, make_private_directory, mount_point_of
from tierkv_fsspec.stores.store import (
    FOLDER_CHARS,
    HEAD_BYTES,
    SHORT_BYTES_MAX,
    TEMPORARY,
    ListedObject,
    TooLongError,
    short,
)

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
"""Answers of file systems without hard links, such as FAT, SMB and some of FUSE."""
_TEMPORARY_NAME = re.compile(r"[0-9a-f]{32}")
T = TypeVar("T")
SWEEP_S = 60.0
"""Seconds between two sweeps, and for which a temporary file must be known before it is removed without a lock."""
LISTED_AT_ONCE = 1000
"""Files per page of a listing."""
STALE_S = 3600.0
"""Age in seconds at which a temporary file is removed where files cannot be locked."""


class LocalStore:
    """Objects as files below ``root``. Opening, and writes from time to time, remove temporary files of dead writers.

    A writer holds a lock on its temporary file until it is renamed; the system ends the lock with the process. A link,
    a directory or a pipe in place of an object counts as absent. A directory that was removed is made again, but not
    where its file system was unmounted: objects would fill the one below the mount point.

    Args:
        root: directory of the objects.
        clock: time in seconds as in the modification times of files.
        monotonic: time in seconds for the pauses between sweeps.
    """

    is_remote = False

    def __init__(
        self,
        root: Path,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = root
        self._temporary = root / TEMPORARY
        self._mounted = _mounted_at(root)
        self._clock = clock
        self._monotonic = monotonic
        self._first_seen_s: dict[str, float] = {}
        self._sweep_at_s = monotonic()
        self._sweep_if_due()

    def exists(self, name: str) -> bool:
        """Whether the file exists."""
        try:
            return stat.S_ISREG((self._root / name).lstat().st_mode)
        except FileNotFoundError:
            return False

    def read(self, name: str) -> bytes:
        """Read the file, up to one byte too many."""
        with os.fdopen(_open(self._root / name), "rb") as file:
            return short(file.read(SHORT_BYTES_MAX + 1))

    def read_into(self, name: str, buffer: memoryview) -> int:
        """Read a file straight into the buffer; reads run without the GIL."""
        fd = _open(self._root / name)
        try:
            size = os.fstat(fd).st_size
            if size > len(buffer):
                raise TooLongError(size, len(buffer))
            done = 0
            while done < size:
                got = os.preadv(fd, [buffer[done:size]], done)
                if got == 0:
                    break
                done += got
            return done
        finally:
            os.close(fd)

    def holds_same(self, name: str, data: memoryview) -> bool:
        """Compare the length by stat and the head by one read."""
        try:
            fd = _open(self._root / name)
        except FileNotFoundError:
            return False
        try:
            return os.fstat(fd).st_size == len(data) and os.pread(fd, HEAD_BYTES, 0) == data[:HEAD_BYTES]
        finally:
            os.close(fd)

    def write(self, name: str, data: memoryview) -> None:
        """Write a temporary file, flush it, rename it."""
        with self._written(data) as temporary:
            self._with_parent(self._root / name, temporary.replace)

    def create(self, name: str, data: bytes | memoryview) -> bool:
        """Write a temporary file, flush it, link it: the link fails if the name exists.

        Without hard links it is renamed if the name is absent. Of two writers at once the later one then wins.
        """
        with self._written(memoryview(data)) as temporary:
            try:
                self._with_parent(self._root / name, lambda target: os.link(temporary, target))
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_HARD_LINKS:
                    raise
                if os.path.lexists(self._root / name):
                    return False
                self._with_parent(self._root / name, temporary.replace)
        return True

    def delete(self, name: str) -> None:
        """Unlink the file."""
        (self._root / name).unlink(missing_ok=True)

    def list_names(self) -> Iterator[Sequence[str]]:
        """List nothing: a lookup here is as cheap as a hint."""
        return iter(())

    def close(self) -> None:
        """Release nothing."""

    def list_objects(self) -> Iterator[Sequence[ListedObject]]:
        """List one directory at a time."""
        for folder in sorted(self.list_children()):
            if len(folder) == FOLDER_CHARS:
                with contextlib.suppress(FileNotFoundError), os.scandir(self._root / folder) as entries:
                    yield from _pages(entries, folder)

    def list_children(self) -> Iterator[str]:
        """List the directories of the root."""
        with os.scandir(self._root) as entries:
            yield from (entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def read_head(self, name: str) -> bytes:
        """Read the first page of the file."""
        fd = _open(self._root / name)
        try:
            return os.pread(fd, HEAD_BYTES, 0)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _written(self, data: memoryview) -> Iterator[Path]:
        """Write and flush a temporary file. It is locked, and removed at the end if it still has its name."""
        self._sweep_if_due()
        temporary = self._temporary / uuid.uuid4().hex
        fd = self._with_parent(temporary, lambda path: os.open(path, _NEW, 0o600))
        try:
            with contextlib.suppress(OSError):  # a file system without locks: the age decides
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], done)
            os.fsync(fd)
            yield temporary
        finally:
            with contextlib.suppress(OSError):  # the bytes are stored, or refused, without it; a later sweep removes it
                temporary.unlink(missing_ok=True)
            os.close(fd)

    def _with_parent(self, path: Path, action: Callable[[Path], T]) -> T:
        """Run an action that needs the parent directory; create that directory only if the action fails without it.

        Raises:
            OSError: of the action; ENODEV: the file system of the directory is not mounted.
        """
        try:
            return action(path)
        except FileNotFoundError:
            if self._mounted and not _is_mounted(*self._mounted):
                missing = f"the file system of {self._mounted[0]} is not mounted: mount it again"
                raise OSError(errno.ENODEV, missing, str(path)) from None
            make_private_directory(path.parent, "url")
            return action(path)

    def _sweep_if_due(self) -> None:
        now_s = self._monotonic()
        if now_s < self._sweep_at_s:
            return
        self._sweep_at_s = now_s + SWEEP_S
        try:
            found = {path.name: path for path in self._temporary.iterdir() if _TEMPORARY_NAME.fullmatch(path.name)}
        except OSError:  # not there yet
            return
        self._first_seen_s = {name: self._first_seen_s.get(name, now_s) for name in found}
        for name, path in found.items():
            with contextlib.suppress(OSError):  # another process removes it, or this one may not
                age_s = self._clock() - path.lstat().st_mtime
                known = max(age_s, now_s - self._first_seen_s[name]) >= SWEEP_S
                if known and _is_abandoned(path, by_age=age_s > STALE_S):
                    path.unlink()


def _pages(entries: Iterable[os.DirEntry[str]], folder: str) -> Iterator[Sequence[ListedObject]]:
    """Files of a directory, some at a time."""
    page: list[ListedObject] = []
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                page.append(ListedObject(f"{folder}/{entry.name}", status.st_size, status.st_mtime))
        if len(page) == LISTED_AT_ONCE:
            yield page
            page = []
    yield page


def _open(path: Path) -> int:
    """Open a regular file for reading.

    Raises:
        FileNotFoundError: nothing, or something else, has the name.
        OSError: it cannot be opened.
    """
    try:
        fd = os.open(path, _READ)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise FileNotFoundError(errno.ENOENT, "it is not a regular file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "it is not a regular file", str(path))
    return fd


def _is_abandoned(path: Path, *, by_age: bool) -> bool:
    """Whether no living process writes a temporary file. by_age: the answer where files cannot be locked."""
    if not stat.S_ISREG(path.lstat().st_mode):
        return False
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return by_age
    finally:
        os.close(fd)
    return True


def _is_mounted(mount_point: Path, device: int) -> bool:
    """Whether a file system is mounted in a place: the one that was there, or another."""
    with contextlib.suppress(OSError):
        return mount_point.stat().st_dev == device or has_other_file_system(mount_point, device)
    return False


def _mounted_at(directory: Path) -> tuple[Path, int] | None:
    """Mount point and number of the file system that a directory is in, or will be made in. None: unknown."""
    try:
        place = next(place for place in (directory, *directory.parents) if place.is_dir())
        return mount_point_of(place), place.stat().st_dev
    except OSError:
        return None
