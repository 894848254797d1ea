"""Conformance of the disk tier, in each of its write modes."""

from __future__ import annotations

from pathlib import Path

from disk_support import PAGE, LogLine, read_log

import tierkv_disk
from tierkv.abc import BackendContext
from tierkv.testing import BackendConformance
from tierkv.types.keys import Key
from tierkv_disk import DiskOptions


class DiskPages:
    """Pages of the segment files, found by reading the log as docs/format.md describes it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def frames(self) -> dict[bytes, list[LogLine]]:
        """Runs of each stored key."""
        found: dict[bytes, list[LogLine]] = {}
        parts: dict[bytes, list[LogLine]] = {}
        for line in read_log(self.directory / "index.log"):
            if line.part == 0:
                parts[line.key] = []
            parts[line.key].append(line)
            if line.kind == 1:
                found[line.key] = parts[line.key]
            elif line.kind == 2:
                found.pop(line.key, None)
        return found

    def read(self, key: Key) -> bytes:
        data = b""
        for run in self.frames()[key]:
            with self.segment(run).open("rb") as file:
                file.seek(run.page * PAGE)
                data += file.read(run.frame_bytes)
        return data

    def write(self, key: Key, data: bytes) -> None:
        for run in self.frames()[key]:
            with self.segment(run).open("r+b") as file:
                file.seek(run.page * PAGE)
                file.write(data[: run.frame_bytes].ljust(run.frame_bytes, b"\0"))
            data = data[run.frame_bytes :]

    def remove(self, key: Key) -> None:
        self.write(key, b"")

    def count(self) -> int:
        return len(self.frames())

    def segment(self, run: LogLine) -> Path:
        return self.directory / f"segment-{run.segment:05d}.dat"


class TestDisk(BackendConformance):
    plugin = tierkv_disk.PLUGIN
    raw_live = True

    def make_options(self, place: Path) -> DiskOptions:
        return DiskOptions(path=str(place))

    def raw(self, place: Path, context: BackendContext) -> DiskPages:
        return DiskPages(place / context.namespace.fingerprint().hex())


class TestDiskBuffered(TestDisk):
    """File systems without O_DIRECT."""

    model_examples = 5

    def make_options(self, place: Path) -> DiskOptions:
        return DiskOptions(path=str(place), direct_io="off")


class TestDiskSyncsEachFrame(TestDisk):
    model_examples = 5

    def make_options(self, place: Path) -> DiskOptions:
        return DiskOptions(path=str(place), durability="always")


class TestDiskWithoutSync(TestDisk):
    """kill -9 loses nothing without a sync either; small segments, so that some tests need many."""

    model_examples = 5

    def make_options(self, place: Path) -> DiskOptions:
        return DiskOptions(path=str(place), durability="none", segment_bytes=1 << 20)
