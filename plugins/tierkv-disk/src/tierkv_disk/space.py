"""Free space in the segment files, in runs of pages. Pure: no I/O, no lock; the owner serialises calls.

Best fit: a frame takes the shortest free run that holds it, and what is freed joins its free neighbours. Where all
frames have one length, each takes exactly the place that another left. Where a codec makes them of all lengths, free
space splinters; then a frame is laid into several runs, the longest first, so that nothing is ever refused while there
are enough free pages in all. Taking and freeing cost the same however many frames there are, but for a search among the
distinct lengths of free runs.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from tierkv_disk.places import Place, Run


class FreeSpace:
    """The free runs. ``pages``: how many pages they have together."""

    def __init__(self) -> None:
        self.pages = 0
        self._pages_at: dict[Place, int] = {}
        self._start_before: dict[Place, Place] = {}  # the page after a free run -> where that run begins
        self._of_length: dict[int, dict[Place, None]] = {}
        self._lengths: list[int] = []

    def add(self, run: Run) -> None:
        """Nobody uses these pages any more."""
        place, pages = run
        self.pages += pages
        before = self._start_before.get(place)
        if before is not None:
            pages += self._cut(before)
            place = before
        after = Place(place + pages)
        if after in self._pages_at:
            pages += self._cut(after)
        self._put(place, pages)

    def take(self, pages: int) -> Run | None:
        """The beginning of the shortest free run that has so many pages; None if no run has."""
        at = bisect_left(self._lengths, pages)
        return self._take(self._lengths[at], pages) if at < len(self._lengths) else None

    def gather(self, pages: int) -> tuple[Run, ...] | None:
        """So many pages in as few runs as possible; None if there are not so many."""
        if pages > self.pages:
            return None
        runs: list[Run] = []
        while pages:
            run = self.take(pages) or self._take(self._lengths[-1], pages)
            runs.append(run)
            pages -= run.pages
        return tuple(runs)

    def _take(self, length: int, pages: int) -> Run:
        # popitem, because it alone is O(1) on a dict that lost its last entries before.
        place, _ = self._of_length[length].popitem()
        self._cut(place)
        taken = min(length, pages)
        self.pages -= taken
        if taken < length:
            self._put(Place(place + taken), length - taken)
        return Run(place, taken)

    def _put(self, place: Place, pages: int) -> None:
        self._pages_at[place] = pages
        self._start_before[Place(place + pages)] = place
        places = self._of_length.get(pages)
        if places is None:
            self._of_length[pages] = {place: None}
            insort(self._lengths, pages)
        else:
            places[place] = None

    def _cut(self, place: Place) -> int:
        pages = self._pages_at.pop(place)
        del self._start_before[Place(place + pages)]
        places = self._of_length[pages]
        places.pop(place, None)
        if not places:
            del self._of_length[pages]
            del self._lengths[bisect_left(self._lengths, pages)]
        return pages


class Pins:
    """Runs that somebody reads: what is freed meanwhile stays taken until the last reader is done."""

    def __init__(self) -> None:
        self._readers: dict[Place, int] = {}
        self._freed: dict[Place, tuple[Run, ...]] = {}

    def __len__(self) -> int:
        """How many frames are being read."""
        return len(self._readers)

    def pin(self, place: Place) -> None:
        """A reader of the frame that begins here starts."""
        self._readers[place] = self._readers.get(place, 0) + 1

    def unpin(self, place: Place) -> tuple[Run, ...]:
        """A reader is done. Returns what is free now."""
        readers = self._readers.pop(place) - 1
        if not readers:
            return self._freed.pop(place, ())
        self._readers[place] = readers
        return ()

    def free(self, runs: tuple[Run, ...]) -> tuple[Run, ...]:
        """The frame that begins with the first of these is gone. Returns what is free now: all, or nothing yet."""
        place = runs[0].place
        if place not in self._readers:
            return runs
        self._freed[place] = runs
        return ()
