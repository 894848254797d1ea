"""Search for frames without a log: read unused pages and ask the framework which frame begins there."""

from __future__ import annotations

import mmap
from collections.abc import Container, Iterable, Iterator

from tierkv.abc import FrameRecogniser
from tierkv.types.keys import Key
from tierkv_disk.extents import PAGE_BYTES, Extent, PageAddress, Run, extent_at, pages_for
from tierkv_disk.log.index_log import KEY_BYTES_MAX
from tierkv_disk.segments.segment_files import SegmentFiles

WINDOW_PAGES = 1024
"""Pages read at once: large enough for the best disk throughput, and the only memory that the search takes (4 MiB)."""


class FrameSearch:
    """Search for frames in segment files. One thread at a time; memory beside the result: 4 MiB.

    Args:
        segments: the files.
        recognise_frame: recognises a frame by its first page.
        frame_bytes_max: length of the longest frame.

    Attributes:
        pages_unreadable: number of pages that the device could not read.
    """

    def __init__(self, segments: SegmentFiles, recognise_frame: FrameRecogniser, frame_bytes_max: int) -> None:
        self._segments = segments
        self._recognise_frame = recognise_frame
        self._frame_bytes_max = frame_bytes_max
        self.pages_unreadable = 0

    def find_frames(self, runs: Iterable[Run], excluded: Container[Key]) -> dict[Key, Extent]:
        """Find the frames that are wholly within one of ``runs``, except those with ``excluded`` keys.

        If a key is found twice, the last frame counts. Only the first page of a frame is examined: the rest may be
        damaged, or may never have been written.
        """
        window = memoryview(mmap.mmap(-1, WINDOW_PAGES * PAGE_BYTES))  # aligned, as O_DIRECT wants it
        return {key: extent for run in runs for key, extent in self._whole(run, window) if key not in excluded}

    def _whole(self, run: Run, window: memoryview) -> Iterator[tuple[Key, Extent]]:
        """Frames that end in this run and before the next frame begins; otherwise their end is overwritten."""
        last, last_end = None, run.address
        for address, key, size in self._beginnings(run, window):
            if last is not None and last_end <= address:
                yield last
            last, last_end = (key, extent_at(address, size, 0)), PageAddress(address + pages_for(size))
        if last is not None and last_end <= run.address + run.pages:
            yield last

    def _beginnings(self, run: Run, window: memoryview) -> Iterator[tuple[PageAddress, Key, int]]:
        for part in self._readable(run, window, WINDOW_PAGES):
            for page in range(part.pages):
                recognised = self._recognise_frame(window[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])
                if recognised is None:
                    continue
                key, size = recognised
                if 0 < len(key) <= KEY_BYTES_MAX and 0 < size <= self._frame_bytes_max:
                    yield PageAddress(part.address + page), key, size

    def _readable(self, run: Run, window: memoryview, step: int) -> Iterator[Run]:
        """Read the run into the window, part by part, and yield the readable parts. A bad page loses only itself."""
        end = run.address + run.pages
        for start in range(run.address, end, step):
            part = Run(PageAddress(start), min(step, end - start))
            if self._read(part, window):
                yield part
            elif part.pages > 1:
                yield from self._readable(part, window, 1)
            else:
                self.pages_unreadable += 1

    def _read(self, run: Run, window: memoryview) -> bool:
        size = run.pages * PAGE_BYTES
        try:
            return self._segments.read_frame((run,), window, size) == size
        except OSError:
            return False
