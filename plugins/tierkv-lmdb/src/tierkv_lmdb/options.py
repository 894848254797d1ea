"""Options of an LMDB tier, as written in its table, and the sizes that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tierkv.abc.places import absolute_path

HEADROOM_MAX = 0.5
TRANSACTION_BYTES_MAX = 18 << 20
"""Longest transaction in bytes of frames. A transaction costs two flushes of the disk, so large ones are cheap, but it
keeps a copy of its pages in memory. This is one call of eight frames of 2 MiB, with their headers."""
UNSHARED_BYTES = 1 << 20
"""Longest shared transaction if a call is not flushed as a whole: longer frames have transactions of their own."""
OTHER_FILES_BYTES = 64 << 10
"""Bytes for lock.mdb and the small files of this plugin."""
TREE_BYTES = 64 << 10
"""Bytes for each of the two trees, including the list of free pages; 1/256 of the capacity is added."""
MAP_BYTES_AT_OPEN = 1 << 30
DURABILITIES = ("none", "batch", "always")


@dataclass(frozen=True, slots=True, kw_only=True)
class LmdbOptions:
    """Options of the backend ``lmdb``."""

    path: str
    """Directory of the tier on a local file system; created if absent, refused if it holds anything else. Each
    namespace gets a directory of its own in it."""
    durability: Literal["none", "batch", "always"] = "batch"
    """Time of forcing bytes to the disk. Each value survives kill -9; they differ in what a power cut may take.

    "batch": once for each write call, before it is acknowledged; no acknowledged frame is lost. "always": in addition,
    each frame (or transaction of small frames) is on the disk before the next one begins. "none": never; after a crash
    of the machine the namespace starts empty.
    """
    map_headroom: float = 0.05
    """Share of the capacity that frames leave free, for holes between frames of different lengths."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: names the option, its value, and what is allowed.
        """
        object.__setattr__(self, "path", absolute_path(self.path))
        if self.durability not in DURABILITIES:
            raise ValueError(f'durability = {self.durability!r}: allowed are "none", "batch" and "always"')
        if not 0.0 <= self.map_headroom <= HEADROOM_MAX:
            raise ValueError(f"map_headroom = {self.map_headroom}: give a share from 0.0 to {HEADROOM_MAX}")

    @property
    def root(self) -> Path:
        """``path`` as a path; absolute since the description was read, because a process may change its directory."""
        return Path(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class LmdbReaderOptions:
    """Options of the backend ``lmdb-read-only``."""

    path: str
    """Directory of a tier that another process on this machine writes with ``backend = "lmdb"``."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: names the option, its value, and what is allowed.
        """
        object.__setattr__(self, "path", absolute_path(self.path))

    @property
    def root(self) -> Path:
        """``path`` as a path; absolute since the description was read, because a process may change its directory."""
        return Path(self.path)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Division of the tier's capacity, which the directory never exceeds.

    Beside the pages of frames there must be room for the trees, for freed pages that become reusable only two
    transactions later, and for holes between frames of different lengths. A delete needs some pages as well: it copies.
    """

    map_bytes: int
    """Size of the map at open. It is address space, and grows when it is full."""
    map_bytes_max: int
    """Bound of the map, and therefore of the data file."""
    pages_bytes_max: int
    """Bound of the pages of frames and of their tree; writes beyond it are refused."""
    room_bytes: int
    """Bytes of frames of the longest kind that fill these pages. The framework may count on them."""
    transaction_bytes: int
    """Bound of the frames that share a transaction, in bytes."""

    @classmethod
    def of(
        cls, options: LmdbOptions, capacity_bytes: int, *, frame_bytes_max: int, file_bytes: int, page_bytes: int
    ) -> Sizes:
        """Derive the sizes from a capacity. The map is never smaller than the existing file.

        Raises:
            ValueError: the capacity has no room for one frame; names the smallest capacity that has.
        """
        frame_pages = page_round(frame_bytes_max, page_bytes)
        limit = (capacity_bytes - OTHER_FILES_BYTES) // page_bytes * page_bytes
        shared = max(frame_pages, min(TRANSACTION_BYTES_MAX, limit // 16))
        tree = TREE_BYTES + limit // 256
        pages = limit - tree - 2 * shared - int(limit * options.map_headroom)
        if pages < frame_pages:
            raise ValueError(
                f"a capacity of {capacity_bytes} bytes has no room for a frame of {frame_bytes_max} bytes beside what "
                f"LMDB needs itself: give at least {minimum_bytes(options, frame_pages)}"
            )
        return cls(
            map_bytes=max(min(limit, MAP_BYTES_AT_OPEN), file_bytes),
            map_bytes_max=max(limit, file_bytes),
            pages_bytes_max=pages,
            room_bytes=max(1, (pages - tree) // frame_pages) * frame_bytes_max,
            transaction_bytes=shared if options.durability == "batch" else min(shared, UNSHARED_BYTES),
        )


def minimum_bytes(options: LmdbOptions, frame_pages: int) -> int:
    """Capacity, in whole MiB, that surely has room for a frame of ``frame_pages`` bytes of pages."""
    mib = 1 << 20
    needed = 3 * frame_pages + 2 * TREE_BYTES + OTHER_FILES_BYTES
    return -(-int(needed / (1 - options.map_headroom - 1 / 128 - 1 / 8)) // mib) * mib


def page_round(size: int, page_bytes: int) -> int:
    """Bytes of pages that a value takes: its own length, and 16 bytes for the header of its first page."""
    return -(-(size + 16) // page_bytes) * page_bytes
