"""The plugin as users see it: options, `tierkv check`, discovery."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest
from lmdb_support import MIB, directory, open_at, run_child

import tierkv_lmdb
from tierkv.abc import CheckResult
from tierkv_lmdb import LmdbOptions, LmdbReaderOptions


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"path": ""}, "path"),
        ({"path": "a\0b"}, "path"),
        ({"path": "x", "durability": "sometimes"}, "durability"),
        ({"path": "x", "map_headroom": 0.6}, "map_headroom"),
        ({"path": "x", "map_headroom": -0.1}, "map_headroom"),
        ({"path": "x", "map_headroom": float("nan")}, "map_headroom"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], name: str) -> None:
    """A typing error in the configuration must stop the start, with the option's name and the allowed values."""
    with pytest.raises(ValueError, match=f"^{name} = .*: (give|allowed)"):
        LmdbOptions(**options)  # type: ignore[arg-type]  # wrong on purpose


def test_home_directory_is_expanded() -> None:
    """Users write ~ in paths; a directory of that name would surprise them."""
    assert LmdbOptions(path="~/cache").root == Path.home() / "cache"


def test_small_frames_share_a_call() -> None:
    """A call costs a transaction and a sync: eight frames of 64 KiB in each cost three times as much as 128."""
    small, large = 68 << 10, 8 << 20
    assert tierkv_lmdb.PLUGIN.capabilities.keys_per_write(small) >= 64
    assert tierkv_lmdb.PLUGIN.capabilities.keys_per_read_call(small) >= 15
    assert tierkv_lmdb.READ_ONLY_PLUGIN.capabilities.keys_per_read_call(small) >= 15
    assert tierkv_lmdb.PLUGIN.capabilities.keys_per_write(large) <= 8, "a call ends before its deadline"
    assert tierkv_lmdb.PLUGIN.capabilities.keys_per_read_call(large) == 1, "all threads read"


def test_entry_point_leads_to_the_plugin() -> None:
    """`pip install tierkv-lmdb` and `backend = "lmdb"` must be sufficient."""
    (entry_point,) = importlib.metadata.entry_points(group="tierkv", name="lmdb")
    module = entry_point.load()
    assert module.TIERKV_SPI == 1
    assert [plugin.name for plugin in module.tierkv_backends()] == ["lmdb", "lmdb-read-only"]


CHECK_AS_NOBODY = """
import os, tierkv_lmdb
if os.geteuid() == 0:
    os.setuid(65534)
for check_result in tierkv_lmdb.PLUGIN.check(tierkv_lmdb.LmdbOptions(path="/usr/tierkv"), None):
    print(check_result)
"""


def check(path: Path, capacity_bytes: int | None = 16 * MIB) -> dict[str, CheckResult]:
    """Results by subject; the path is unchanged."""
    place = path if path.exists() else path.parent
    before = sorted((file, file.stat().st_mtime_ns) for file in place.rglob("*"))
    check_results = list(tierkv_lmdb.PLUGIN.check(LmdbOptions(path=str(path)), capacity_bytes))  # type: ignore[misc]
    assert sorted((file, file.stat().st_mtime_ns) for file in place.rglob("*")) == before
    assert all(check_result.fix for check_result in check_results if not check_result.ok)
    return {check_result.subject: check_result for check_result in check_results}


def test_check_of_a_good_path(tmp_path: Path) -> None:
    """Before the first start and between two starts, all results are good, and the check creates nothing."""
    new = tmp_path / "deep" / "new"
    assert all(check_result.ok for check_result in check(new).values())
    assert "will be created" in check(new)["path"].detail
    open_at(new).close()
    assert all(check_result.ok for check_result in check(new).values())
    assert "lock" not in check(new)


def test_check_says_that_lmdb_can_end_the_process(tmp_path: Path) -> None:
    """A user must know before the start which backends cannot be contained, and what to use instead."""
    reader = tierkv_lmdb.READ_ONLY_PLUGIN.check(LmdbReaderOptions(path=str(tmp_path)), None)  # type: ignore[misc]
    for results in (check(tmp_path), {result.subject: result for result in reader}):
        assert "can end it" in results["process"].detail
        assert 'backend = "disk"' in results["process"].detail


def test_check_reports_damage(tmp_path: Path) -> None:
    """A namespace that started empty cost its chunks; the disk may be failing."""
    for _ in range(2):
        open_at(tmp_path).close()
        assert "damage" not in check(tmp_path) or "once" in check(tmp_path)["damage"].detail
        os.truncate(directory(tmp_path) / "data.mdb", 100)
        open_at(tmp_path).close()
    damage = check(tmp_path)["damage"]
    assert not damage.ok
    assert "started empty 2 times" in damage.detail
    assert "the file ends" in damage.detail
    assert str(directory(tmp_path) / "damage.json") in damage.fix


def test_check_names_the_process_that_has_it_open(tmp_path: Path) -> None:
    """The pid explains why a second service cannot start."""
    backend = open_at(tmp_path)
    assert f"process {os.getpid()}" in check(tmp_path)["lock"].detail
    backend.close()


def test_check_of_a_bad_path(tmp_path: Path) -> None:
    """Everything that would fail at open is found before, with its fix."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "thesis.txt").write_text("x")
    assert not check(tmp_path / "file")["path"].ok
    assert not check(tmp_path / "file" / "below")["path"].ok
    assert "thesis.txt" in check(tmp_path / "documents")["path"].detail
    assert not check(tmp_path / "documents")["path"].ok
    assert "no permission to write in /usr" in run_child(CHECK_AS_NOBODY)


def test_check_compares_capacity_and_disk(tmp_path: Path) -> None:
    """A capacity larger than the disk is found before the start; the headroom counts."""
    assert not check(tmp_path, 1 << 60)["space"].ok
    assert check(tmp_path, None)["space"].ok
    disk = os.statvfs(tmp_path)
    nearly_all = int(disk.f_bavail * disk.f_frsize / 1.25 - 64 * MIB)
    assert check(tmp_path, nearly_all)["space"].ok
    assert not check(tmp_path, nearly_all * 2)["space"].ok
