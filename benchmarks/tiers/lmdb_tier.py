"""The LMDB tier, through dispatcher, tier and plugin, with frames checked: beside O_DIRECT and memcpy.

A cold read is one after its file was dropped from the page cache, before the measured time. A warm read copies and
checks bytes in memory: its limit is memcpy with as many threads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np

from benchmarks.measure import Cost, Settings, take_turns, timed
from benchmarks.rows import Row
from benchmarks.tiers.bandwidth import MIB, Limit, bandwidth_row, frame_sizes
from benchmarks.tiers.raw_disk import RawDisk
from benchmarks.tiers.rig import Frames, OpenTier, opened

ATTEMPTS = 20
"""Attempts to drop a file from the page cache before a cold read is given up."""


def run(settings: Settings) -> Iterator[Row]:
    """Measure put, cold get and warm get, for two sizes of frames."""
    for size, frames in frame_sizes(settings):
        with tempfile.TemporaryDirectory(dir=settings.directory, prefix="tierkv-benchmark-") as folder:
            yield from _Bench(Path(folder), frames).rows(size, settings.rounds)


class _Bench:
    """One size of frames in one folder."""

    def __init__(self, folder: Path, frames: Frames) -> None:
        self._folder = folder
        self._frames = frames
        capacity = 2 * len(frames.keys) * frames.frame_bytes
        self._options: dict[str, object] = {"backend": "lmdb", "path": str(folder / "tier"), "capacity": capacity}

    def rows(self, size: str, rounds: int) -> Iterator[Row]:
        frames = self._frames
        with opened(self._options, frames) as tier:
            threads = tier.threads
            with RawDisk(self._folder / "raw", frames, threads) as raw:
                puts = take_turns([lambda: self._put(tier), lambda: timed(raw.put)], rounds)
        with RawDisk(self._folder / "raw-read", frames, threads) as raw:
            raw.put()
            colds = take_turns([self._cold_get, lambda: _cold_raw(raw)], rounds)
            direct = raw.direct
        with opened(self._options, frames) as tier, ThreadPoolExecutor(threads) as pool:
            self._put(tier)  # cold reads leave nothing in memory
            warms = take_turns([lambda: timed(lambda: tier.get(frames)), lambda: self._copy(pool)], rounds)
            frames.wipe()
            tier.get(frames)
            frames.verify()
        extra = {"threads": threads, "O_DIRECT of the limit": direct, "verified, MiB": frames.total_bytes / MIB}
        total = frames.total_bytes
        yield bandwidth_row(f"put, {size}", total, puts[0], Limit("raw pwrite, fdatasync", puts[1], 0.55), extra)
        yield bandwidth_row(f"cold get, {size}", total, colds[0], Limit("raw preadv", colds[1], 0.85), extra)
        yield bandwidth_row(f"warm get, {size}", total, warms[0], Limit("memcpy", warms[1], 0.85), {"threads": threads})

    def _put(self, tier: OpenTier) -> Cost:
        tier.delete(self._frames)
        return timed(lambda: tier.put(self._frames))

    def _cold_get(self) -> Cost:
        """Get from a new environment: pages that a process has mapped stay in memory whatever the kernel is advised."""
        for data in self._folder.glob("tier/*/data.mdb"):
            _drop(data)
        with opened(self._options, self._frames) as tier:
            return timed(lambda: tier.get(self._frames))

    def _copy(self, pool: ThreadPoolExecutor) -> Cost:
        """Copy from one half of the slots to the other, and back: memory in use before, as many bytes as a get."""
        arena, slots = self._frames.arena, self._frames.slots
        targets = [arena.payload(ref.slot) for ref in slots]
        sources = targets[len(targets) // 2 :] + targets[: len(targets) // 2]
        return timed(lambda: list(pool.map(np.copyto, targets, sources)))


def _cold_raw(raw: RawDisk) -> Cost:
    raw.drop_cache()
    return timed(raw.get)


def _drop(path: Path) -> None:
    """Drop a file from the page cache.

    Raises:
        RuntimeError: more than a few pages of it are still there after several attempts.
    """
    share = 1.0
    with path.open("rb") as file:
        os.fdatasync(file.fileno())
        for attempt in range(ATTEMPTS):
            time.sleep(attempt * 0.01)  # the kernel keeps pages that are mapped, locked or being written at the moment
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            share = _cached_share(file)
            if share <= 1 / 8:
                return
    raise RuntimeError(f"{path}: {share:.0%} of it is still in memory; run the benchmark while nothing else reads it")


def _cached_share(file: BinaryIO) -> float:
    """Share of a file's pages in the page cache. It asks about a map, because a probing read starts to read ahead."""
    with mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as pages:
        size = len(pages)
        resident = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.addressof(ctypes.c_byte.from_buffer(pages))
        if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), resident):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), file.name)
        return sum(page & 1 for page in resident) / len(resident)
