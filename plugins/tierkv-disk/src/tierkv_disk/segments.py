"""Segment files: preallocated, divided into pages of 4 KiB.

A segment is allocated whole before its first page is used, so a store cannot run out of disk half-way, and its bytes
lie together. Free runs are handed out by :class:`~tierkv_disk.space.FreeSpace`; this module owns the files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from tierkv_disk.directio import FileIO
from tierkv_disk.files import sync_directory
from tierkv_disk.places import PAGE_BYTES, Place, Run, page_of, pages_for, place_at, segment_of
from tierkv_disk.shared import SharedDirectory

SEGMENTS_AIM = 128
"""Files are kept open, and a process has about 1,024 descriptors: larger tiers use larger segments."""
SEGMENTS_MAX = 512
"""Where the file system has little room again and again, segments are small; beyond so many there are no more."""
_NAME = re.compile(r"segment-(\d{5,10})\.dat")


def segment_path(directory: Path, number: int) -> Path:
    """The file of segment ``number``."""
    return directory / f"segment-{number:05d}.dat"


class Limits(NamedTuple):
    """How far the files may grow.

    capacity_bytes: of all segments together, or None. segment_bytes: wish for the size of one file.
    """

    capacity_bytes: int | None
    segment_bytes: int


class SegmentFiles:
    """The open segment files of one namespace.

    Methods raise OSError. Reads, writes and syncs may run on several threads, :meth:`grow` on one at a time.
    """

    def __init__(
        self, directory: Path, frame_bytes_max: int, limits: Limits, shared: SharedDirectory, io: FileIO
    ) -> None:
        self._directory = directory
        self._frame_pages = pages_for(frame_bytes_max)
        self._limits = limits
        self._shared = shared
        self._io = io
        self._files: dict[int, int] = {}
        self.pages: dict[int, int] = {}
        """Per segment, how many pages it has."""
        self.pages_out_of_service = 0
        """Pages that come on top of the capacity, because nobody may use them."""

    def open_existing(self) -> None:
        """Open all files of the directory."""
        found = {int(match[1]): path for path in self._directory.iterdir() if (match := _NAME.fullmatch(path.name))}
        for number, path in sorted(found.items()):
            self._files[number] = self._io.open(path, 0)
            self.pages[number] = os.fstat(self._files[number]).st_size // PAGE_BYTES

    def excess_pages(self) -> int:
        """How many pages there are too many, for the capacity or for the directory's limit."""
        with self._shared.locked():
            excess = pages_for(self._shared.excess())
        held = sum(self.pages.values())
        capacity = self._capacity_pages()
        return min(held, max(excess, 0 if capacity is None else held - capacity))

    def cut(self, number: int, pages: int) -> None:
        """Make a segment shorter; without a page it is removed."""
        if pages == 0:
            os.close(self._files.pop(number))
            del self.pages[number]
            segment_path(self._directory, number).unlink(missing_ok=True)
        else:
            os.ftruncate(self._files[number], pages * PAGE_BYTES)
            self.pages[number] = pages

    def grow(self) -> Run | None:
        """Allocate one more segment, as large as wished and possible.

        Returns:
            Its pages; None where there is no room for another frame.
        """
        wish = self._pages_to_wish()
        if wish <= 0 or len(self._files) >= SEGMENTS_MAX:
            return None
        with self._shared.locked():
            pages = min(wish, self._shared.room(wish * PAGE_BYTES) // PAGE_BYTES)
            if pages < min(wish, self._frame_pages):
                return None
            # A whole number of the longest frames: where all have that length, no page is left over.
            return self._allocate(pages - pages % self._frame_pages if pages > self._frame_pages else pages)

    def write(self, runs: tuple[Run, ...], frame: memoryview) -> None:
        """Put a frame into its place."""
        if len(runs) == 1:
            self._write(runs[0].place, frame)
            return
        start = 0
        for place, pages in runs:
            self._write(place, frame[start : start + pages * PAGE_BYTES])
            start += pages * PAGE_BYTES

    def read(self, runs: tuple[Run, ...], buffer: memoryview, size: int) -> int:
        """Read ``size`` bytes of a frame; fewer come back only if a file ends before.

        Bytes of ``buffer`` after ``size`` may change, up to the next page.
        """
        if len(runs) == 1:
            return self._read(runs[0].place, buffer, size)
        start = 0
        for place, pages in runs:
            part = min(size - start, pages * PAGE_BYTES)
            count = self._read(place, buffer[start : start + pages * PAGE_BYTES], part)
            start += count
            if count < part:
                break
        return start

    def sync(self, numbers: set[int]) -> None:
        """Force the written bytes of these segments to the device."""
        for number in numbers:
            os.fdatasync(self._files[number])

    def close(self) -> None:
        """Close all files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _write(self, place: Place, data: memoryview) -> None:
        self._io.write_at(self._files[segment_of(place)], data, page_of(place) * PAGE_BYTES)

    def _read(self, place: Place, buffer: memoryview, size: int) -> int:
        return self._io.read_at(self._files[segment_of(place)], buffer, size, page_of(place) * PAGE_BYTES)

    def _allocate(self, pages: int) -> Run:
        number = max(self._files, default=-1) + 1
        path = segment_path(self._directory, number)
        fd = self._io.open(path, os.O_CREAT | os.O_EXCL)
        try:
            # The sync of the first frame in it also makes its length durable; its name is not covered by that.
            os.posix_fallocate(fd, 0, pages * PAGE_BYTES)
            sync_directory(self._directory)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        self._files[number] = fd
        self.pages[number] = pages
        return Run(place_at(number, 0), pages)

    def _pages_to_wish(self) -> int:
        """The size of the next segment if only the capacity counted."""
        capacity, capacity_pages = self._limits.capacity_bytes, self._capacity_pages()
        base = self._shared.size if capacity is None else capacity
        wish = max(self._limits.segment_bytes, base // SEGMENTS_AIM) // PAGE_BYTES
        wish = max(self._frame_pages, wish - wish % self._frame_pages)
        return wish if capacity_pages is None else min(wish, capacity_pages - sum(self.pages.values()))

    def _capacity_pages(self) -> int | None:
        capacity = self._limits.capacity_bytes
        return None if capacity is None else capacity // PAGE_BYTES + self.pages_out_of_service
