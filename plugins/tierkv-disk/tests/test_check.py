"""`tierkv check` on a disk tier: its results, and that it changes nothing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from disk_support import OpenDisk, frames

import tierkv_disk
from tierkv.abc import CheckResult
from tierkv.testing.frames import make_key
from tierkv_disk import DiskBackend, DiskOptions


def check(place: Path, capacity_bytes: int | None = 1 << 20, **options: object) -> dict[str, CheckResult]:
    """Results by subject. The disk is unchanged, and each problem has a fix."""
    assert tierkv_disk.PLUGIN.check is not None
    wanted = {"path": str(place), "min_free_bytes": 0, **options}
    before = tree(place.parent)
    check_results = list(tierkv_disk.PLUGIN.check(DiskOptions(**wanted), capacity_bytes))
    assert tree(place.parent) == before, "check changed something"
    for check_result in check_results:
        assert check_result.ok or check_result.fix, f"{check_result}: a problem needs a fix"
    return {check_result.subject: check_result for check_result in check_results}


def tree(root: Path) -> dict[str, float]:
    """All paths with their modification times."""
    return {str(path): path.stat().st_mtime for path in [root, *root.rglob("*")]}


def test_an_absent_path(place: Path) -> None:
    """Everything that a first start needs is checked, and nothing is created."""
    found = check(place)
    assert list(found) == ["path", "permission", "direct I/O", "space"]
    assert all(check_result.ok for check_result in found.values())
    assert "will be created" in found["path"].detail


def test_a_path_in_use(open_disk: OpenDisk, place: Path) -> None:
    """A running server fails the lock check alone; its bytes count as usable."""
    disk = open_disk()
    disk.put(frames(0))
    found = check(place)
    assert not found["lock"].ok
    assert "in use by process" in found["lock"].detail
    assert "1.00 MiB held" in found["space"].detail
    disk.close()
    free = check(place)["lock"]
    assert free.ok
    assert "model 'disk-tests', 1.00 MiB" in free.detail, "the line identifies a forgotten namespace"


def test_too_little_space(place: Path) -> None:
    """Missing space is reported before the start, with its size; the reserve counts."""
    assert not check(place, capacity_bytes=1 << 60)["space"].ok
    assert not check(place, min_free_bytes=1 << 60)["space"].ok
    free = shutil.disk_usage(place.parent).free
    short = check(place, capacity_bytes=1 << 30, min_free_bytes=free + (5 << 30))["space"]
    (gib,) = re.findall(r"free (\d+\.\d+) GiB", short.fix)
    assert float(gib) == pytest.approx(6.0, abs=0.5), "the reserve counts as well, where less than it is free"
    assert not check(place, capacity_bytes=None, min_free_bytes=1 << 60)["space"].ok
    assert check(place, capacity_bytes=None)["space"].ok


def test_foreign_and_impossible_paths(place: Path) -> None:
    """The refusals of open, as results."""
    place.write_text("a file")
    assert "must name a directory" in check(place)["path"].detail
    assert "must name a directory" in check(place / "below")["path"].detail
    place.unlink()
    place.mkdir()
    (place / "thesis.txt").write_text("the only copy")
    assert "thesis.txt" in check(place)["path"].detail


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs sysfs, in which no user can create files")
def test_a_path_that_cannot_be_written() -> None:
    """Tried out instead of derived from mode bits: root may write anywhere, and still not here."""
    found = {
        check_result.subject: check_result for check_result in tierkv_disk.check(DiskOptions("/sys/kernel/tier"), None)
    }
    assert not found["permission"].ok
    assert found["permission"].fix


def test_without_direct_io(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of speed for "auto", a failure for "on", nothing for "off"."""
    monkeypatch.setattr("tierkv_disk.checking.supports_direct", lambda directory: False)
    assert check(place)["direct I/O"].ok
    assert "slower" in check(place)["direct I/O"].detail
    assert not check(place, direct_io="on")["direct I/O"].ok
    assert check(place, direct_io="off")["direct I/O"].ok


def test_the_limit_of_the_directory(open_disk: OpenDisk, place: Path) -> None:
    """Usage and watermarks; an unreachable capacity is reported before the start."""
    limits = {"directory_bytes_max": 100 << 20, "high_watermark": 0.5, "low_watermark": 0.25}
    assert "limit" not in check(place)
    found = check(place, **limits)["limit"]
    assert found.ok
    assert "above 50.0 MiB unused namespaces are removed down to 25.0 MiB" in found.detail
    too_small = check(place, capacity_bytes=60 << 20, **limits)["limit"]
    assert not too_small.ok
    assert f"at least {(120 << 20) + 1}" in too_small.fix
    with open_disk(capacity_bytes=60 << 20, segment_bytes=60 << 20) as disk:
        disk.put(frames(0))
    assert check(place, **limits)["limit"].ok, "the excess will be removed"
    assert not check(place, reclaim_unused=False, **limits)["limit"].ok


def test_bad_frames_are_reported(open_disk: OpenDisk, place: Path) -> None:
    """Bad frames point at a failing disk; the user should know."""
    disk = open_disk()
    disk.put(frames(0))
    assert isinstance(disk.backend, DiskBackend)
    disk.backend.quarantine(make_key(0), "test")
    disk.close()
    found = check(place)["quarantine"]
    assert not found.ok
    assert "1 bad frames out of service, 4.00 KiB" in found.detail
    assert "last used 2" in check(place)["lock"].detail
