"""Segment files: preallocated, divided into slots of one size.

A segment is allocated whole before its first slot is used, so a store cannot run out of disk half-way, and its bytes
lie together. Free slots are handed out by :class:`~tierkv_disk.slots.SlotTable`; this module owns the files.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

from tierkv_disk.directio import FileIO
from tierkv_disk.slots import Slot, number_of, segment_of, slot_at

SEGMENTS_MAX = 128
"""Files are kept open, and a process has about 1,024 descriptors: larger tiers use larger segments."""
_NAME = re.compile(r"segment-(\d{5,10})\.dat")


def segment_path(directory: Path, number: int) -> Path:
    """The file of segment ``number``."""
    return directory / f"segment-{number:05d}.dat"


def sync_directory(directory: Path) -> None:
    """Make names in ``directory`` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Limits(NamedTuple):
    """How far the files may grow.

    capacity_bytes: of all segments together, or None.
    min_free_bytes: left free in the file system.
    segment_bytes: wish for the size of one file.
    """

    capacity_bytes: int | None
    min_free_bytes: int
    segment_bytes: int


class SegmentFiles:
    """The open segment files of one namespace.

    Methods raise OSError. Reads, writes and syncs may run on several threads, :meth:`grow` on one at a time.
    """

    def __init__(self, directory: Path, slot_bytes: int, limits: Limits, io: FileIO) -> None:
        self._directory = directory
        self._slot_bytes = slot_bytes
        self._limits = limits
        self._io = io
        self._files: dict[int, int] = {}
        self._slots: dict[int, int] = {}

    def open_existing(self) -> dict[int, int]:
        """Open all files of the directory: number -> slots in it."""
        found = {int(match[1]): path for path in self._directory.iterdir() if (match := _NAME.fullmatch(path.name))}
        for number, path in sorted(found.items()):
            self._files[number] = self._io.open(path, 0)
            self._slots[number] = os.fstat(self._files[number]).st_size // self._slot_bytes
        return dict(self._slots)

    def shrink(self, used: Container[Slot]) -> dict[int, int]:
        """Cut off what the capacity no longer covers and nobody uses.

        Returns:
            Per segment, how many of its slots the capacity covers, the first segments first. Used slots beyond stay
            readable until they are deleted.
        """
        covered: dict[int, int] = {}
        left = self._capacity_slots()
        for number, slots in list(self._slots.items()):
            within = slots if left is None else min(slots, left)
            if left is not None:
                left -= within
            keep = slots
            while keep > within and slot_at(number, keep - 1) not in used:
                keep -= 1
            if keep == 0:
                self._remove(number)
                continue
            if keep < slots:
                os.ftruncate(self._files[number], keep * self._slot_bytes)
                self._slots[number] = keep
            covered[number] = within
        return covered

    def grow(self) -> tuple[int, int] | None:
        """Allocate one more segment, as large as wished and possible.

        Returns:
            Its number and slots; None where capacity or ``min_free_bytes`` leave no room for a single slot.
        """
        slots = self._slots_to_add()
        if slots <= 0:
            return None
        number = max(self._files, default=-1) + 1
        path = segment_path(self._directory, number)
        fd = self._io.open(path, os.O_CREAT | os.O_EXCL)
        try:
            # The sync of the first frame in it also makes its length durable; its name is not covered by that.
            os.posix_fallocate(fd, 0, slots * self._slot_bytes)
            sync_directory(self._directory)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        self._files[number] = fd
        self._slots[number] = slots
        return number, slots

    def write(self, slot: Slot, frame: memoryview) -> None:
        """Put a frame into a slot."""
        self._io.write_at(self._files[segment_of(slot)], frame, number_of(slot) * self._slot_bytes)

    def read(self, slot: Slot, buffer: memoryview, size: int) -> int:
        """Read the first ``size`` bytes of a slot; fewer come back only if the file ends before."""
        return self._io.read_at(self._files[segment_of(slot)], buffer, size, number_of(slot) * self._slot_bytes)

    def sync(self, numbers: set[int]) -> None:
        """Force the written bytes of these segments to the device."""
        for number in numbers:
            os.fdatasync(self._files[number])

    def close(self) -> None:
        """Close all files."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _remove(self, number: int) -> None:
        os.close(self._files.pop(number))
        del self._slots[number]
        segment_path(self._directory, number).unlink(missing_ok=True)

    def _capacity_slots(self) -> int | None:
        capacity = self._limits.capacity_bytes
        return None if capacity is None else capacity // self._slot_bytes

    def _slots_to_add(self) -> int:
        disk = shutil.disk_usage(self._directory)
        capacity = self._limits.capacity_bytes
        wish_bytes = max(self._limits.segment_bytes, (disk.total if capacity is None else capacity) // SEGMENTS_MAX)
        wish = max(1, wish_bytes // self._slot_bytes)
        room = (disk.free - self._limits.min_free_bytes) // self._slot_bytes
        allowed = self._capacity_slots()
        return min(wish, room, wish if allowed is None else allowed - sum(self._slots.values()))
