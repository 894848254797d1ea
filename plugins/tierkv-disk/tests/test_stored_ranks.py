"""Ranks in the log: they survive compaction and frames in several runs, and give way to long keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from disk_support import PAGE, OpenDisk, read_log

from tierkv.abc import WriteRequest
from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import aligned_copy, make_frame, make_key
from tierkv.types.keys import Key
from tierkv_disk import DiskBackend
from tierkv_disk.log.index_log import KEY_BYTES_MAX, RANKED_KEY_BYTES_MAX

FIRST = 7 << 32 | 16


def put(disk: Session, key: Key, rank: int, pages: int = 1, version: int = 1) -> None:
    """Store one frame with a rank."""
    frame = aligned_copy(make_frame(key, version, pages * PAGE)).toreadonly()
    assert disk.write_requests([WriteRequest(key, frame, rank)]) == [None]


@pytest.mark.parametrize("reopened", [False, True], ids=["while it is open", "at the next open"])
def test_compaction_keeps_ranks(
    open_disk: OpenDisk, directory: Path, monkeypatch: pytest.MonkeyPatch, *, reopened: bool
) -> None:
    """A rewritten log has the order and the ranks of the old one."""
    monkeypatch.setattr("tierkv_disk.recovery.recovery.COMPACT_RECORDS_MIN", 16)
    expected = {make_key(number): FIRST + number for number in range(4)}
    with open_disk() as disk:
        assert isinstance(disk.backend, DiskBackend)
        if reopened:
            disk.backend.current._compact_after = 10**9
        for version in range(10):
            for key, rank in expected.items():
                put(disk, key, rank, version=version)
        assert disk.scan_ranks() == list(expected.items())
    assert (len(read_log(directory / "index.log")) > 16) == reopened
    with open_disk() as disk:
        assert len(read_log(directory / "index.log")) <= 16 + len(expected)
        assert disk.scan_ranks() == list(expected.items())


def test_a_frame_in_several_runs_has_its_rank(open_disk: OpenDisk, directory: Path) -> None:
    """The last record of a frame has the rank; an earlier part alone is no frame."""
    limits = {"frame_bytes_max": 8 * PAGE, "capacity_bytes": 20 * PAGE}
    with open_disk(**limits) as disk:
        for number in range(10):
            put(disk, make_key(number), FIRST + number, pages=2)
        disk.forget([make_key(number) for number in range(0, 10, 2)])
        put(disk, make_key(20), FIRST + 20, pages=7)
        expected = [(make_key(number), FIRST + number) for number in (1, 3, 5, 7, 9, 20)]
        assert disk.scan_ranks() == expected
    assert any(line.part for line in read_log(directory / "index.log")), "the frame was not split: too easy"
    with open_disk(**limits) as disk:
        assert disk.scan_ranks() == expected


def test_long_keys_have_none(open_disk: OpenDisk) -> None:
    """The rank is behind the key. A key that needs the room gets it, and is read back whole."""
    lengths = (1, RANKED_KEY_BYTES_MAX - 1, RANKED_KEY_BYTES_MAX, RANKED_KEY_BYTES_MAX + 1, KEY_BYTES_MAX)
    with open_disk() as disk:
        for length in lengths:
            put(disk, Key(b"k" * length), FIRST)
        expected = [(Key(b"k" * n), FIRST if n <= RANKED_KEY_BYTES_MAX else 0) for n in lengths]
        assert disk.scan_ranks() == expected
    with open_disk() as disk:
        assert disk.scan_ranks() == expected


def test_keys_are_where_they_were(open_disk: OpenDisk, directory: Path) -> None:
    """A reader that knows no ranks finds the same keys: it reads as many bytes as the record says."""
    with open_disk() as disk:
        put(disk, make_key(1), FIRST)
    assert [line.key for line in read_log(directory / "index.log")] == [make_key(1)]
