"""Opening a directory after a crash, a user's mistake or a disk failure."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from disk_support import PAGE, OpenDisk, frames, num_descriptors, read_log

from tierkv.errors import CorruptFrameError, OutOfSpaceError
from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import make_frame, make_key
from tierkv.types.keys import Key
from tierkv_disk import DiskBackend
from tierkv_disk.recovery.recovery import COMPACT_RECORDS_MIN, RecoveryReport


def recovery_of(session: Session) -> RecoveryReport:
    """Report of the open."""
    assert isinstance(session.backend, DiskBackend)
    return session.backend.recovery


def test_a_missing_segment_costs_its_own_frames(
    open_disk: OpenDisk, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A segment file was removed: its frames are misses, all others are whole, and one warning reports it."""
    everything = frames(*range(300))
    with open_disk(capacity_bytes=2 << 20) as disk:
        disk.put(everything)
    lost = {line.key for line in read_log(directory / "index.log") if line.segment == 0}
    assert 0 < len(lost) < 300
    (directory / "segment-00000.dat").unlink()
    with caplog.at_level(logging.WARNING), open_disk(capacity_bytes=2 << 20) as disk:
        assert recovery_of(disk).entries_lost == len(lost)
        assert disk.scan() == {key: PAGE for key in everything if key not in lost}
        for key, frame in everything.items():
            assert disk.get(key) == (None if key in lost else frame)
        disk.put(frames(*range(1000, 1040)))
    assert f"{len(lost)} frames" in caplog.text
    caplog.clear()
    with open_disk(capacity_bytes=2 << 20) as disk:
        assert recovery_of(disk).lossless, "the loss was not written to the log: it is counted again"
        assert len(disk.scan()) == 300 - len(lost) + 40
    assert not caplog.records


def test_a_shortened_segment_costs_what_was_cut_off(open_disk: OpenDisk, directory: Path) -> None:
    """A truncated file, found at open."""
    with open_disk() as disk:
        disk.put(frames(*range(10)))
    os.truncate(directory / "segment-00000.dat", 6 * PAGE + 100)
    with open_disk() as disk:
        assert disk.scan() == dict.fromkeys(frames(*range(6)), PAGE)
        disk.put(frames(*range(6, 10), version=2))
        for key, frame in (frames(*range(6)) | frames(*range(6, 10), version=2)).items():
            assert disk.get(key) == frame


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_a_segment_shortened_while_open_is_a_corrupt_frame(
    open_disk: OpenDisk, directory: Path, direct_io: str
) -> None:
    """The buffer then holds some old bytes: the result must be an error, never a number of bytes."""
    disk = open_disk(direct_io=direct_io)
    disk.put(frames(0, 1))
    os.truncate(directory / "segment-00000.dat", PAGE + 100)
    assert disk.get(make_key(0)) == frames(0)[make_key(0)]
    (result,) = disk.read([make_key(1)])
    assert isinstance(result, CorruptFrameError)
    assert result.key == make_key(1)


def test_pages_belong_to_their_last_writer(
    open_disk: OpenDisk, directory: Path, page_of: Callable[[Key], tuple[Path, int]]
) -> None:
    """A lost delete record restores its key, unless its pages hold another frame by now."""
    with open_disk() as disk:
        disk.put(frames(0))
        place = page_of(make_key(0))
        disk.forget([make_key(0)])
        disk.put(frames(1))
        assert page_of(make_key(1)) == place, "the test needs the page to be reused"
    with (directory / "index.log").open("r+b") as file:
        file.seek(2 * 128 + 40)
        file.write(b"damage")
    with open_disk() as disk:
        assert disk.get(make_key(0)) is None
        assert disk.get(make_key(1)) == frames(1)[make_key(1)]
        assert disk.scan() == {make_key(1): PAGE}
        assert (recovery_of(disk).log.damaged, recovery_of(disk).entries_lost) == (1, 1)


def test_a_damaged_header_costs_nothing(open_disk: OpenDisk, directory: Path) -> None:
    """The header holds only known values; the log is rewritten with a good one, and the old one is closed."""
    with open_disk() as disk:
        disk.put(frames(0, 1))
    descriptors = num_descriptors()
    with (directory / "index.log").open("r+b") as file:
        file.write(b"damage")
    with open_disk() as disk:
        assert recovery_of(disk).rewritten
        assert disk.read([make_key(0), make_key(1)]) == list(frames(0, 1).values())
    with open_disk() as disk:
        assert recovery_of(disk).lossless
    assert num_descriptors() == descriptors


