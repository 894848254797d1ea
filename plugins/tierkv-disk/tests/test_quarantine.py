"""Pages of bad frames: out of service, listed, bounded, also after a restart."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_support import PAGE, OpenDisk, frames

from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import make_key
from tierkv.types.keys import Key
from tierkv_disk import DiskBackend

MIB = 1 << 20
Where = Callable[[Key], tuple[Path, int]]


def quarantine(disk: Session, key: Key) -> None:
    """Report a frame that failed verification, as the framework does."""
    assert isinstance(disk.backend, DiskBackend)
    disk.backend.quarantine(key, "stored checksum differs")


def listed(directory: Path) -> list[dict[str, object]]:
    """Entries of the file, as a user reads them."""
    return [json.loads(line) for line in (directory / "quarantine.jsonl").read_text().splitlines()]


def test_bad_pages_are_not_reused(open_disk: OpenDisk, directory: Path, page_of: Where) -> None:
    """They stay out of service after a restart; their bytes stay, they are listed, and the capacity is unchanged."""
    capacity = 4 * PAGE
    with open_disk(capacity_bytes=capacity) as disk:
        disk.put(frames(0, 1, 2, 3))
        path, page = page_of(make_key(1))
        quarantine(disk, make_key(1))
        assert disk.get(make_key(1)) == frames(1)[make_key(1)], "it is stored until it is deleted"
        disk.forget([make_key(1)])
        disk.put(frames(4))
        assert page_of(make_key(4)) != (path, page)
    assert listed(directory) == [
        {
            "key": make_key(1).hex(),
            "runs": [{"segment": 0, "page": page, "pages": 1}],
            "reason": "stored checksum differs",
        }
    ]
    for number in range(5, 9):
        with open_disk(capacity_bytes=capacity) as disk:
            assert len(disk.scan()) == 4
            disk.forget([make_key(number - 1)])
            disk.put(frames(number))
            assert page_of(make_key(number)) != (path, page)
            assert len(listed(directory)) == 1
    assert path.read_bytes()[page * PAGE :][:PAGE] == frames(1)[make_key(1)]


def test_an_overwritten_frame_keeps_its_new_pages(open_disk: OpenDisk, page_of: Where) -> None:
    """The chunk is stored again instead of deleted: the old pages leave service all the same."""
    disk = open_disk(capacity_bytes=4 * PAGE)
    disk.put(frames(0, 1))
    bad = page_of(make_key(1))
    quarantine(disk, make_key(1))
    disk.put(frames(1, version=2))
    disk.put(frames(5, 6))
    assert bad not in [page_of(make_key(number)) for number in (1, 5, 6)]
    assert disk.get(make_key(1)) == frames(1, version=2)[make_key(1)]


def test_the_list_is_bounded(open_disk: OpenDisk, directory: Path) -> None:
    """A dying disk must not consume the tier: beyond the bound, the oldest entries return to service."""
    with open_disk(capacity_bytes=8 * PAGE, quarantine_bytes_max=2 * PAGE) as disk:
        for number in range(20):
            disk.put(frames(number))
            quarantine(disk, make_key(number))
            quarantine(disk, make_key(number))
            disk.forget([make_key(number)])
            assert len(listed(directory)) == min(2, number + 1)
        assert [line["key"] for line in listed(directory)] == [make_key(18).hex(), make_key(19).hex()]
        disk.put(frames(*range(100, 108)))
        assert sum(path.stat().st_size for path in directory.glob("segment-*")) <= (8 + 2) * PAGE
    with open_disk(capacity_bytes=8 * PAGE, quarantine_bytes_max=0) as disk:
        assert listed(directory) == []
        assert len(disk.scan()) >= 6, "more frames were dropped than were above the capacity"
        assert sum(path.stat().st_size for path in directory.glob("segment-*")) == 8 * PAGE


def test_pages_that_cannot_be_read_or_written(
    open_disk: OpenDisk, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error of the device no failed checksum is needed."""
    disk = open_disk(capacity_bytes=4 * PAGE)
    disk.put(frames(0))

    def fails(*arguments: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails)
        disk.read([make_key(0)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails)
        disk.write(frames(1))
    assert [line["reason"] for line in listed(directory)] == [
        "reading it failed: Input/output error",
        "writing it failed: Input/output error",
    ]
    disk.put(frames(2, 3, 4))
    assert disk.read([make_key(number) for number in (0, 2, 3, 4)]) == list(frames(0, 2, 3, 4).values())


def test_an_outdated_list(open_disk: OpenDisk, directory: Path) -> None:
    """Edited, damaged, or naming good frames: no open fails, no frame is lost, bad lines are removed."""
    with open_disk() as disk:
        disk.put(frames(0, 1))
    lines = [
        "not json",
        json.dumps({"key": "00", "runs": [], "reason": "none"}),
        json.dumps({"key": "00", "runs": [{"segment": 0, "page": 0, "pages": 1}], "reason": "taken"}),
        json.dumps({"key": "00", "runs": [{"segment": 0, "page": 255, "pages": 2}], "reason": "beyond the end"}),
        json.dumps({"key": "00", "runs": [{"segment": 7, "page": 0, "pages": 2}], "reason": "no such segment"}),
        json.dumps({"key": "00", "runs": [{"segment": 0, "page": 9, "pages": 2}], "reason": "good"}),
        json.dumps(
            {"key": "00", "runs": [{"segment": 0, "page": 10, "pages": 1}], "reason": "taken by the one before"}
        ),
    ]
    (directory / "quarantine.jsonl").write_text("\n".join(lines))
    with open_disk() as disk:
        assert disk.read([make_key(0), make_key(1)]) == list(frames(0, 1).values())
        assert [line["reason"] for line in listed(directory)] == ["good"]
        disk.put(frames(*range(2, 256)))
        assert len(disk.scan()) == 256, "the two pages count on top of the capacity"


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\x80 \xe9",
        b'{"key": "00", "runs": [{"segment": Infinity, "page": 0, "pages": 1}], "reason": ""}',
        b'{"key": "00", "runs": [{"segment": 0, "page": -9, "pages": 1}], "reason": ""}',
        b'{"key": "00", "runs": [{"segment": 0, "page": 0, "pages": 1e300}], "reason": ""}',
        b'{"key": ' + b"[" * 200_000,
    ],
    ids=["bytes", "infinity", "negative", "huge", "deep"],
)
def test_a_damaged_list_never_blocks_the_open(open_disk: OpenDisk, directory: Path, line: bytes) -> None:
    """The list is a hint: one bad byte in it must not cost the tier."""
    with open_disk() as disk:
        disk.put(frames(0, 1))
    (directory / "quarantine.jsonl").write_bytes(line + b"\n")
    with open_disk() as disk:
        assert disk.read([make_key(0), make_key(1)]) == list(frames(0, 1).values())
        disk.put(frames(*range(2, 256)))


