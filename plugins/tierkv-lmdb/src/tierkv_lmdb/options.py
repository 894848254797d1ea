"""What a user may write in the table of an LMDB tier, and the sizes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HEADROOM_MIN, HEADROOM_MAX = 0.05, 10.0
SLACK_BYTES = 16 * 1024**2
SLACK_FRAMES = 16
"""Two of the largest batches: pages of deleted frames are reusable two transactions later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LmdbOptions:
    """Options of the backend ``lmdb``.

    path: directory of the tier on a local file system; created if absent, refused if it holds something else. Each
        namespace gets a directory of its own in it.
    durability: "batch" syncs every transaction to the disk, so what was acknowledged survives a power cut. "none"
        leaves syncing to the operating system: it survives the death of the process; after a crash of the machine the
        namespace starts empty.
    map_headroom: share of the tier's capacity added for what LMDB needs beside the frames (rounding to pages, its
        trees, free pages between chunks of different lengths). The data file never grows beyond capacity times
        (1 + map_headroom), plus 16 MiB and 16 frames.
    """

    path: str
    durability: Literal["batch", "none"] = "batch"
    map_headroom: float = 0.25

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: names the option, its value, and what is allowed.
        """
        if not self.path or "\0" in self.path:
            raise ValueError(f'path = {self.path!r}: give a directory on a local disk, like "/var/cache/tierkv/lmdb"')
        try:
            Path(self.path).expanduser()
        except RuntimeError:
            raise ValueError(f"path = {self.path!r}: give a path without ~, its user's home is not known") from None
        if self.durability not in ("batch", "none"):
            raise ValueError(f'durability = {self.durability!r}: allowed are "batch" and "none"')
        if not HEADROOM_MIN <= self.map_headroom <= HEADROOM_MAX:
            raise ValueError(f"map_headroom = {self.map_headroom}: give a share from {HEADROOM_MIN} to {HEADROOM_MAX}")

    @property
    def root(self) -> Path:
        """``path``, with a leading ~ expanded."""
        return Path(self.path).expanduser()


@dataclass(frozen=True, slots=True)
class MapSizes:
    """How large the data file may become.

    The map is address space, not disk, so it is opened at its final size once: a map that grows under open readers
    would have to wait for them.

    map_bytes: size of the map, and so the most that the file can take.
    frames_bytes_max: pages of frames are refused beyond this; the rest is for pages that are free but not reusable yet,
        and lets a delete work in a full map (a delete copies pages, too).
    """

    map_bytes: int
    frames_bytes_max: int

    @classmethod
    def of(
        cls, options: LmdbOptions, capacity_bytes: int | None, *, frame_bytes_max: int, file_bytes: int, disk_bytes: int
    ) -> MapSizes:
        """Sizes for a capacity, or for the whole disk where none is set; never less than the file already has."""
        slack = SLACK_BYTES + SLACK_FRAMES * frame_bytes_max
        if capacity_bytes is None:
            wanted = max(disk_bytes - slack, slack)
        else:
            wanted = int(capacity_bytes * (1 + options.map_headroom))
        return cls(map_bytes=_whole_mib(max(wanted, file_bytes) + slack), frames_bytes_max=wanted)


def _whole_mib(size: int) -> int:
    mib = 1024**2
    return -(-size // mib) * mib
