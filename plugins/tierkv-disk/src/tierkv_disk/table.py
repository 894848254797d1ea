"""What is stored and where, and which pages are free. In memory; the owner serialises calls.

Nearly all frames lie in one run; their place and length are one integer. The few that lie in several are in a dict
beside.
"""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.types.keys import Key
from tierkv_disk.places import Location, Place, Run, frame_bytes_of, location_at, place_at, place_of, run_of
from tierkv_disk.space import FreeSpace, Pins

Entries = dict[Key, Location]
"""Everything stored, in the order in which it was written."""

NOWHERE = place_at(0xFFFF_FFFF, 0)
"""The place of frames that lie in several runs; no segment has that number."""


class Table:
    """Keys, runs of pages, and readers in the way.

    entries: everything stored. scattered: the runs of the keys whose place is ``NOWHERE``. free: what is free.
    """

    def __init__(self) -> None:
        self.entries: Entries = {}
        self.scattered: dict[Key, tuple[Run, ...]] = {}
        self.free = FreeSpace()
        self.pins = Pins()
        self.out_of_service: set[Place] = set()
        """Frames that begin here do not give their pages back."""

    def find(self, key: Key) -> tuple[tuple[Run, ...], int] | None:
        """Where the frame of ``key`` lies, and its length."""
        location = self.entries.get(key)
        if location is None:
            return None
        return self._runs(key, location), frame_bytes_of(location)

    def put(self, key: Key, runs: tuple[Run, ...], frame_bytes: int) -> None:
        """The frame of ``key`` lies here from now on."""
        self.drop(key)
        if len(runs) == 1:
            self.entries[key] = location_at(runs[0].place, frame_bytes)
        else:
            self.entries[key] = location_at(NOWHERE, frame_bytes)
            self.scattered[key] = runs

    def drop(self, key: Key) -> None:
        """``key`` is not stored any more; its pages are free when its readers are done."""
        location = self.entries.pop(key, None)
        if location is not None:
            runs = self._runs(key, location)
            self.scattered.pop(key, None)
            self.give_back(runs)

    def take(self, pages: int) -> tuple[Run, ...] | None:
        """Free pages in a row; None if there are none."""
        run = self.free.take(pages)
        return None if run is None else (run,)

    def give_back(self, runs: tuple[Run, ...]) -> None:
        """Nobody refers to these any more."""
        if runs[0].place not in self.out_of_service:
            self._free(self.pins.free(runs))

    def unpin(self, place: Place) -> None:
        """A reader of the frame that begins here is done."""
        self._free(self.pins.unpin(place))

    def _runs(self, key: Key, location: Location) -> tuple[Run, ...]:
        return (run_of(location),) if place_of(location) != NOWHERE else self.scattered[key]

    def _free(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self.free.add(run)
