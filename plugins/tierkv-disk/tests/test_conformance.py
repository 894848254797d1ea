"""The disk tier passes the conformance kit, in each of its ways to write."""

from __future__ import annotations

from pathlib import Path

import tierkv_disk
from tierkv.testing import BackendConformance
from tierkv_disk import DiskOptions


class TestDisk(BackendConformance):
    plugin = tierkv_disk.PLUGIN

    def make_options(self, place: Path) -> DiskOptions:
        return DiskOptions(path=str(place))


class TestDiskBuffered(TestDisk):
    """Where the file system has no O_DIRECT."""

    def make_options(self, place: Path) -> DiskOptions:
        return DiskOptions(path=str(place), direct_io="off")


class TestDiskSyncsEachFrame(TestDisk):
    def make_options(self, place: Path) -> DiskOptions:
        return DiskOptions(path=str(place), durability="always")


class TestDiskWithoutSync(TestDisk):
    def make_options(self, place: Path) -> DiskOptions:
        return DiskOptions(path=str(place), durability="none", segment_bytes=1 << 20)
