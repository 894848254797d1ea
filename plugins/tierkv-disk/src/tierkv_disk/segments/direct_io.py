"""Transfer of bytes between memory and files at an offset, past the page cache where that is possible.

O_DIRECT requires aligned memory, offset and length. The framework's buffers are aligned. For any other buffer the
kernel returns EINVAL, and the bytes are copied through an aligned bounce buffer.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from tierkv_disk.directory.files import open_file
from tierkv_disk.extents import PAGE_BYTES
from tierkv_disk.failures import NO_SPACE


def round_up(size: int, unit: int = PAGE_BYTES) -> int:
    """Round up to a multiple of ``unit``."""
    return -(-size // unit) * unit


def supports_direct(directory: Path) -> bool:
    """Whether files in ``directory`` can be written and read with O_DIRECT at 4 KiB. Creates no lasting file.

    Raises:
        OSError: no file can be created there.
    """
    page = mmap.mmap(-1, PAGE_BYTES)
    page[:] = b"\x5a" * PAGE_BYTES
    with tempfile.TemporaryFile(dir=directory, prefix=".tierkv-disk.", suffix=".tmp") as file:
        try:
            # Open the same (unnamed) file a second time: the first descriptor lacks the flag.
            fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_DIRECT)
        except OSError:
            return False
        try:
            return os.pwrite(fd, page, 0) == PAGE_BYTES and os.preadv(fd, [page], 0) == PAGE_BYTES
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return False
            if error.errno in NO_SPACE:  # the flag was accepted, and the disk is full
                return True
            raise
        finally:
            os.close(fd)


def accepts_direct(path: Path) -> bool:
    """Whether an existing file can be opened with O_DIRECT: a question for where no other file can be created."""
    try:
        os.close(open_file(path, os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


class FileIO:
    """Complete reads and writes at an offset of an open file. Thread safe: each thread has its own bounce buffer.

    Args:
        direct: whether files are opened with O_DIRECT.
        bounce_bytes: length of the longest transfer, a multiple of the page.
    """

    def __init__(self, *, direct: bool, bounce_bytes: int) -> None:
        self.direct = direct
        self._bounce_bytes = bounce_bytes
        self._local = threading.local()

    def open(self, path: Path, flags: int) -> int:
        """Open a file for reading and writing, with O_DIRECT if ``direct``.

        Raises:
            OSError: as :func:`~tierkv_disk.directory.files.open_file`.
        """
        return open_file(path, flags | os.O_RDWR | (os.O_DIRECT if self.direct else 0))

    def write_at(self, fd: int, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``.

        Raises:
            OSError: as ``pwrite``.
        """
        if not self.direct:
            _write_all(fd, data, offset)
            return
        if len(data) % PAGE_BYTES == 0:
            try:
                _write_all(fd, data, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            else:
                return
        padded = round_up(len(data))
        with self._bounce()[:padded] as bounce:
            bounce[: len(data)] = data
            _write_all(fd, bounce, offset)

    def read_at(self, fd: int, buffer: memoryview, size: int, offset: int) -> int:
        """Fill the first ``size`` bytes of ``buffer`` from ``offset``.

        Bytes of ``buffer`` beyond ``size`` may change, up to the next page boundary.

        Returns:
            Number of bytes read: less than ``size`` only if the file ends early.

        Raises:
            OSError: as ``preadv``.
        """
        if not self.direct:
            return _read_all(fd, buffer[:size], offset)
        padded = round_up(size)
        if len(buffer) >= padded:
            try:
                return min(size, _read_all(fd, buffer[:padded], offset))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        with self._bounce()[:padded] as bounce:
            count = min(size, _read_all(fd, bounce, offset))
            buffer[:count] = bounce[:count]
        return count

    def write_all_at(self, fd: int, parts: Sequence[memoryview], offset: int) -> bool:
        """Write ``parts`` one behind the other at ``offset``, in one call.

        Returns:
            Whether all bytes were written. If not, the caller writes part by part, and learns which one fails.
        """
        try:
            return os.pwritev(fd, parts, offset) == sum(map(len, parts))
        except OSError:
            return False

    def read_all_at(self, fd: int, parts: Sequence[memoryview], offset: int) -> bool:
        """Fill ``parts`` one behind the other from ``offset``, in one call.

        Returns:
            Whether all were filled. If not, the caller reads part by part, and learns which one fails.
        """
        try:
            return os.preadv(fd, parts, offset) == sum(map(len, parts))
        except OSError:
            return False

    def _bounce(self) -> memoryview:
        buffer: mmap.mmap | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = mmap.mmap(-1, self._bounce_bytes)
        return memoryview(buffer)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        count = os.pwrite(fd, data[done:], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the file system wrote no byte and reported no error")
        done += count


def _read_all(fd: int, buffer: memoryview, offset: int) -> int:
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done
