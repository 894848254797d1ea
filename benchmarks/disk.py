"""The disk tier, through dispatcher, tier and plugin, with frames checked: beside O_DIRECT on the same file system.

Both sides write into files that were allocated before, from the same aligned memory, with as many threads; ours also
keeps an index log and forces it to the device. Reads bypass the page cache on both sides.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Cost, Settings, medians, take_turns, timed, wall_ratios
from benchmarks.raw_disk import RawDisk
from benchmarks.rows import Row, Target
from benchmarks.tier_rig import Frames, OpenTier, opened

MIB = 1 << 20
GB = 1e9


def run(settings: Settings) -> Iterator[Row]:
    """Put, put against a file per frame, and cold get, for two sizes of frames."""
    for payload_mib in settings.pick((2, 8), (1,)):
        frames = Frames(settings.pick(64 if payload_mib > 2 else 128, 8), payload_mib * MIB)
        with tempfile.TemporaryDirectory(dir=settings.directory, prefix="tierkv-benchmark-") as folder:
            yield from _rows(Path(folder), frames, f"{payload_mib} MiB", settings.rounds)


def _rows(folder: Path, frames: Frames, size: str, rounds: int) -> Iterator[Row]:
    capacity = 2 * len(frames.keys) * frames.frame_bytes
    options: dict[str, object] = {
        "backend": "disk", "path": str(folder / "tier"), "capacity": capacity,
        "segment_bytes": capacity // 2, "min_free_bytes": 0,
    }  # fmt: skip
    with opened(options, frames) as tier, RawDisk(folder / "raw", frames, tier.threads) as raw:

        def put() -> Cost:
            tier.delete(frames)
            return timed(lambda: tier.put(frames))

        def put_files() -> Cost:
            raw.remove_files()
            return timed(raw.put_files)

        puts = take_turns([put, lambda: timed(raw.put), put_files], rounds)
        raw.remove_files()
        gets = take_turns([lambda: _cold(tier, raw, frames), lambda: timed(raw.get)], rounds)
        frames.wipe()
        tier.get(frames)
        frames.verify()
        extra = {
            "threads": tier.threads,
            "O_DIRECT of the limit": raw.direct,
            "verified, MiB": frames.total_bytes / MIB,
        }
    yield row(f"put, {size}", frames, puts[0], puts[1], "raw pwrite and fdatasync", Target("ratio", ">=", 0.95), extra)
    yield row(f"put, {size}", frames, puts[0], puts[2], "one file per frame, renamed", Target("ratio", ">=", 2.0), {})
    yield row(f"cold get, {size}", frames, gets[0], gets[1], "raw preadv", Target("ratio", ">=", 0.95), extra)


def _cold(tier: OpenTier, raw: RawDisk, frames: Frames) -> Cost:
    raw.drop_cache()
    return timed(lambda: tier.get(frames))


def row(
    what: str,
    frames: Frames,
    ours: list[Cost],
    limit: list[Cost],
    limit_name: str,
    target: Target,
    extra: dict[str, float],
) -> Row:
    """Bandwidth on the wall beside the limit's, and what each takes of the processor."""
    gigabytes = frames.total_bytes / GB
    us, them = medians(ours), medians(limit)
    return Row(
        what,
        "GB/s",
        gigabytes / us.wall_s,
        limit_name,
        gigabytes / them.wall_s,
        wall_ratios(limit, ours),
        target,
        {"cpu s/GB": us.cpu_s / gigabytes, "cpu s/GB of the limit": them.cpu_s / gigabytes, **extra},
    )
