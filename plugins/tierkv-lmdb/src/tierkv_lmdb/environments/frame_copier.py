"""Copy of a frame's bytes to the caller's buffer, out of the page cache or past it.

Cached pages are copied from LMDB's map, which is a memory copy. Other pages are read from the data file, at the offset
that the map implies, past the page cache where the file system can do that. The kernel gets the whole range at once;
page faults would request it bit by bit. A block that the disk cannot read, or that no longer exists, is then an error
of this frame. In the map it would be a SIGBUS, which ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tierkv_lmdb.environments.direct_reader import DirectReader
from tierkv_lmdb.verification.file_format import OVERFLOW, OVERFLOW_HEADER, overflow_pages

_PAGE_BYTES = mmap.PAGESIZE
_mincore = ctypes.CDLL(None).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

FILE_READ_BYTES_MIN = 64 * 1024
"""Shorter frames are copied from the map: a page fault reads as much as a call would."""


class CutShortError(OSError):
    """The data file ends before the frame does."""


class Place(NamedTuple):
    """Value that begins behind the header of a page, and the buffer for it."""

    page: int
    """Number of its first page."""
    size: int
    """Its length in bytes."""
    buffer: memoryview
    """At least as long."""


class FrameCopier:
    """Copier of values out of one environment. May be used on any threads, within transactions.

    Args:
        data: data file of the environment.
        page_bytes: length of its pages in bytes.
    """

    def __init__(self, data: Path, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._fd = os.open(data, os.O_RDONLY | os.O_CLOEXEC)
        self._direct = DirectReader(data)
        # For a file that this process may not write, the kernel says that all pages are in memory.
        self._asks_map = os.access(data, os.W_OK)
        self._map: range | None = None
        self.find_map()

    def find_map(self) -> None:
        """Find the addresses of the map. Call it after every change of the map, while there is no transaction."""
        self._map = _map_addresses(self._fd)

    def copy(self, value: memoryview, buffer: memoryview) -> None:
        """Fill the start of ``buffer`` with ``value``, a part of the map.

        Raises:
            OSError: the disk cannot read it.
        """
        size = len(value)
        source = np.frombuffer(value, np.uint8)
        if size >= FILE_READ_BYTES_MIN and self._map is not None:
            page, rest = divmod(_address(source) - self._map.start - OVERFLOW_HEADER.size, self._page_bytes)
            if page >= 0 and not rest and self._copy_run([Place(page, size, buffer)])[0]:
                return
        # numpy releases the GIL; a slice assignment of memoryviews does not.
        np.copyto(np.frombuffer(buffer, np.uint8, size), source)

    def page_of(self, value: memoryview) -> int:
        """Return the number of the first page of a value that this transaction has stored; 0 if it shares a page."""
        size = len(value)
        if size < FILE_READ_BYTES_MIN:
            return 0
        header = ctypes.string_at(_address(np.frombuffer(value, np.uint8)) - OVERFLOW_HEADER.size, OVERFLOW_HEADER.size)
        page, _, flags, pages = OVERFLOW_HEADER.unpack(header)
        is_first = flags & OVERFLOW and pages == overflow_pages(size, self._page_bytes)  # in memory it has more flags
        return int(page) if is_first else 0

    def copy_all(self, places: Iterable[Place]) -> list[bool]:
        """Fill the start of each buffer with its value, in a transaction that has them all.

        Values on adjacent pages are read by one call of the system.

        Returns:
            Whether each was filled; if not, there is no such value.

        Raises:
            OSError: the disk cannot read one of them.
        """
        return [is_filled for run in self._runs(places) for is_filled in self._copy_run(run)]

    def _runs(self, places: Iterable[Place]) -> Iterator[list[Place]]:
        """Cut the places, in order, into runs of adjacent pages."""
        run: list[Place] = []
        end = 0
        for place in places:
            # Where the map cannot be asked, the ends of a run say nothing of a frame between them.
            if run and not (place.page == end and self._asks_map):
                yield run
                run = []
            run.append(place)
            end = place.page + overflow_pages(place.size, self._page_bytes)
        if run:
            yield run

    def _copy_run(self, run: list[Place]) -> list[bool]:
        """Fill the buffers of places on adjacent pages. Returns whether each was filled."""
        start, last = run[0].page * self._page_bytes, run[-1]
        length = last.page * self._page_bytes + OVERFLOW_HEADER.size + last.size - start
        if self._map is None or start + length > len(self._map):
            return [False] if len(run) == 1 else [self._copy_run([place])[0] for place in run]
        if self._is_cached(self._map.start + start, start, length):
            return [self._copy_cached(place, self._map.start) for place in run]
        pages = self._direct.read(start, length)
        if pages is None:
            return [self._read_cached(place) for place in run]
        return [self._take(pages, place.page * self._page_bytes - start, place) for place in run]

    def _copy_cached(self, place: Place, map_start: int) -> bool:
        """Copy a value from the map. Returns False if the header there is that of no such value."""
        address = map_start + place.page * self._page_bytes
        if not self._is_header(ctypes.string_at(address, OVERFLOW_HEADER.size), place.page, place.size):
            return False
        target = np.frombuffer(place.buffer, np.uint8)
        ctypes.memmove(_address(target), address + OVERFLOW_HEADER.size, place.size)  # releases the GIL
        return True

    def _take(self, pages: memoryview, at: int, place: Place) -> bool:
        """Copy a value out of pages that were read. Returns False if there is no such value at that place in them."""
        begin = at + OVERFLOW_HEADER.size
        _require_whole(len(pages) - begin, place.size)
        if not self._is_header(pages[at:begin], place.page, place.size):
            return False
        source = np.frombuffer(pages, np.uint8, place.size, begin)
        np.copyto(np.frombuffer(place.buffer, np.uint8, place.size), source)  # releases the GIL
        return True

    def _read_cached(self, place: Place) -> bool:
        """Read a value from the file through the page cache. Returns False if there is no such value."""
        header, start = bytearray(OVERFLOW_HEADER.size), place.page * self._page_bytes
        os.posix_fadvise(self._fd, start, len(header) + place.size, os.POSIX_FADV_WILLNEED)
        count = os.preadv(self._fd, [header, place.buffer[: place.size]], start)
        _require_whole(count - len(header), place.size)
        return self._is_header(header, place.page, place.size)

    def has_sound_header(self, page: int, size: int) -> bool:
        """Whether the header of these pages is that of a value of ``size`` bytes.

        Raises:
            OSError: the disk cannot read it.
        """
        return self._is_header(os.pread(self._fd, OVERFLOW_HEADER.size, page * self._page_bytes), page, size)

    def has_sound_pages(self, value: memoryview) -> bool:
        """Whether the header before a value's pages is as LMDB wrote it. True if the value has no pages of its own.

        Raises:
            OSError: the disk cannot read it.
        """
        address = _address(np.frombuffer(value, np.uint8)) if len(value) else 0
        if self._map is None or address not in self._map:
            return True  # in memory, written by this transaction
        start = address - self._map.start - OVERFLOW_HEADER.size
        page, rest = divmod(start, self._page_bytes)
        if rest:
            return True  # in a leaf
        return self.has_sound_header(page, len(value))

    def _is_header(self, header: bytes | bytearray | memoryview, page: int, size: int) -> bool:
        if len(header) < OVERFLOW_HEADER.size:
            return False
        number, _, flags, pages = OVERFLOW_HEADER.unpack(header)
        return (number, flags, pages) == (page, OVERFLOW, overflow_pages(size, self._page_bytes))

    def close(self) -> None:
        """Close the data file."""
        try:
            os.close(self._fd)
        finally:
            self._direct.close()

    def _is_cached(self, address: int, offset: int, size: int) -> bool:
        """Whether all pages of a part of the map are in the page cache, or both ends where the map cannot be asked.

        True if the system cannot tell. The map is asked first, since a probing read starts to read ahead.
        """
        if self._asks_map:
            start = address - address % _PAGE_BYTES
            pages = -(-(address + size - start) // _PAGE_BYTES)
            for count in (1, pages):  # of a cold frame, the first page says it
                resident = np.zeros(count, np.uint8)
                if _mincore(start, count * _PAGE_BYTES, _address(resident)):
                    return True
                if not (resident & 1).all():
                    return False
            # A page behind the end of a file that was cut short can still count as resident.
            return offset + size <= os.fstat(self._fd).st_size
        probe = bytearray(1)
        try:
            return all(os.preadv(self._fd, [probe], place, os.RWF_NOWAIT) == 1 for place in (offset, offset + size - 1))
        except BlockingIOError:
            return False
        except OSError:
            return True


def _require_whole(found: int, size: int) -> None:
    """Check that a frame was found whole.

    Raises:
        CutShortError: the file ends within the frame.
    """
    if found < size:
        raise CutShortError(f"the data file ends {size - found} bytes before the frame does")


def _address(array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _map_addresses(fd: int) -> range | None:
    """Addresses at which this process has mapped a file from its start; None if the system cannot tell."""
    status = os.fstat(fd)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    try:
        with Path("/proc/self/maps").open(encoding="ascii", errors="replace") as maps:
            for line in maps:
                addresses, _, offset, line_device, inode, *_ = line.split(maxsplit=5)
                if int(inode) == status.st_ino and line_device == device and int(offset, 16) == 0:
                    return range(*(int(address, 16) for address in addresses.split("-")))
    except (OSError, ValueError):
        return None
    return None
