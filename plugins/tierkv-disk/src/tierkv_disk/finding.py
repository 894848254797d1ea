"""Search for frames without a log: read unused pages and ask the framework which frame begins there."""

from __future__ import annotations

import mmap
from collections.abc import Container, Iterable, Iterator

from tierkv.abc import FrameRecogniser
from tierkv.types.keys import Key
from tierkv_disk.index_log import KEY_BYTES_MAX
from tierkv_disk.places import PAGE_BYTES, Location, Place, Run, location_at, pages_for
from tierkv_disk.segments import SegmentFiles

WINDOW_PAGES = 1024
"""Read at once: long enough for a disk to be at its best, and all the memory that it takes."""


class FrameFinder:
    """Looks for frames in segment files. One thread at a time; memory beside the result: 4 MiB.

    Args:
        segments: the files.
        recognise_frame: recognises a frame by its first page.
        frame_bytes_max: no frame is longer.

    Attributes:
        pages_unreadable: pages that the device did not give.
    """

    def __init__(self, segments: SegmentFiles, recognise_frame: FrameRecogniser, frame_bytes_max: int) -> None:
        self._segments = segments
        self._recognise_frame = recognise_frame
        self._frame_bytes_max = frame_bytes_max
        self.pages_unreadable = 0

    def find(self, runs: Iterable[Run], others: Container[Key]) -> dict[Key, Location]:
        """The frames that lie wholly in one of ``runs``, but for those of ``others``. The last one of a key counts.

        Of a frame only the first page is looked at: the rest may be damaged or never written.
        """
        window = memoryview(mmap.mmap(-1, WINDOW_PAGES * PAGE_BYTES))  # aligned, as O_DIRECT wants it
        return {key: location for run in runs for key, location in self._whole(run, window) if key not in others}

    def _whole(self, run: Run, window: memoryview) -> Iterator[tuple[Key, Location]]:
        """Frames that end in this run, and before another one begins: else their end is overwritten."""
        last, last_end = None, run.place
        for place, key, size in self._beginnings(run, window):
            if last is not None and last_end <= place:
                yield last
            last, last_end = (key, location_at(place, size)), Place(place + pages_for(size))
        if last is not None and last_end <= run.place + run.pages:
            yield last

    def _beginnings(self, run: Run, window: memoryview) -> Iterator[tuple[Place, Key, int]]:
        for part in self._readable(run, window, WINDOW_PAGES):
            for page in range(part.pages):
                recognised = self._recognise_frame(window[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])
                if recognised is None:
                    continue
                key, size = recognised
                if 0 < len(key) <= KEY_BYTES_MAX and 0 < size <= self._frame_bytes_max:
                    yield Place(part.place + page), key, size

    def _readable(self, run: Run, window: memoryview, step: int) -> Iterator[Run]:
        """What was read into the beginning of the window, one part after the other. A bad page costs itself alone."""
        end = run.place + run.pages
        for start in range(run.place, end, step):
            part = Run(Place(start), min(step, end - start))
            if self._read(part, window):
                yield part
            elif part.pages > 1:
                yield from self._readable(part, window, 1)
            else:
                self.pages_unreadable += 1

    def _read(self, run: Run, window: memoryview) -> bool:
        size = run.pages * PAGE_BYTES
        try:
            return self._segments.read((run,), window, size) == size
        except OSError:
            return False
