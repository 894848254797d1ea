"""A directory, possibly shared: with the atomic, flushed writes that fsspec's own local file system does not have."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from tierkv_fsspec.store import HEAD_BYTES, TEMPORARY, TooLongError

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
T = TypeVar("T")
STALE_S = 3600.0
"""A temporary file that nobody wrote to for this long belongs to a writer that died."""


class LocalStore:
    """Objects as files below ``root``. Sweeps what dead writers left when it is made."""

    is_remote = False

    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._temporary = root / TEMPORARY
        self._sweep(clock())

    def exists(self, name: str) -> bool:
        """Whether the file is there."""
        try:
            (self._root / name).stat()
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> bytes:
        """The file's content."""
        return (self._root / name).read_bytes()

    def read_into(self, name: str, buffer: memoryview) -> int:
        """One file, straight into the buffer; reads run without the GIL."""
        fd = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC)
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

    def holds(self, name: str, data: memoryview) -> bool:
        """Length by stat, head by one read."""
        try:
            fd = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return os.fstat(fd).st_size == len(data) and os.pread(fd, HEAD_BYTES, 0) == data[:HEAD_BYTES]
        finally:
            os.close(fd)

    def write(self, name: str, data: memoryview) -> None:
        """Temporary file, flush, rename."""
        temporary = self._write_temporary(data)
        try:
            _with_parent(self._root / name, temporary.replace)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def create(self, name: str, data: bytes | memoryview) -> bool:
        """The same with a link, which fails where the name is taken."""
        temporary = self._write_temporary(memoryview(data))
        try:
            _with_parent(self._root / name, lambda target: os.link(temporary, target))
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def delete(self, name: str) -> None:
        """Unlink."""
        (self._root / name).unlink(missing_ok=True)

    def pages(self) -> Iterator[Sequence[str]]:
        """None: to look here is as cheap as to remember."""
        return iter(())

    def close(self) -> None:
        """Nothing is held."""

    def _write_temporary(self, data: memoryview) -> Path:
        temporary = self._temporary / uuid.uuid4().hex
        fd = _with_parent(temporary, lambda path: os.open(path, _NEW, 0o644))
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], done)
            os.fsync(fd)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        return temporary

    def _sweep(self, now_s: float) -> None:
        if not self._temporary.is_dir():
            return
        for path in self._temporary.iterdir():
            with contextlib.suppress(OSError):  # another process sweeps too; or it may not be removed by us
                if now_s - path.stat().st_mtime > STALE_S:
                    path.unlink()


def _with_parent(path: Path, action: Callable[[Path], T]) -> T:
    """Do something that needs the parent directory; make that only where it is missing."""
    try:
        return action(path)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return action(path)
