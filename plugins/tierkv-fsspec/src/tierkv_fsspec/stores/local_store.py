"""Store in a directory, possibly shared: atomic, flushed writes, which fsspec's own local file system lacks."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from tierkv_fsspec.stores.store import HEAD_BYTES, TEMPORARY, TooLongError

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
T = TypeVar("T")
STALE_S = 3600.0
"""Age in seconds at which a temporary file belongs to a dead writer and is removed."""


class LocalStore:
    """Objects as files below ``root``. Opening removes temporary files of dead writers."""

    is_remote = False

    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._temporary = root / TEMPORARY
        self._sweep(clock())

    def exists(self, name: str) -> bool:
        """Whether the file exists."""
        try:
            (self._root / name).stat()
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> bytes:
        """Read the file."""
        return (self._root / name).read_bytes()

    def read_into(self, name: str, buffer: memoryview) -> int:
        """Read a file straight into the buffer; reads run without the GIL."""
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

    def holds_same(self, name: str, data: memoryview) -> bool:
        """Compare the length by stat and the head by one read."""
        try:
            fd = os.open(self._root / name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return os.fstat(fd).st_size == len(data) and os.pread(fd, HEAD_BYTES, 0) == data[:HEAD_BYTES]
        finally:
            os.close(fd)

    def write(self, name: str, data: memoryview) -> None:
        """Write a temporary file, flush it, rename it."""
        temporary = self._write_temporary(data)
        try:
            _with_parent(self._root / name, temporary.replace)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def create(self, name: str, data: bytes | memoryview) -> bool:
        """Write a temporary file, flush it, link it: the link fails if the name exists."""
        temporary = self._write_temporary(memoryview(data))
        try:
            _with_parent(self._root / name, lambda target: os.link(temporary, target))
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def delete(self, name: str) -> None:
        """Unlink the file."""
        (self._root / name).unlink(missing_ok=True)

    def list_names(self) -> Iterator[Sequence[str]]:
        """List nothing: a lookup here is as cheap as a hint."""
        return iter(())

    def close(self) -> None:
        """Release nothing."""

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
            with contextlib.suppress(OSError):  # another process removes it, or this one may not
                if now_s - path.stat().st_mtime > STALE_S:
                    path.unlink()


def _with_parent(path: Path, action: Callable[[Path], T]) -> T:
    """Run an action that needs the parent directory; create that directory only if the action fails without it."""
    try:
        return action(path)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return action(path)
