"""Frames shortened by a codec: they take only their pages, and the framework's count matches the disk."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from disk_support import PAGE, OpenDisk, read_log

from tierkv.errors import CorruptFrameError, OutOfSpaceError
from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import make_frame, make_key
from tierkv.types.keys import Key
from tierkv_disk import DiskBackend

PAGES = 60


def frame(number: int, pages: int, version: int = 1) -> bytes:
    """Frame of ``pages`` pages."""
    return make_frame(make_key(number), version, pages * PAGE)


def splinter(disk: Session) -> dict[Key, bytes]:
    """Fill the tier with frames of two pages, and free every second one: no run has more than two pages."""
    disk.put({make_key(number): frame(number, 2) for number in range(PAGES // 2)})
    disk.forget([make_key(number) for number in range(0, PAGES // 2, 2)])
    return {make_key(number): frame(number, 2) for number in range(1, PAGES // 2, 2)}


def segment_bytes(directory: Path) -> int:
    """Bytes that the segments take on the disk."""
    return sum(path.stat().st_blocks * 512 for path in directory.glob("segment-*"))


def test_every_page_of_the_capacity_can_be_used(open_disk: OpenDisk, directory: Path) -> None:
    """The framework counts bytes of frames. While its count fits, no write is refused, whatever the lengths."""
    capacity = PAGES * PAGE
    disk = open_disk(frame_bytes_max=8 * PAGE, capacity_bytes=capacity)
    rng = random.Random(3)
    held: dict[Key, bytes] = {}
    for number in range(600):
        new = frame(number, rng.randint(1, 8))
        while sum(map(len, held.values())) + len(new) > capacity:
            gone = rng.choice(list(held))
            disk.forget([gone])
            del held[gone]
        assert disk.write({make_key(number): new}) == [None], "refused, though the count has room"
        held[make_key(number)] = new
        assert segment_bytes(directory) <= capacity
        if number % 50 == 0:
            assert disk.read(list(held)) == list(held.values())
    assert disk.scan() == {key: len(data) for key, data in held.items()}
    assert any(line.part for line in read_log(directory / "index.log")), "no frame was ever split: too easy"
    disk.close()
    with open_disk(frame_bytes_max=8 * PAGE, capacity_bytes=capacity) as again:
        assert isinstance(again.backend, DiskBackend)
        assert again.backend.recovery.lossless
        assert again.read(list(held)) == list(held.values())
        room = capacity - sum(map(len, held.values()))
        for page in range(room // PAGE):
            assert again.write({make_key(1000 + page): frame(1000 + page, 1)}) == [None]
        assert isinstance(again.write({make_key(2000): frame(2000, 1)})[0], OutOfSpaceError)


@pytest.mark.parametrize("direct_io", ["auto", "off"])
@pytest.mark.parametrize("size", [6 * PAGE, 5 * PAGE + 17, 4 * PAGE + 4095])
def test_a_scattered_frame_round_trips(open_disk: OpenDisk, direct_io: str, size: int) -> None:
    """A frame in three runs is read, overwritten, read after a reopen and deleted like any other."""
    options = {"frame_bytes_max": 8 * PAGE, "capacity_bytes": PAGES * PAGE, "direct_io": direct_io}
    key = make_key(77)
    with open_disk(**options) as disk:
        held = splinter(disk)
        for version in (1, 2):
            disk.put({key: make_frame(key, version, size)})
            assert disk.get(key) == make_frame(key, version, size)
        assert disk.read(list(held)) == list(held.values())
    with open_disk(**options) as disk:
        assert disk.get(key) == make_frame(key, 2, size)
        assert disk.scan()[key] == size
        disk.forget([key])
        assert disk.get(key) is None
        again = {make_key(200 + number): frame(200 + number, 2) for number in range(15)}
        assert disk.write(again) == [None] * 15, "its runs did not become free"
        assert disk.read(list(held)) == list(held.values())


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_frame_without_one_part_is_dropped(open_disk: OpenDisk, directory: Path, lost: int) -> None:
    """The medium lost the record of one part: the other parts must never be taken for a frame."""
    options = {"frame_bytes_max": 8 * PAGE, "capacity_bytes": PAGES * PAGE}
    key, after = make_key(77), make_key(78)
    with open_disk(**options) as disk:
        splinter(disk)
        disk.put({key: frame(77, 6)})
        disk.put({after: frame(78, 1)})
    lines = read_log(directory / "index.log")
    first = next(number for number, line in enumerate(lines) if line.key == key)
    assert [(line.kind, line.part) for line in lines[first : first + 3]] == [(3, 0), (3, 1), (1, 2)]
    with (directory / "index.log").open("r+b") as file:
        file.seek((1 + first + lost) * 128 + 50)
        file.write(b"damage")
    with open_disk(**options) as disk:
        assert disk.get(key) is None
        assert disk.get(after) == frame(78, 1)
        disk.put({key: frame(77, 6, version=2)})
        assert disk.get(key) == frame(77, 6, version=2)


def test_a_part_that_is_cut_off_is_a_corrupt_frame(open_disk: OpenDisk, directory: Path) -> None:
    """The last part is beyond the end of its file: an error, never a number of bytes."""
    disk = open_disk(frame_bytes_max=8 * PAGE, capacity_bytes=PAGES * PAGE)
    splinter(disk)
    key = make_key(77)
    disk.put({key: frame(77, 6)})
    first = min(line.page for line in read_log(directory / "index.log") if line.key == key)
    os.truncate(directory / "segment-00000.dat", first * PAGE + 100)
    (result,) = disk.read([key])
    assert isinstance(result, CorruptFrameError)
