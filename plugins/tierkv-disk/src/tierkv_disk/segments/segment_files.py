"""Segment files: preallocated, divided into pages of 4 KiB.

A segment is allocated whole before its first page is used, so a write cannot run out of disk half-way and its bytes are
adjacent. :class:`~tierkv_disk.space.free_space.FreeSpace` hands out free runs; this module owns the files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tierkv.types.sizes import round_size
from tierkv_disk.directory.files import NotOurFileError, set_aside, sync_directory
from tierkv_disk.directory.shared import SharedDirectory
from tierkv_disk.extents import PAGE_BYTES, PageAddress, Run, address_at, page_of, pages_for, segment_of
from tierkv_disk.failures import NO_SPACE
from tierkv_disk.segments.direct_io import FileIO
from tierkv_disk.segments.shared_sync import SharedSync

SEGMENTS_AIM = 128
"""Number of segments aimed at. Files stay open, and a process has about 1,024 descriptors: larger tiers use larger
segments."""
SEGMENTS_MAX = 512
"""Bound of the number of segments. A file system that is often nearly full makes segments small and numerous."""
LOG_BYTES_PER_PAGE = 96
"""Room kept for the index log per page of a new segment: three records of 128 bytes for each frame of four pages."""
_NAME = re.compile(r"segment-(\d{5,10})\.dat")


def segment_path(directory: Path, number: int) -> Path:
    """File of a segment: five digits at least, so that names sort."""
    return directory / f"segment-{number:05d}.dat"


class SegmentLimits(NamedTuple):
    """Bounds of the segment files' growth."""

    capacity_bytes: int | None
    """Bound of all segments together; None: no bound."""
    segment_bytes: int
    """Wished size of one file."""


