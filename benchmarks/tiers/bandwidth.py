"""Rows in gigabytes per second, and the sizes of frames that tiers are measured with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.measure import Cost, Settings, cpu_s_per_gb, medians, wall_ratios
from benchmarks.rows import Row, Target
from benchmarks.tiers.rig import Frames

KIB = 1 << 10
MIB = 1 << 20
GB = 1e9


@dataclass(frozen=True, slots=True)
class Limit:
    """Limit of a bandwidth. share: the part of it that is the target; 0: there is no target."""

    name: str
    costs: Sequence[Cost]
    share: float


def frame_sizes(settings: Settings) -> Iterable[tuple[str, Frames]]:
    """Sizes by name, each with a number of frames for which a turn takes about a tenth of a second.

    Small ones are what users run by default: one block of 16 tokens of a small model has 64 to 512 KiB.
    """
    sizes = (
        ("64 KiB", 64, 2048),
        ("256 KiB", 256, 768),
        ("512 KiB", 512, 384),
        ("2 MiB", 2048, 128),
        ("8 MiB", 8192, 64),
    )
    for name, kib, count in settings.pick(sizes, (("64 KiB", 64, 32), ("1 MiB", 1024, 8))):
        yield name, Frames(count, kib * KIB)


def bandwidth_row(
    what: str, total_bytes: int, ours: Sequence[Cost], limit: Limit, extra: Mapping[str, float] | None = None
) -> Row:
    """Row with the bandwidth in wall time beside the limit's, and the processor time of each."""
    gigabytes = total_bytes / GB
    us, them = medians(ours), medians(limit.costs)
    return Row(
        what,
        "GB/s",
        gigabytes / us.wall_s,
        limit.name,
        gigabytes / them.wall_s,
        wall_ratios(limit.costs, ours),
        Target("ratio", ">=", limit.share) if limit.share else None,
        {
            "cpu s/GB": cpu_s_per_gb(us, total_bytes),
            "cpu s/GB of the limit": cpu_s_per_gb(them, total_bytes),
            **(extra or {}),
        },
    )
