"""Places that gave a bad frame once: out of service, listed, bounded, also after a restart."""

from __future__ import annotations

import errno
import json
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
    """What the framework says when a frame did not check out."""
    assert isinstance(disk.backend, DiskBackend)
    disk.backend.quarantine(key, "stored checksum differs")


def listed(directory: Path) -> list[dict[str, object]]:
    """The file, as a person reads it."""
    return [json.loads(line) for line in (directory / "quarantine.jsonl").read_text().splitlines()]


def test_a_bad_place_is_not_used_again(open_disk: OpenDisk, directory: Path, page_of: Where) -> None:
    """Also not after a restart; its bytes stay, it is listed, and the capacity is as large as before."""
    capacity = 4 * PAGE
    with open_disk(capacity_bytes=capacity) as disk:
        disk.put(frames(0, 1, 2, 3))
        path, page = page_of(make_key(1))
        quarantine(disk, make_key(1))
        assert disk.get(make_key(1)) == frames(1)[make_key(1)], "it is there until it is deleted"
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


def test_an_overwritten_frame_stays_with_its_new_place(open_disk: OpenDisk, page_of: Where) -> None:
    """The chunk is stored anew instead of deleted: the old place leaves service all the same."""
    disk = open_disk(capacity_bytes=4 * PAGE)
    disk.put(frames(0, 1))
    bad = page_of(make_key(1))
    quarantine(disk, make_key(1))
    disk.put(frames(1, version=2))
    disk.put(frames(5, 6))
    assert bad not in [page_of(make_key(number)) for number in (1, 5, 6)]
    assert disk.get(make_key(1)) == frames(1, version=2)[make_key(1)]


def test_the_list_is_bounded(open_disk: OpenDisk, directory: Path) -> None:
    """A dying disk must not eat the tier: over the bound, the oldest places return to service."""
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
        assert len(disk.scan()) >= 6, "more went than lay above the capacity"
        assert sum(path.stat().st_size for path in directory.glob("segment-*")) == 8 * PAGE


def test_a_place_that_cannot_be_read_or_written(
    open_disk: OpenDisk, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's own word: no need to wait for a checksum."""
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


def test_a_list_that_is_not_true_any_more(open_disk: OpenDisk, directory: Path) -> None:
    """Edited, damaged, or of places that hold good frames: no open fails, no frame is lost, nonsense is struck off."""
    with open_disk() as disk:
        disk.put(frames(0, 1))
    lines = [
        "not json",
        json.dumps({"key": "00", "runs": [], "reason": "none"}),
        json.dumps({"key": "00", "runs": [{"segment": 0, "page": 0, "pages": 1}], "reason": "taken"}),
        json.dumps({"key": "00", "runs": [{"segment": 0, "page": 255, "pages": 2}], "reason": "beyond the end"}),
        json.dumps({"key": "00", "runs": [{"segment": 7, "page": 0, "pages": 2}], "reason": "no such segment"}),
        json.dumps({"key": "00", "runs": [{"segment": 0, "page": 9, "pages": 2}], "reason": "good"}),
    ]
    (directory / "quarantine.jsonl").write_text("\n".join(lines))
    with open_disk() as disk:
        assert disk.read([make_key(0), make_key(1)]) == list(frames(0, 1).values())
        assert [line["reason"] for line in listed(directory)] == ["good"]
        disk.put(frames(*range(2, 256)))
        assert len(disk.scan()) == 256, "the two pages came on top"
