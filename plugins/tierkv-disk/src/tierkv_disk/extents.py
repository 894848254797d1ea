"""Page addresses, runs and extents: names for positions in segment files. No I/O.

Addresses and extents are plain integers because a tier has millions of them. The garbage collector, whose pauses would
delay the engine, does not visit integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, NewType

PAGE_BYTES = 4096
"""Unit of all positions and lengths: O_DIRECT can move it, and the framework's frames are multiples of it."""

PAGES_MAX = 1 << 32
"""Exclusive bound of a page number within a segment."""

PageAddress = NewType("PageAddress", int)
"""A page: segment number in the upper 32 bits, page number within the segment in the lower 32 bits; both from 0."""

Extent = NewType("Extent", int)
"""A frame in one run: address of its first page, and in the lower 32 bits its length in bytes."""

RankedExtent = NewType("RankedExtent", int)
"""An extent, and in the lower 64 bits the rank of its chunk (:attr:`tierkv.abc.WriteRequest.rank`)."""

RANK_BITS = 64
_BITS = 32
SIZE_MASK = _MASK = (1 << _BITS) - 1
RANK_MASK = (1 << RANK_BITS) - 1


class Run(NamedTuple):
    """Adjacent pages in one segment file."""

    address: PageAddress
    pages: int


def rows_of(runs: Mapping[int, Run]) -> list[list[int]]:
    """Numbers of runs that lie one behind the other, two or more in a row, in order of their addresses."""
    rows: list[list[int]] = []
    end: int | None = None
    for address, pages, number in sorted([(address, pages, number) for number, (address, pages) in runs.items()]):
        if address == end:
            rows[-1].append(number)
        else:
            rows.append([number])
        end = address + pages
    return [row for row in rows if len(row) > 1]


def address_at(segment: int, page: int) -> PageAddress:
    """Pack the position of a page in its segment into one integer."""
    return PageAddress(segment << _BITS | page)


def segment_of(address: PageAddress) -> int:
    """Segment file that holds the address."""
    return address >> _BITS


def page_of(address: PageAddress) -> int:
    """Number of the page within its segment."""
    return address & _MASK


def extent_at(address: PageAddress, frame_bytes: int) -> Extent:
    """Extent of a frame of ``frame_bytes`` bytes that begins at ``address``."""
    return Extent(address << _BITS | frame_bytes)


def address_of(extent: Extent) -> PageAddress:
    """Address of the frame's first page."""
    return PageAddress(extent >> _BITS)


def frame_bytes_of(extent: Extent) -> int:
    """Length of the frame in bytes."""
    return extent & _MASK


def with_rank(extent: Extent, rank: int) -> RankedExtent:
    """Join extent and rank."""
    return RankedExtent(extent << RANK_BITS | rank)


def extent_of(entry: RankedExtent) -> Extent:
    """Extent without the rank."""
    return Extent(entry >> RANK_BITS)


def rank_of(entry: RankedExtent) -> int:
    """Rank of the chunk; 0: unknown."""
    return entry & RANK_MASK


def pages_for(size: int) -> int:
    """Number of pages that ``size`` bytes take."""
    return -(-size // PAGE_BYTES)


def pages_in(runs: tuple[Run, ...]) -> int:
    """Number of pages of several runs in total."""
    return sum(run.pages for run in runs)


def run_of(extent: Extent) -> Run:
    """Pages of the frame."""
    return Run(address_of(extent), pages_for(frame_bytes_of(extent)))