def test_a_list_that_is_no_file_never_blocks_the_open(open_disk: OpenDisk, directory: Path) -> None:
    """A pipe would hang the engine's start, and a link to an endless device would fill its memory."""
    open_disk().close()
    (directory / "quarantine.jsonl").symlink_to("/dev/zero")
    open_disk().close()
    (directory / "quarantine.jsonl").unlink()
    os.mkfifo(directory / "quarantine.jsonl")
    open_disk().close()


def test_a_list_that_cannot_be_written_is_logged_once(
    open_disk: OpenDisk, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A dead device fails every frame, and each of them is listed: the log is not to grow with them."""
    with open_disk() as disk:
        disk.put(frames(*range(6)))
        (directory / "quarantine.jsonl").unlink(missing_ok=True)
        (directory / "quarantine.jsonl").mkdir()
        with caplog.at_level(logging.WARNING, "tierkv_disk"):
            for number in range(3):
                quarantine(disk, make_key(number))
            assert sum("cannot be written" in record.message for record in caplog.records) == 1
            (directory / "quarantine.jsonl").rmdir()
            quarantine(disk, make_key(3))
            (directory / "quarantine.jsonl").unlink()
            (directory / "quarantine.jsonl").mkdir()
            quarantine(disk, make_key(4))
        assert sum("cannot be written" in record.message for record in caplog.records) == 2
