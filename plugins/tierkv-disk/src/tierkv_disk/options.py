"""Options of a disk tier, as written in the tier's table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tierkv.abc.places import absolute_path

GIB = 1 << 30
MIB = 1 << 20

DURABILITIES = ("none", "batch", "always")
DIRECT_IO_MODES = ("auto", "on", "off")


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Options of a disk tier."""

    path: str
    """Directory for this program alone; created if absent. Several namespaces, processes and ranks may share it."""
    durability: Literal["none", "batch", "always"] = "batch"
    """Time of forcing bytes to the device. Each value survives kill -9; they differ in what a power cut may take.

    "batch": once per write call, before it is acknowledged. "always": after each frame of the call as well. "none":
    never; after a power cut, frames of the last seconds may be missing or damaged (a miss, never wrong data).
    """
    directory_bytes_max: int | None = None
    """Limit of everything in ``path`` together: all namespaces of all processes. None: no limit."""
    high_watermark: float = 0.95
    """Share of ``directory_bytes_max`` that segments may fill; the rest is for index logs."""
    low_watermark: float = 0.85
    """Share of ``directory_bytes_max`` down to which unused namespaces are removed when a segment would exceed the high
    watermark."""
    min_free_bytes: int = GIB
    """The tier stops growing when the file system would have less free space than this."""
    reclaim_unused: bool = True
    """Whether namespaces that no process has open may be removed at a limit, least recently used first."""
    quarantine_bytes_max: int = 64 * MIB
    """Bytes of bad frames that may be kept out of service."""
    segment_bytes: int = 256 * MIB
    """Size of a segment file, allocated at once. Larger tiers use larger segments (at most 128)."""
    direct_io: Literal["auto", "on", "off"] = "auto"
    """Value "auto" bypasses the page cache if the file system can; "on" requires it; "off" does not try."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", absolute_path(self.path))
        _check_choice("durability", self.durability, DURABILITIES)
        _check_choice("direct_io", self.direct_io, DIRECT_IO_MODES)
        if self.min_free_bytes < 0:
            raise ValueError(f"min_free_bytes = {self.min_free_bytes} is negative; 0 switches the reserve off")
        if not 0 < self.low_watermark <= self.high_watermark <= 1:
            raise ValueError(
                f"low_watermark = {self.low_watermark:g}, high_watermark = {self.high_watermark:g}: give shares of "
                "directory_bytes_max above 0 and up to 1, the low one not above the high one"
            )
        if self.directory_bytes_max is not None and self.directory_bytes_max < MIB:
            raise ValueError(f"directory_bytes_max = {self.directory_bytes_max} is below 1 MiB ({MIB})")
        if self.quarantine_bytes_max < 0:
            raise ValueError(f"quarantine_bytes_max = {self.quarantine_bytes_max} is negative; 0 switches it off")
        if self.segment_bytes < MIB:
            raise ValueError(f"segment_bytes = {self.segment_bytes} is below 1 MiB ({MIB}); the default is {256 * MIB}")


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} = {value!r} is not one of {', '.join(map(repr, allowed))}")
