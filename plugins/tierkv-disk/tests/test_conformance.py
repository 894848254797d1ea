"""The disk tier passes the conformance kit, in each of its ways to write."""

from __future__ import annotations

import struct
from pathlib import Path

import tierkv_disk
from tierkv.testing import BackendConformance
from tierkv.types.keys import Key
from tierkv_disk import DiskOptions


class TestDisk(BackendConformance):
    plugin = tierkv_disk.PLUGIN

    def make_options(self, place: Path) -> DiskOptions:
        return DiskOptions(path=str(place))

    def damage(self, place: Path, key: Key) -> None:
        """Flip a byte in the middle of the frame, found by reading the log as docs/format.md describes it."""
        directory = place / self.context().namespace.fingerprint().hex()
        log = (directory / "index.log").read_bytes()
        start = log.index(key) - 24
        page, segment, frame_bytes = struct.unpack_from("<III", log, start + 12)
        with (directory / f"segment-{segment:05d}.dat").open("r+b") as file:
            file.seek(page * 4096 + frame_bytes // 2)
            (byte,) = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))


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
