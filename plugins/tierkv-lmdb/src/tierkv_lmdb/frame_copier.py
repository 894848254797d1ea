"""Copy of a frame's bytes to the caller's buffer: one copy, out of the page cache.

Cached pages are copied from LMDB's map, which is a memory copy. Other pages are read from the data file, at the offset
that the map implies. The kernel gets the whole range at once and reads it in large pieces; page faults would request it
bit by bit. A block that the disk cannot read, or that no longer exists, is then an error of this frame. In
the map it would be a SIGBUS, which ends the process.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np

FILE_READ_BYTES_MIN = 64 * 1024
"""Shorter frames are copied from the map: a page fault reads as much as a call would."""

_PAGE_HEADER = struct.Struct("<QHHI")
"""Header that LMDB writes before a value with pages of its own: page number, padding, flags, number of pages."""


_OVERFLOW = 0x04
"""Flag of such pages."""


class CutShortError(OSError):
    """The data file ends before the frame does."""


class FrameCopier:
    """Copier of values out of one environment. May be used on any threads, within transactions.

    Args:
        data: data file of the environment.
        page_bytes: length of its pages in bytes.
    """

    def __init__(self, data: Path, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._fd = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
        self._base: int | None = None
        self.find_map()

    def find_map(self) -> None:
        """Find the address of the map. Call it after every change of the map, while there is no transaction."""
        self._base = _map_address(self._fd)

    def copy(self, value: memoryview, buffer: memoryview) -> None:
        """Fill the start of ``buffer`` with ``value``, a part of the map.

        Raises:
            OSError: the disk cannot read it.
        """
        size = len(value)
        source = np.frombuffer(value, np.uint8)
        if size >= FILE_READ_BYTES_MIN and self._base is not None:
            offset = source.__array_interface__["data"][0] - self._base
            if not self._is_cached(offset, size) and self._read(offset, buffer[:size]):
                return
        # numpy releases the GIL; a slice assignment of memoryviews does not.
        np.copyto(np.frombuffer(buffer, np.uint8, size), source)

    def close(self) -> None:
        """Close the data file."""
        os.close(self._fd)

    def _is_cached(self, offset: int, size: int) -> bool:
        """Whether both ends are in the page cache; True if the file system cannot tell."""
        probe = bytearray(1)
        try:
            return all(os.preadv(self._fd, [probe], place, os.RWF_NOWAIT) == 1 for place in (offset, offset + size - 1))
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _read(self, offset: int, target: memoryview) -> bool:
        """Read from the file. Returns False if the value turns out to be elsewhere."""
        header = bytearray(_PAGE_HEADER.size)
        start, length = offset - len(header), len(header) + len(target)
        if start < 0:
            return False
        os.posix_fadvise(self._fd, start, length, os.POSIX_FADV_WILLNEED)
        count = os.preadv(self._fd, [header, target], start)
        if count != length:
            raise CutShortError(f"the data file ends {length - count} bytes before the frame does")
        page, _, flags, pages = _PAGE_HEADER.unpack(header)
        is_there = page * self._page_bytes == start and flags & _OVERFLOW
        return bool(is_there and pages * self._page_bytes >= length)


def _map_address(fd: int) -> int | None:
    """Address at which this process has mapped the start of a file; None if the system cannot tell."""
    status = os.fstat(fd)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    try:
        with Path("/proc/self/maps").open(encoding="ascii", errors="replace") as maps:
            for line in maps:
                addresses, _, offset, line_device, inode, *_ = line.split(maxsplit=5)
                if int(inode) == status.st_ino and line_device == device and int(offset, 16) == 0:
                    return int(addresses.split("-")[0], 16)
    except (OSError, ValueError):
        return None
    return None
