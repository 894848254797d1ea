"""What users may write in the tier's table."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20

DURABILITIES = ("none", "batch", "always")
DIRECT_IO_MODES = ("auto", "on", "off")


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Options of a disk tier.

    path: directory for this program alone; created if absent. Several namespaces, processes and ranks may share it.
    durability: when bytes are forced to the device. Each survives kill -9; they differ in what a power cut may take.
        "batch": once per write call, before it is acknowledged. "always": after each frame of the call as well.
        "none": never; after a power cut, frames of the last seconds may be gone or damaged (a miss, never wrong data).
    directory_bytes_max: limit of everything in ``path`` together: all namespaces of all processes. None: no limit.
    high_watermark: share of it that segments may fill; what is left is for index logs.
    low_watermark: share of it down to which unused namespaces are removed when a segment would go above the high one.
    min_free_bytes: the tier stops growing where the file system would have less free space than this.
    reclaim_unused: namespaces that no process has open may be removed, the one unused for longest first, where a limit
        of the directory or of the file system stands against growth.
    quarantine_bytes_max: places of bad frames that are kept out of service.
    segment_bytes: size of a segment file, allocated at once. Larger tiers use larger ones (at most 128 segments).
    direct_io: "auto" bypasses the page cache where the file system can; "on" insists; "off" does not try.
    """

    path: str
    durability: str = "batch"
    directory_bytes_max: int | None = None
    high_watermark: float = 0.95
    low_watermark: float = 0.85
    min_free_bytes: int = GIB
    reclaim_unused: bool = True
    quarantine_bytes_max: int = 64 * MIB
    segment_bytes: int = 256 * MIB
    direct_io: str = "auto"

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path is empty; give the directory where this tier keeps its files")
        _check_choice("durability", self.durability, DURABILITIES)
        _check_choice("direct_io", self.direct_io, DIRECT_IO_MODES)
        if self.min_free_bytes < 0:
            raise ValueError(f"min_free_bytes = {self.min_free_bytes} is negative; 0 switches the reserve off")
        if not 0 < self.low_watermark <= self.high_watermark <= 1:
            raise ValueError(
                f"low_watermark = {self.low_watermark:g}, high_watermark = {self.high_watermark:g}: they are shares of "
                "directory_bytes_max, above 0, up to 1, and the low one is not above the high one"
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
