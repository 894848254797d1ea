"""The disk tier, through dispatcher, tier and plugin, with frames checked: beside O_DIRECT on the same file system.

Both sides write into files that were allocated before, from the same aligned memory, with as many threads; ours also
keeps an index log and forces it to the device. Reads bypass the page cache on both sides.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Cost, Settings, take_turns, timed
from benchmarks.rows import Row
from benchmarks.tiers.bandwidth import MIB, Limit, bandwidth_row, frame_sizes
from benchmarks.tiers.raw_disk import RawDisk
from benchmarks.tiers.rig import Frames, OpenTier, disk_options, opened


def run(settings: Settings) -> Iterator[Row]:
    """Measure put, put against a file per frame, and cold get, for two sizes of frames."""
    for size, frames in frame_sizes(settings):
        with tempfile.TemporaryDirectory(dir=settings.directory, prefix="tierkv-benchmark-") as folder:
            yield from _rows(Path(folder), frames, size, settings.rounds)


def _rows(folder: Path, frames: Frames, size: str, rounds: int) -> Iterator[Row]:
    options = disk_options(folder / "tier", frames)
    with opened(options, frames) as tier, RawDisk(folder / "raw", frames, tier.threads) as raw:

        def put() -> Cost:
            tier.delete(frames)
            return timed(lambda: tier.put(frames))

        def put_files() -> Cost:
            raw.remove_files()
            return timed(raw.put_files)

        puts = take_turns([put, lambda: timed(raw.put), put_files], rounds)
        raw.remove_files()
        gets = take_turns([lambda: _cold_get(tier, raw, frames), lambda: timed(raw.get)], rounds)
        with opened({**options, "path": str(folder / "own"), "own_buffers": True}, frames) as copied:
            copied.put(frames)
            apart = take_turns([lambda: _cold_get(copied, raw, frames), lambda: _cold_get(tier, raw, frames)], rounds)
        frames.wipe()
        tier.get(frames)
        frames.verify()
        verified = frames.total_bytes / MIB
        extra = {"threads": tier.threads, "O_DIRECT of the limit": raw.direct, "verified, MiB": verified}
    total = frames.total_bytes
    yield bandwidth_row(f"put, {size}", total, puts[0], Limit("raw pwrite, fdatasync", puts[1], 0.95), extra)
    yield bandwidth_row(f"put, {size}", total, puts[0], Limit("one file per frame, renamed", puts[2], 2.0))
    yield bandwidth_row(f"cold get, {size}", total, gets[0], Limit("raw preadv", gets[1], 0.95), extra)
    yield bandwidth_row(f"cold get, own_buffers, {size}", total, apart[0], Limit("cold get to slots", apart[1], 0.3))


def _cold_get(tier: OpenTier, raw: RawDisk, frames: Frames) -> Cost:
    raw.drop_cache()
    return timed(lambda: tier.get(frames))
