"""The disk tier passes the conformance kit, in each of its ways to write."""

from __future__ import annotations

from pathlib import Path

from disk_support import PAGE, LogLine, read_log

import tierkv_disk
from tierkv.abc import BackendContext
from tierkv.testing import BackendConformance
from tierkv.types.keys import Key
from tierkv_disk import DiskOptions


class DiskSlots:
    """The slots of the segment files, found by reading the log as docs/format.md describes it."""

    def __init__(self, directory: Path, frame_bytes_max: int) -> None:
        self.directory = directory
        self.slot_bytes = -(-frame_bytes_max // PAGE) * PAGE

    def lines(self) -> dict[bytes, LogLine]:
        """The last word on each key that is there."""
        last: dict[bytes, LogLine] = {}
        for line in read_log(self.directory / "index.log"):
            last[line.key] = line
        return {key: line for key, line in last.items() if line.kind == 1}

    def read(self, key: Key) -> bytes:
        line = self.lines()[key]
        with self.segment(line).open("rb") as file:
            file.seek(line.slot * self.slot_bytes)
            return file.read(line.frame_bytes)

    def write(self, key: Key, data: bytes) -> None:
        line = self.lines()[key]
        with self.segment(line).open("r+b") as file:
            file.seek(line.slot * self.slot_bytes)
            file.write(data.ljust(line.frame_bytes, b"\0"))

    def remove(self, key: Key) -> None:
        self.write(key, b"")

    def count(self) -> int:
        return len(self.lines())

    def segment(self, line: LogLine) -> Path:
        return self.directory / f"segment-{line.segment:05d}.dat"


class TestDisk(BackendConformance):
    plugin = tierkv_disk.PLUGIN

    def make_options(self, place: Path) -> DiskOptions:
        return DiskOptions(path=str(place))

    def raw(self, place: Path, context: BackendContext) -> DiskSlots:
        return DiskSlots(place / context.namespace.fingerprint().hex(), context.frame_bytes_max)


class TestDiskBuffered(TestDisk):
    """Where the file system has no O_DIRECT."""

    model_examples = 5

    def make_options(self, place: Path) -> DiskOptions:
        return DiskOptions(path=str(place), direct_io="off")


class TestDiskSyncsEachFrame(TestDisk):
    model_examples = 5

    def make_options(self, place: Path) -> DiskOptions:
        return DiskOptions(path=str(place), durability="always")


class TestDiskWithoutSync(TestDisk):
    """kill -9 loses nothing without a sync either; and small segments, so that some tests need many."""

    model_examples = 5

    def make_options(self, place: Path) -> DiskOptions:
        return DiskOptions(path=str(place), durability="none", segment_bytes=1 << 20)
