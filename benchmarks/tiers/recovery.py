"""Open of a disk tier with a million chunks: from the plugin's start to an index that the manager can read.

The log is written by the plugin's own encoder; the segment files are as long as they say, and sparse, since no frame is
read. The limit is the same log read in one go into a dict from key to place, without a look at its checksums.
"""

from __future__ import annotations

import os
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.core.rig import keys_of, open_policy, random_hashes
from benchmarks.measure import Cost, Settings, cpu_ratios, medians, take_turns, timed
from benchmarks.rows import Row, Target
from benchmarks.tiers.rig import NAMESPACE
from tierkv.abc import BackendContext
from tierkv.dispatch import Dispatcher, ScanResult, TierLimits
from tierkv.frames.frame import frame_bytes
from tierkv.frames.sealer import FrameSealer
from tierkv.manager.lower.lower_tier import LowerTier, LowerTierLimits, WritePolicy
from tierkv.memory.arena import HostArena
from tierkv.tiers.tier import Tier
from tierkv_disk import CAPABILITIES, DiskBackend, DiskOptions, open_backend
from tierkv_disk.directory.layout import LOG_NAME
from tierkv_disk.extents import PAGE_BYTES, address_at
from tierkv_disk.log.index_log import RECORD_BYTES, IndexLog, LogIdentity, Record, RecordKind
from tierkv_disk.segments.segment_files import SEGMENTS_AIM, segment_path

FRAME_BYTES = frame_bytes(2 << 20)
FRAME_PAGES = FRAME_BYTES // PAGE_BYTES
CHUNKS_PER_REQUEST = 64
_PLAIN_RECORD = struct.Struct("<8xBBxxQI104s")


@dataclass(frozen=True, slots=True)
class FilledDirectory:
    """Directory of a tier, and the cost of opening it."""

    context: BackendContext
    options: DiskOptions
    log: Path
    chunks: int

    def open(self, parts: dict[str, list[float]]) -> Cost:
        """Open, scan through the dispatcher, fill the manager's index; then close, outside of the measured time."""
        opened: list[tuple[Dispatcher, LowerTier, ScanResult]] = []  # kept, because freeing takes time

        def whole() -> None:
            began_s = time.perf_counter()
            backend = open_backend(self.context, self.options)
            opened_s = time.perf_counter()
            dispatcher = self._dispatcher(backend)
            (result,) = dispatcher.scan_all(300.0)
            scanned_s = time.perf_counter()
            limits = LowerTierLimits(capacity_bytes=None, write=WritePolicy.THROUGH, queue_chunks_max=1)
            lower = LowerTier(0, "disk", CAPABILITIES, limits, open_policy("lru", self.chunks))
            lower.load_index(result.content)
            opened.append((dispatcher, lower, result))
            parts["plugin"].append(opened_s - began_s)
            parts["scan"].append(scanned_s - opened_s)
            parts["index"].append(time.perf_counter() - scanned_s)

        cost = timed(whole)
        for dispatcher, lower, result in opened:
            if len(lower.residency) != self.chunks:
                raise RuntimeError(f"{len(lower.residency)} chunks came back of {self.chunks} ({result.error})")
            dispatcher.close(10.0)
        return cost

    def _dispatcher(self, backend: DiskBackend) -> Dispatcher:
        arena = HostArena(1 << 20, 4096)
        tier = Tier("disk", backend, CAPABILITIES, "none", {}, FrameSealer(NAMESPACE.fingerprint()), arena)
        return Dispatcher([tier], [TierLimits()], time.monotonic)

    def read_plainly(self) -> Cost:
        """Measure the limit."""

        def whole() -> None:
            slots = {}
            records = memoryview(self.log.read_bytes())[RECORD_BYTES : RECORD_BYTES * (1 + self.chunks)]
            for _, key_bytes, slot, size, key in _PLAIN_RECORD.iter_unpack(records):
                slots[key[:key_bytes]] = (slot, size)

        return timed(whole)


def make_filled_directory(folder: Path, chunks: int) -> FilledDirectory:
    """Write a directory as of a tier with ``count`` chunks whose process was killed."""
    context = BackendContext("disk", NAMESPACE, FRAME_BYTES, None)
    options = DiskOptions(path=str(folder), min_free_bytes=0)
    open_backend(context, options).close()
    (directory,) = (path.parent for path in folder.glob(f"*/{LOG_NAME}"))
    per_segment = -(-chunks // (SEGMENTS_AIM // 2))
    for segment in range(-(-chunks // per_segment)):
        with segment_path(directory, segment).open("wb") as file:
            os.truncate(file.fileno(), per_segment * FRAME_BYTES)
    keys = keys_of(random_hashes(chunks, seed=1))
    records = (
        Record(
            RecordKind.PUT,
            key,
            0,
            address_at(number // per_segment, number % per_segment * FRAME_PAGES),
            FRAME_BYTES,
            rank=(1 + number // CHUNKS_PER_REQUEST) << 32 | (1 + number % CHUNKS_PER_REQUEST),
        )
        for number, key in enumerate(keys)
    )
    identity = LogIdentity(NAMESPACE.fingerprint())
    IndexLog.create(directory, identity, records, sync=False).close()
    return FilledDirectory(context, options, directory / LOG_NAME, chunks)


def run(settings: Settings) -> Iterator[Row]:
    """Measure seconds per million chunks."""
    chunks = settings.pick(1_000_000, 10_000)
    parts: dict[str, list[float]] = {"plugin": [], "scan": [], "index": []}
    with tempfile.TemporaryDirectory(dir=settings.directory, prefix="tierkv-benchmark-") as folder:
        filled = make_filled_directory(Path(folder), chunks)
        ours, plain = take_turns([lambda: filled.open(parts), filled.read_plainly], settings.pick(5, 1))
    yield Row(
        f"{chunks:,} chunks",
        "s",
        medians(ours).wall_s,
        "the log read into a dict",
        medians(plain).wall_s,
        cpu_ratios(ours, plain),
        Target("measured", "<=", 2.5),
        {
            **{f"of it the {name}, s": sorted(values)[len(values) // 2] for name, values in parts.items()},
            "processor time, s": medians(ours).cpu_s,
        },
    )
