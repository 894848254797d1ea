"""Page addresses, runs and extents: names for positions in segment files. No I/O.

Addresses are plain integers, and extents plain bytes, because a tier has millions of them. The garbage collector, whose
pauses would delay the engine, does not visit integers and bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

PAGE_BYTES = 4096
"""Unit of all positions and lengths: O_DIRECT can move it, and the framework's frames are multiples of it."""

PAGES_MAX = 1 << 32
"""Exclusive bound of a page number within a segment."""

FRAME_BYTES_LIMIT = 1 << 32
"""Exclusive bound of a frame's length: the log stores it in four bytes."""

PageAddress = NewType("PageAddress", int)
"""A page: segment number in the upper 32 bits, page number within the segment in the lower 32 bits; both from 0."""

Extent = NewType("Extent", bytes)
"""A frame in one run: address of its first page, its length in bytes, and the rank of its chunk
(:attr:`tierkv.abc.WriteRequest.rank`; 0: unknown). Packed, so that numpy reads millions of them at once."""

EXTENT_FIELDS = ("address", "frame_bytes", "rank")
"""Columns of extents, in their order."""

EXTENT = np.dtype({"names": EXTENT_FIELDS, "formats": ("<u8", "<u4", "<u8")})
"""Layout of an extent, without gaps."""

Columns: TypeAlias = npt.NDArray[np.void]
"""Many extents, by column; see :data:`EXTENT`."""

_EXTENT = struct.Struct("<QIQ")
_BITS = 32
_MASK = (1 << _BITS) - 1


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


def extent_at(address: PageAddress, frame_bytes: int, rank: int) -> Extent:
    """Extent of a frame of ``frame_bytes`` bytes that begins at ``address``."""
    return Extent(_EXTENT.pack(address, frame_bytes, rank))


def read_extent(extent: Extent) -> tuple[PageAddress, int, int]:
    """Address, length in bytes and rank."""
    address, frame_bytes, rank = _EXTENT.unpack(extent)
    return PageAddress(address), frame_bytes, rank


def columns_of(extents: Iterable[Extent]) -> Columns:
    """Read many extents at once."""
    return np.frombuffer(b"".join(extents), EXTENT)


def pages_for(size: int) -> int:
    """Number of pages that ``size`` bytes take."""
    return -(-size // PAGE_BYTES)


def pages_in(runs: tuple[Run, ...]) -> int:
    """Number of pages of several runs in total."""
    return sum(run.pages for run in runs)
