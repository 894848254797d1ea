"""What a user may write in the table of an LMDB tier, and the sizes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HEADROOM_MAX = 0.5
TRANSACTION_BYTES_MAX = 18 << 20
"""A transaction is two flushes of the disk, so large ones are cheap; but it keeps a copy of its pages in memory. Eight
frames of 2 MiB, a call's, with their headers."""
UNSHARED_BYTES = 1 << 20
"""The same where a call is not flushed as a whole: frames from this length on have transactions of their own."""
OTHER_FILES_BYTES = 64 << 10
"""For lock.mdb and our own small files."""
TREE_BYTES = 64 << 10
"""For each of the two trees, the list of free pages included; a 256th of the capacity comes on top."""
MAP_BYTES_AT_OPEN = 1 << 30
DURABILITIES = ("none", "batch", "always")


@dataclass(frozen=True, slots=True, kw_only=True)
class LmdbOptions:
    """Options of the backend ``lmdb``.

    path: directory of the tier on a local file system; created if absent, refused if it holds something else. Each
        namespace gets a directory of its own in it.
    durability: when bytes are forced to the disk. Each survives kill -9 at any instant; they differ in what a power cut
        may take. "batch": once for each write call, before it is acknowledged: nothing that was acknowledged is lost.
        "always": the same, and each frame (or transaction of small ones) is on the disk before the next is begun.
        "none": never; after a crash of the machine the namespace starts empty.
    map_headroom: share of the capacity that frames leave free, for holes between frames of different lengths.
    """

    path: str
    durability: Literal["none", "batch", "always"] = "batch"
    map_headroom: float = 0.05

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: names the option, its value, and what is allowed.
        """
        _require_path(self.path)
        if self.durability not in DURABILITIES:
            raise ValueError(f'durability = {self.durability!r}: allowed are "none", "batch" and "always"')
        if not 0.0 <= self.map_headroom <= HEADROOM_MAX:
            raise ValueError(f"map_headroom = {self.map_headroom}: give a share from 0.0 to {HEADROOM_MAX}")

    @property
    def root(self) -> Path:
        """``path``, with a leading ~ expanded."""
        return Path(self.path).expanduser()


@dataclass(frozen=True, slots=True, kw_only=True)
class LmdbReaderOptions:
    """Options of the backend ``lmdb_reader``.

    path: directory of a tier that another process on this machine writes with ``backend = "lmdb"``.
    """

    path: str

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: names the option, its value, and what is allowed.
        """
        _require_path(self.path)

    @property
    def root(self) -> Path:
        """``path``, with a leading ~ expanded."""
        return Path(self.path).expanduser()


def _require_path(path: str) -> None:
    if not path or "\0" in path:
        raise ValueError(f'path = {path!r}: give a directory on a local disk, like "/var/cache/tierkv/lmdb"')
    try:
        Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"path = {path!r}: give a path without ~, its user's home is not known") from None


@dataclass(frozen=True, slots=True)
class Sizes:
    """How the tier's capacity, which the directory never exceeds, is divided.

    Beside the pages of frames there must be room for the trees, for pages that were freed and are reusable only two
    transactions later, and for holes between frames of different lengths. A delete needs some, too: it copies pages.

    map_bytes: the map's size at open. It is address space; it grows when it is full.
    map_bytes_max: the most that the map, and so the data file, can take.
    pages_bytes_max: pages of frames, and of their tree, are refused beyond this.
    room_bytes: as many bytes of frames of the longest kind as fill these pages: what the framework may count on.
    transaction_bytes: frames up to this many bytes in sum share a transaction.
    """

    map_bytes: int
    map_bytes_max: int
    pages_bytes_max: int
    room_bytes: int
    transaction_bytes: int

    @classmethod
    def of(
        cls, options: LmdbOptions, capacity_bytes: int, *, frame_bytes_max: int, file_bytes: int, page_bytes: int
    ) -> Sizes:
        """Sizes for a capacity. The map is never smaller than what the file already has.

        Raises:
            ValueError: the capacity has no room for one frame; says how much has.
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
    """A capacity that surely has room for a frame of so many bytes of pages, in whole MiB."""
    mib = 1 << 20
    needed = 3 * frame_pages + 2 * TREE_BYTES + OTHER_FILES_BYTES
    return -(-int(needed / (1 - options.map_headroom - 1 / 128 - 1 / 8)) // mib) * mib


def page_round(size: int, page_bytes: int) -> int:
    """Bytes of pages that a value takes: its own, and 16 for the header of its first page."""
    return -(-(size + 16) // page_bytes) * page_bytes