def test_a_missing_log_is_reported(open_disk: OpenDisk, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Frames that the framework does not recognise are lost, but the space is free and the tier works."""
    with open_disk() as disk:
        disk.put(frames(*range(200)))
    (directory / "index.log").unlink()
    with caplog.at_level(logging.WARNING), open_disk() as disk:
        assert disk.scan() == {}
        disk.put(frames(*range(256)))
        assert len(disk.scan()) == 256
    assert "index.log is missing" in caplog.text


def test_a_log_of_dead_records_is_rewritten_at_open(open_disk: OpenDisk, directory: Path) -> None:
    """The log would otherwise grow with every restart of a busy server."""
    with open_disk(durability="none") as disk:
        disk.put(frames(1, 2, 3))
        disk.backend.current._compact_after = 10**9  # type: ignore[union-attr]  # not while it is open
        for version in range(COMPACT_RECORDS_MIN):
            disk.put(frames(1, version=version))
        assert len(read_log(directory / "index.log")) > COMPACT_RECORDS_MIN
    with open_disk() as disk:
        assert recovery_of(disk).rewritten
        assert recovery_of(disk).lossless
        assert [line.key for line in read_log(directory / "index.log")] == [make_key(n) for n in (2, 3, 1)]
        assert disk.read([make_key(1), make_key(2)]) == [
            make_frame(make_key(1), COMPACT_RECORDS_MIN - 1, PAGE),
            frames(2)[make_key(2)],
        ]


def test_a_log_of_dead_records_is_rewritten_while_open(open_disk: OpenDisk, directory: Path) -> None:
    """A server that runs for a year must not fill the disk with its log."""
    with open_disk(durability="none") as disk:
        disk.put(frames(*range(20)))
        for version in range(3 * COMPACT_RECORDS_MIN):
            disk.put(frames(5, version=version))
        assert len(read_log(directory / "index.log")) <= COMPACT_RECORDS_MIN + 1
        expected = frames(*range(20)) | frames(5, version=3 * COMPACT_RECORDS_MIN - 1)
        assert disk.read(list(expected)) == list(expected.values())
    with open_disk() as disk:
        assert disk.read(list(expected)) == list(expected.values())


def test_a_failed_rewrite_changes_nothing(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the shorter log cannot be written, the long one continues to serve, and one warning reports it."""

    def refuse(path: Path) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with open_disk(durability="none") as disk:
        with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
            patch.setattr("tierkv_disk.log.index_log.create_file", refuse)
            for version in range(2 * COMPACT_RECORDS_MIN):
                disk.put(frames(1, version=version))
        assert caplog.text.count("could not be compacted") == 1
        assert disk.get(make_key(1)) == make_frame(make_key(1), 2 * COMPACT_RECORDS_MIN - 1, PAGE)
    with open_disk() as disk:
        assert disk.get(make_key(1)) == make_frame(make_key(1), 2 * COMPACT_RECORDS_MIN - 1, PAGE)


def test_a_log_that_grew_is_not_read_to_its_end(
    open_disk: OpenDisk, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that ends in a hole of a terabyte opens at once, with all of its frames, and is replaced by a short one."""
    with open_disk() as disk:
        disk.put(frames(1, 2))
    log = directory / "index.log"
    os.truncate(log, 1 << 40)
    reads: list[int] = []
    pread = os.pread

    def counted(fd: int, size: int, offset: int) -> bytes:
        reads.append(offset)
        assert len(reads) < 50, "the hole is being read"
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    with open_disk() as disk:
        assert disk.get(make_key(1)) == frames(1)[make_key(1)]
        assert disk.get(make_key(2)) == frames(2)[make_key(2)]
    assert log.stat().st_size < 8 << 20


def test_temporary_files_are_removed(open_disk: OpenDisk, place: Path, directory: Path) -> None:
    """Temporary files of a process killed before the rename are removed."""
    with open_disk() as disk:
        disk.put(frames(1))
    litter = [
        place / ".tierkv-disk.tierkv-disk.json.1-2.tmp",
        directory / ".tierkv-disk.quarantine.jsonl.1-2.tmp",
        directory / "index.log.tmp",
    ]
    for path in litter:
        path.write_bytes(b"half")
    with open_disk() as disk:
        assert disk.get(make_key(1)) == frames(1)[make_key(1)]
    assert not [path for path in litter if path.exists()]


def test_a_smaller_capacity_releases_disk(
    open_disk: OpenDisk, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit applies from the open: free space goes first, then frames, oldest segments first."""

    def held() -> int:
        return sum(path.stat().st_size for path in directory.glob("segment-*.dat"))

    everything = frames(*range(1024))
    with open_disk(capacity_bytes=4 << 20) as disk:
        disk.put(everything)
        assert held() == 4 << 20
        disk.forget([make_key(number) for number in range(850, 1024)])
    with open_disk(capacity_bytes=850 * PAGE) as disk:
        assert recovery_of(disk).entries_dropped == 0, "there was enough free space to release"
        assert held() == 850 * PAGE
        assert len(disk.scan()) == 850
    with caplog.at_level(logging.WARNING), open_disk(capacity_bytes=(2 << 20) + 7 * PAGE) as disk:
        assert recovery_of(disk).entries_dropped == 850 - 512 - 7
        assert held() == (2 << 20) + 7 * PAGE
        left = disk.scan()
        assert {make_key(number) for number in range(512, 850)} <= left.keys(), "the newest were dropped"
        for key in everything:
            assert disk.get(key) == (everything[key] if key in left else None)
        assert isinstance(disk.write(frames(5000))[0], OutOfSpaceError)
    assert f"{850 - 512 - 7} frames exceeded the limit" in caplog.text
    with open_disk(capacity_bytes=(2 << 20) + 7 * PAGE) as disk:
        assert recovery_of(disk).lossless, "the drop was not written to the log: it is reported again"
        assert disk.scan() == left


def test_a_larger_capacity_is_used(open_disk: OpenDisk) -> None:
    """Growing a tier is a change of one number."""
    with open_disk(capacity_bytes=1 << 20) as disk:
        disk.put(frames(*range(256)))
    with open_disk(capacity_bytes=2 << 20) as disk:
        disk.put(frames(*range(256, 512)))
        assert len(disk.scan()) == 512


def test_frames_may_become_longer(open_disk: OpenDisk) -> None:
    """Pages have no frame size: an engine with other chunks continues in the same directory."""
    held = {}
    for size in (2 * PAGE, PAGE, 3 * PAGE):
        with open_disk(frame_bytes_max=size) as disk:
            assert disk.scan() == {key: len(frame) for key, frame in held.items()}
            held[make_key(size)] = make_frame(make_key(size), 1, size)
            disk.put({make_key(size): held[make_key(size)]})
    with open_disk(frame_bytes_max=3 * PAGE) as disk:
        assert disk.read(list(held)) == list(held.values())
