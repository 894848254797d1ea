"""Table of the stored frames: key to runs of pages. In memory; the owner serialises calls.

Nearly all frames are in one run, stored as an :data:`~tierkv_disk.extents.Extent`. The few frames in several runs are
in a second dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tierkv.types.keys import Key
from tierkv_disk.extents import Extent, PageAddress, Run, address_at, extent_at, pages_for, read_extent
from tierkv_disk.space.free_space import FreeSpace, Pins

Entries = dict[Key, Extent]
"""Extent of each stored frame, in the order in which the frames were written."""

StoredFrame = tuple[Key, tuple[Run, ...], int, int]
"""Key, runs, length in bytes and rank of a frame. A plain tuple: one is made per stored chunk."""

SCATTERED = address_at(0x7FFF_FFFF, 0)
"""Address that marks a frame in several runs; no segment has that number."""


class Table:
    """Stored frames, free pages, pinned pages and pages out of service."""

    def __init__(self) -> None:
        self.entries: Entries = {}
        """Everything stored. Recovery fills it; afterwards it is changed through the methods alone."""
        self.scattered: dict[Key, tuple[Run, ...]] = {}
        """Runs of each key whose extent has the address ``SCATTERED``."""
        self._free = FreeSpace()
        self._pins = Pins()
        self._out_of_service: set[PageAddress] = set()

    @property
    def free_pages(self) -> int:
        """Pages of 4 KiB without a frame, over all segments."""
        return self._free.pages

    def find_frame(self, key: Key) -> tuple[tuple[Run, ...], int] | None:
        """Runs and length in bytes of the frame of ``key``; None if it is not stored."""
        extent = self.entries.get(key)
        if extent is None:
            return None
        address, frame_bytes, _ = read_extent(extent)
        return self._runs(key, address, frame_bytes), frame_bytes

    def rank(self, key: Key) -> int:
        """Rank of a stored frame; 0: unknown."""
        return read_extent(self.entries[key])[2]

    def put_frames(self, frames: Iterable[StoredFrame]) -> None:
        """Enter frames; a previous frame of a key is dropped."""
        entries = self.entries
        for key, runs, frame_bytes, rank in frames:
            if key in entries:
                self.drop_frame(key)
            if len(runs) == 1:
                entries[key] = extent_at(runs[0].address, frame_bytes, rank)
            else:
                entries[key] = extent_at(SCATTERED, frame_bytes, rank)
                self.scattered[key] = runs

    def drop_frame(self, key: Key) -> None:
        """Remove ``key``; its pages become free when no reader has them pinned."""
        extent = self.entries.pop(key, None)
        if extent is not None:
            runs = self._runs(key, *read_extent(extent)[:2])
            self.scattered.pop(key, None)
            self.release_runs(runs)

    def add_free(self, run: Run) -> None:
        """Add pages that no frame has used yet."""
        self._free.add_run(run)

    def take_run(self, pages: int) -> tuple[Run, ...] | None:
        """Take free pages in one run; None if no free run is long enough."""
        run = self._free.take_run(pages)
        return None if run is None else (run,)

    def take_row(self, lengths: Sequence[int]) -> list[Run]:
        """Take a run per number of pages, adjacent where possible; fewer if the next one finds no run."""
        return self._free.take_row(lengths)

    def gather_runs(self, pages: int) -> tuple[Run, ...] | None:
        """Take free pages in as few runs as possible; None if fewer pages are free."""
        return self._free.gather_runs(pages)

    def release_runs(self, runs: tuple[Run, ...]) -> None:
        """Free the pages of a frame that is not in the table, unless they are pinned or out of service."""
        if runs[0].address not in self._out_of_service:
            self._add_free(self._pins.free(runs))

    def pin(self, address: PageAddress) -> None:
        """Keep the pages of the frame that begins at ``address`` until :meth:`unpin`."""
        self._pins.pin(address)

    def unpin(self, address: PageAddress) -> None:
        """End one read of the frame that begins at ``address``."""
        self._add_free(self._pins.unpin(address))

    def take_out_of_service(self, address: PageAddress) -> None:
        """Never free the pages of the frame that begins at ``address``."""
        self._out_of_service.add(address)

    def return_to_service(self, key: Key, runs: tuple[Run, ...]) -> None:
        """Undo :meth:`take_out_of_service`; free the pages unless ``key`` still uses them."""
        self._out_of_service.discard(runs[0].address)
        found = self.find_frame(key)
        if found is None or found[0] != runs:
            self.release_runs(runs)

    def _runs(self, key: Key, address: PageAddress, frame_bytes: int) -> tuple[Run, ...]:
        return (Run(address, pages_for(frame_bytes)),) if address != SCATTERED else self.scattered[key]

    def _add_free(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self._free.add_run(run)
