"""Where frames lie: runs of pages in segment files. Names for numbers, no I/O.

Places and locations are integers, because a tier has millions: the garbage collector, whose pauses the engine would
feel, does not visit them.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

PAGE_BYTES = 4096
"""The unit of everything: O_DIRECT can move it, and frames of the framework are multiples of it."""

PAGES_MAX = 1 << 32
"""No segment has more."""

Place = NewType("Place", int)
"""A page: number of the segment file in the upper 32 bits, of the page in it in the lower; both from 0."""

Location = NewType("Location", int)
"""A frame in one run: the place where it begins, and in the lower 32 bits its length in bytes."""

_BITS = 32
_MASK = (1 << _BITS) - 1


class Run(NamedTuple):
    """Pages in a row, in one segment file."""

    place: Place
    pages: int


def place_at(segment: int, page: int) -> Place:
    """Page ``page`` of segment file ``segment``."""
    return Place(segment << _BITS | page)


def segment_of(place: Place) -> int:
    """The segment file of a place."""
    return place >> _BITS


def page_of(place: Place) -> int:
    """The place's page in its segment file."""
    return place & _MASK


def location_at(place: Place, frame_bytes: int) -> Location:
    """A frame of this length that begins here."""
    return Location(place << _BITS | frame_bytes)


def place_of(location: Location) -> Place:
    """Where the frame begins."""
    return Place(location >> _BITS)


def frame_bytes_of(location: Location) -> int:
    """The length of the frame there."""
    return location & _MASK


def pages_for(size: int) -> int:
    """Pages that so many bytes take."""
    return -(-size // PAGE_BYTES)


def pages_in(runs: tuple[Run, ...]) -> int:
    """Pages of several runs together."""
    return sum(run.pages for run in runs)


def run_of(location: Location) -> Run:
    """The pages of a frame that lies in one run."""
    return Run(place_of(location), pages_for(frame_bytes_of(location)))
