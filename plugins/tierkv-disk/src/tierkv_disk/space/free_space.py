"""Free space in the segment files, in runs of pages. Pure: no I/O, no lock; the owner serialises calls.

Best fit: a frame takes the shortest free run that holds it, and freed pages join their free neighbours. If all frames
have one length, each frame takes exactly the run that another one freed. If a codec makes frames of many lengths, free
space fragments; a frame is then split over several runs, longest first. A write is therefore refused only if too few
pages are free in total. Taking and freeing cost the same for any number of frames, except for a search among the
distinct lengths of free runs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from tierkv_disk.extents import PageAddress, Run


class FreeSpace:
    """Set of free runs, indexed by address and by length."""

    def __init__(self) -> None:
        self.pages = 0
        """Number of free pages in all runs."""
        self._pages_at: dict[PageAddress, int] = {}
        self._start_before: dict[PageAddress, PageAddress] = {}  # the page after a free run -> first page of that run
        self._of_length: dict[int, dict[PageAddress, None]] = {}
        self._lengths: list[int] = []

    def add_run(self, run: Run) -> None:
        """Add free pages and join them with adjacent free runs."""
        address, pages = run
        self.pages += pages
        before = self._start_before.get(address)
        if before is not None:
            pages += self._cut(before)
            address = before
        after = PageAddress(address + pages)
        if after in self._pages_at:
            pages += self._cut(after)
        self._put(address, pages)

    def take_run(self, pages: int) -> Run | None:
        """Take the first ``pages`` pages of the shortest free run that has them; None if no run is long enough."""
        at = bisect_left(self._lengths, pages)
        return self._take(self._lengths[at], pages) if at < len(self._lengths) else None

    def take_row(self, lengths: Sequence[int]) -> list[Run]:
        """Take a run per length, as many of them adjacent as possible: the frames of a batch are moved in one call.

        Returns:
            A run per length, in order; fewer if no free run is long enough for the next one.
        """
        row: list[Run] = []
        left = sum(lengths)
        while len(row) < len(lengths):
            run = self.take_run(left)
            if run is None:
                longest = self._lengths[-1] if self._lengths else 0
                fitting = 0
                for length in lengths[len(row) :]:
                    if fitting + length > longest:
                        break
                    fitting += length
                if not fitting:
                    return row
                run = self._take(longest, fitting)
            address, pages = run
            left -= pages
            while pages:
                length = lengths[len(row)]
                row.append(Run(address, length))
                address, pages = PageAddress(address + length), pages - length
        return row

    def gather_runs(self, pages: int) -> tuple[Run, ...] | None:
        """Take ``pages`` pages in as few runs as possible; None if fewer pages are free."""
        if pages > self.pages:
            return None
        runs: list[Run] = []
        while pages:
            run = self.take_run(pages) or self._take(self._lengths[-1], pages)
            runs.append(run)
            pages -= run.pages
        return tuple(runs)

    def _take(self, length: int, pages: int) -> Run:
        # popitem, because it alone is O(1) on a dict whose last entries were removed before.
        address, _ = self._of_length[length].popitem()
        self._cut(address)
        taken = min(length, pages)
        self.pages -= taken
        if taken < length:
            self._put(PageAddress(address + taken), length - taken)
        return Run(address, taken)

    def _put(self, address: PageAddress, pages: int) -> None:
        self._pages_at[address] = pages
        self._start_before[PageAddress(address + pages)] = address
        addresses = self._of_length.get(pages)
        if addresses is None:
            self._of_length[pages] = {address: None}
            insort(self._lengths, pages)
        else:
            addresses[address] = None

    def _cut(self, address: PageAddress) -> int:
        pages = self._pages_at.pop(address)
        del self._start_before[PageAddress(address + pages)]
        addresses = self._of_length[pages]
        addresses.pop(address, None)
        if not addresses:
            del self._of_length[pages]
            del self._lengths[bisect_left(self._lengths, pages)]
        return pages


class Pins:
    """Counts of readers per frame. Pages freed during a read stay taken until the last reader has ended."""

    def __init__(self) -> None:
        self._readers: dict[PageAddress, int] = {}
        self._freed: dict[PageAddress, tuple[Run, ...]] = {}

    def __len__(self) -> int:
        """Number of frames that are being read."""
        return len(self._readers)

    def pin(self, address: PageAddress) -> None:
        """Add a reader of the frame that begins at ``address``."""
        self._readers[address] = self._readers.get(address, 0) + 1

    def unpin(self, address: PageAddress) -> tuple[Run, ...]:
        """Remove a reader. Returns the runs that became free."""
        readers = self._readers.pop(address) - 1
        if not readers:
            return self._freed.pop(address, ())
        self._readers[address] = readers
        return ()

    def free(self, runs: tuple[Run, ...]) -> tuple[Run, ...]:
        """Free the runs of one frame, now or at its last unpin. Returns the runs that are free now: all or none."""
        address = runs[0].address
        if address not in self._readers:
            return runs
        self._freed[address] = runs
        return ()