class SegmentFiles:
    """Open segment files of one namespace.

    All methods raise OSError. Reads, writes and syncs may run on several threads, :meth:`grow` on one at a time.
    """

    def __init__(
        self, directory: Path, frame_bytes_max: int, limits: SegmentLimits, shared: SharedDirectory, io: FileIO
    ) -> None:
        self._directory = directory
        self._frame_pages = pages_for(frame_bytes_max)
        self._limits = limits
        self._shared = shared
        self._io = io
        self._files: dict[int, int] = {}
        self._syncs: dict[int, SharedSync] = {}
        self.pages: dict[int, int] = {}
        """Number of pages of each segment."""
        self._pages_out_of_service = 0
        self._count_lock = threading.Lock()
        self.sync_failures = 0
        """Number of failed syncs. Note it before a write, for :meth:`sync`."""

    def open_existing(self) -> None:
        """Open all segment files of the directory."""
        found = {int(match[1]): path for path in self._directory.iterdir() if (match := _NAME.fullmatch(path.name))}
        for number, path in sorted(found.items()):
            try:
                self._files[number] = self._io.open(path, 0)
            except NotOurFileError as error:
                set_aside(path, error.strerror)
                continue
            self.pages[number] = os.fstat(self._files[number]).st_size // PAGE_BYTES

    def removed_files(self) -> int:
        """Number of open segment files that have no name any more. Any thread."""
        try:
            return sum(os.fstat(fd).st_nlink == 0 for fd in tuple(self._files.values()))
        except OSError:  # one was closed meanwhile; the next look counts again
            return 0

    def excess_pages(self, reserve_bytes: int = 0) -> int:
        """Number of pages beyond the capacity, beyond the directory's limit, or beyond the disk, whichever is most.

        reserve_bytes: bytes that must be free on the disk for the index log.
        """
        with self._shared.locked():
            excess = pages_for(max(self._shared.reduce_excess(), reserve_bytes - self._shared.free_bytes))
        held = sum(self.pages.values())
        capacity = self._capacity_pages()
        return min(held, max(excess, 0 if capacity is None else held - capacity))

    def set_pages_out_of_service(self, pages: int) -> None:
        """Allow ``pages`` pages on top of the capacity, because as many are in quarantine."""
        self._pages_out_of_service = pages

    def cut_segment(self, number: int, pages: int) -> None:
        """Shorten a segment to ``pages`` pages; with 0 pages its file is removed."""
        if pages == 0:
            os.close(self._files.pop(number))
            self._syncs.pop(number, None)
            del self.pages[number]
            segment_path(self._directory, number).unlink(missing_ok=True)
        else:
            os.ftruncate(self._files[number], pages * PAGE_BYTES)
            self.pages[number] = pages

    def grow(self, reserve_bytes: int = 0) -> Run | None:
        """Allocate one more segment, as large as wished and possible.

        Args:
            reserve_bytes: bytes to leave free on the disk for the index log.

        Returns:
            Its pages; None if there is no room for another frame.
        """
        wish = self._pages_to_wish()
        if wish <= 0 or len(self._files) >= SEGMENTS_MAX:
            return None
        reserve_bytes += min(wish, self._shared.free_bytes // PAGE_BYTES) * LOG_BYTES_PER_PAGE
        least, spare = min(wish, self._frame_pages), 0
        with self._shared.locked():
            pages = min(wish, self._shared.make_room(wish * PAGE_BYTES, reserve_bytes) // PAGE_BYTES)
            while pages >= least:
                try:
                    return self._allocate(self._whole_frames(pages), spare)
                except OSError as error:
                    if error.errno not in NO_SPACE or pages == least:
                        raise
                    # A quota or a limit of file sizes, which the free bytes of the file system do not show.
                    spare = 0 if error.errno == errno.EFBIG else pages_for(reserve_bytes)
                pages = max(least, pages // 2)
        return None

    def room(self) -> str:
        """Say what the segments have and what the disk has free, for messages."""
        return f"{round_size(self.size_bytes)} are allocated, and {self._shared.free_space()}"

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(self.pages.values()) * PAGE_BYTES

    @property
    def wants_more(self) -> bool:
        """Whether the capacity allows more pages."""
        return self._pages_to_wish() > 0 and len(self._files) < SEGMENTS_MAX

    def write_frame(self, runs: tuple[Run, ...], frame: memoryview) -> None:
        """Write a frame into its runs."""
        if len(runs) == 1:
            self._write(runs[0].address, frame)
            return
        start = 0
        for address, pages in runs:
            self._write(address, frame[start : start + pages * PAGE_BYTES])
            start += pages * PAGE_BYTES

    def read_frame(self, runs: tuple[Run, ...], buffer: memoryview, size: int) -> int:
        """Read the ``size`` bytes of a frame. Returns the number of bytes read: less only if a file ends early.

        Bytes of ``buffer`` beyond ``size`` may change, up to the next page boundary.
        """
        if len(runs) == 1:
            return self._read(runs[0].address, buffer, size)
        start = 0
        for address, pages in runs:
            part = min(size - start, pages * PAGE_BYTES)
            count = self._read(address, buffer[start : start + pages * PAGE_BYTES], part)
            start += count
            if count < part:
                break
        return start

    def write_row(self, address: PageAddress, frames: Sequence[memoryview]) -> bool:
        """Write frames of whole pages one behind the other, in one call. Returns whether all were written."""
        return self._io.write_all_at(self._files[segment_of(address)], frames, page_of(address) * PAGE_BYTES)

    def read_row(self, address: PageAddress, buffers: Sequence[memoryview]) -> bool:
        """Fill buffers of whole pages one behind the other, in one call. Returns whether all were filled."""
        return self._io.read_all_at(self._files[segment_of(address)], buffers, page_of(address) * PAGE_BYTES)

    def sync(self, numbers: set[int], failures_before: int | None = None) -> None:
        """Force the written bytes of these segments to the device.

        Args:
            numbers: the segments.
            failures_before: :attr:`sync_failures` before the bytes were written. A failed sync covers all bytes written
                before it, also those of other threads, and the kernel reports it to one of them only.

        Raises:
            OSError: the bytes may not be on the device.
        """
        failures_before = self.sync_failures if failures_before is None else failures_before
        for number in numbers:
            self._syncs.setdefault(number, SharedSync(self._sync_failed)).sync(self._files[number])
        if self.sync_failures != failures_before:
            raise OSError(errno.EIO, "another sync failed after these bytes were written")

    def _sync_failed(self) -> None:
        with self._count_lock:
            self.sync_failures += 1

    def close(self) -> None:
        """Close all files."""
        with contextlib.ExitStack() as ends:
            while self._files:
                ends.callback(os.close, self._files.popitem()[1])

    def _write(self, address: PageAddress, data: memoryview) -> None:
        self._io.write_at(self._files[segment_of(address)], data, page_of(address) * PAGE_BYTES)

    def _read(self, address: PageAddress, buffer: memoryview, size: int) -> int:
        return self._io.read_at(self._files[segment_of(address)], buffer, size, page_of(address) * PAGE_BYTES)

    def _whole_frames(self, pages: int) -> int:
        """A multiple of the longest frame: if all frames have that length, no page is left over."""
        return pages - pages % self._frame_pages if pages > self._frame_pages else pages

    def _allocate(self, pages: int, spare: int) -> Run:
        """Allocate a segment. spare: pages that must be free beside it."""
        number = max(self._files, default=-1) + 1
        path = segment_path(self._directory, number)
        fd = self._io.open(path, os.O_CREAT | os.O_EXCL)
        try:
            # The sync of the first frame also makes the length durable, but not the name.
            os.posix_fallocate(fd, 0, (pages + spare) * PAGE_BYTES)
            if spare:
                os.ftruncate(fd, pages * PAGE_BYTES)
            sync_directory(self._directory)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        self._files[number] = fd
        self.pages[number] = pages
        return Run(address_at(number, 0), pages)

    def _pages_to_wish(self) -> int:
        """Size of the next segment in pages, by the capacity alone."""
        capacity, capacity_pages = self._limits.capacity_bytes, self._capacity_pages()
        base = self._shared.size_bytes if capacity is None else capacity
        wish = max(self._limits.segment_bytes, base // SEGMENTS_AIM) // PAGE_BYTES
        wish = max(self._frame_pages, wish - wish % self._frame_pages)
        return wish if capacity_pages is None else min(wish, capacity_pages - sum(self.pages.values()))

    def _capacity_pages(self) -> int | None:
        capacity = self._limits.capacity_bytes
        return None if capacity is None else capacity // PAGE_BYTES + self._pages_out_of_service
