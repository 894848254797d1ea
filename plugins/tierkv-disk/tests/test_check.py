"""`tierkv check` on a disk tier: what it finds, and that it changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from disk_support import OpenDisk, frames

import tierkv_disk
from tierkv.abc import CheckResult
from tierkv.testing.frames import make_key
from tierkv_disk import DiskBackend, DiskOptions


def check(place: Path, capacity_bytes: int | None = 1 << 20, **options: object) -> dict[str, CheckResult]:
    """Findings by subject; whatever they are, the disk is as before and each problem has a fix."""
    assert tierkv_disk.PLUGIN.check is not None
    wanted = {"path": str(place), "min_free_bytes": 0, **options}
    before = tree(place.parent)
    findings = list(tierkv_disk.PLUGIN.check(DiskOptions(**wanted), capacity_bytes))
    assert tree(place.parent) == before, "check changed something"
    for finding in findings:
        assert finding.ok or finding.fix, f"{finding}: what is wrong needs a fix"
    return {finding.subject: finding for finding in findings}


def tree(root: Path) -> dict[str, float]:
    """All paths with their times of change."""
    return {str(path): path.stat().st_mtime for path in [root, *root.rglob("*")]}


def test_a_new_place(place: Path) -> None:
    """Everything that a first start needs is looked at, and nothing is created."""
    found = check(place)
    assert list(found) == ["path", "permission", "direct I/O", "space"]
    assert all(finding.ok for finding in found.values())
    assert "will be created" in found["path"].detail


def test_a_place_in_use(open_disk: OpenDisk, place: Path) -> None:
    """The one thing that a running server makes wrong is the lock; what it holds counts as usable."""
    disk = open_disk()
    disk.put(frames(0))
    found = check(place)
    assert not found["lock"].ok
    assert "in use by process" in found["lock"].detail
    assert f"{1 << 20} held" in found["space"].detail
    disk.close()
    free = check(place)["lock"]
    assert free.ok
    assert f"model 'disk-tests', {1 << 20} bytes" in free.detail, "a forgotten namespace can be told by this line"


def test_too_little_space(place: Path) -> None:
    """Said before the start, with how much is missing; the reserve counts."""
    assert not check(place, capacity_bytes=1 << 60)["space"].ok
    assert not check(place, min_free_bytes=1 << 60)["space"].ok
    assert not check(place, capacity_bytes=None, min_free_bytes=1 << 60)["space"].ok
    assert check(place, capacity_bytes=None)["space"].ok


def test_foreign_and_impossible_places(place: Path) -> None:
    """The same refusals as at open, as findings."""
    place.write_text("a file")
    assert "must name a directory" in check(place)["path"].detail
    assert "must name a directory" in check(place / "below")["path"].detail
    place.unlink()
    place.mkdir()
    (place / "thesis.txt").write_text("the only copy")
    assert "thesis.txt" in check(place)["path"].detail


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs sysfs, where nobody can create files")
def test_a_place_that_cannot_be_written() -> None:
    """Tried out instead of read from mode bits: root may write anywhere, and still not here."""
    found = {finding.subject: finding for finding in tierkv_disk.check(DiskOptions("/sys/kernel/tier"), None)}
    assert not found["permission"].ok
    assert found["permission"].fix


def test_without_direct_io(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of speed for "auto", a fault for "on", nothing for "off"."""
    monkeypatch.setattr("tierkv_disk.checking.supports_direct", lambda directory: False)
    assert check(place)["direct I/O"].ok
    assert "slower" in check(place)["direct I/O"].detail
    assert not check(place, direct_io="on")["direct I/O"].ok
    assert check(place, direct_io="off")["direct I/O"].ok


def test_the_limit_of_the_directory(open_disk: OpenDisk, place: Path) -> None:
    """What is used and where the marks are; a capacity that can never be reached is said before the start."""
    limits = {"directory_bytes_max": 100 << 20, "high_watermark": 0.5, "low_watermark": 0.25}
    assert "limit" not in check(place)
    found = check(place, **limits)["limit"]
    assert found.ok
    assert f"above {50 << 20} unused namespaces are removed down to {25 << 20}" in found.detail
    too_small = check(place, capacity_bytes=60 << 20, **limits)["limit"]
    assert not too_small.ok
    assert f"at least {(120 << 20) + 1}" in too_small.fix
    with open_disk(capacity_bytes=60 << 20, segment_bytes=60 << 20) as disk:
        disk.put(frames(0))
    assert check(place, **limits)["limit"].ok, "what is too much will be removed"
    assert not check(place, reclaim_unused=False, **limits)["limit"].ok


def test_bad_places_are_told(open_disk: OpenDisk, place: Path) -> None:
    """A disk that goes bad is news for its owner."""
    disk = open_disk()
    disk.put(frames(0))
    assert isinstance(disk.backend, DiskBackend)
    disk.backend.quarantine(make_key(0), "test")
    disk.close()
    found = check(place)["quarantine"]
    assert not found.ok
    assert "1 bad frames out of service, 4096 bytes" in found.detail
    assert "last used 2" in check(place)["lock"].detail
