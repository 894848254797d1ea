"""The checks of installed distributions: they pass on a working tierkv, and find what would be wrong with a package."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from packages import smoke
from packages.__main__ import names_of
from packages.environments import Environment, InstallError, WheelHouse, sha256
from tierkv import Stack

PLUGINS = ["tierkv-disk", "tierkv-example", "tierkv-fsspec", "tierkv-lmdb", "tierkv-valkey"]


def test_the_smoke_test_passes_on_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    """It uses every backend that needs no server; a red one in ``nox -s build`` is then about the packages."""
    smoke.main(["tierkv", *PLUGINS])
    assert capsys.readouterr().out == "stored and returned by host, disk, example, fsspec, lmdb\n"


def test_a_backend_that_forgets_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A miss is no error to an engine; here it is one."""
    opened = smoke.opened

    def forgetting(tiers: list[dict[str, Any]]) -> Any:
        shutil.rmtree(tmp_path / "disk", ignore_errors=True)
        return opened(tiers)

    monkeypatch.setattr(smoke, "opened", forgetting)
    with pytest.raises(SystemExit, match="disk returned 0 of 64 tokens"):
        smoke.check_round_trip("disk", tmp_path)


def test_wrong_bytes_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smoke test compares every byte, without trust in checksums."""
    load = smoke.load

    def wrong(stack: Stack, pages: list[Any]) -> Any:
        tokens, loaded = load(stack, pages)
        loaded[-1, -1, -1] ^= 1
        return tokens, loaded

    monkeypatch.setattr(smoke, "load", wrong)
    with pytest.raises(SystemExit, match="host returned other bytes"):
        smoke.check_round_trip("host", tmp_path)


def test_a_plugin_without_a_type_marker_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users' type checkers would see a package without types, silently."""
    (tmp_path / "unmarked.py").write_text("", encoding="utf-8")
    info = tmp_path / "unmarked-1.0.dist-info"
    (info / "licenses").mkdir(parents=True)
    (info / "licenses" / "LICENSE").write_text("", encoding="utf-8")  # Python 3.12 lists only files that exist
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: unmarked\nVersion: 1.0\n", encoding="utf-8")
    (info / "RECORD").write_text("unmarked-1.0.dist-info/licenses/LICENSE,,\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit, match=r"unmarked has no py\.typed"):
        smoke.check_files("unmarked")


def test_an_environment_takes_from_its_folders_alone(tmp_path: Path) -> None:
    """An index may have other people's packages under our names; a missing wheel must not come from there."""
    environment = Environment.make(tmp_path / "empty")
    with pytest.raises(InstallError, match=r"installing tierkv-disk failed:[\s\S]*No matching distribution"):
        environment.install(["tierkv-disk"], [tmp_path])


def test_torch_in_an_environment_fails(tmp_path: Path) -> None:
    """Gigabytes that no user of a backend asked for would go unnoticed where torch works anyway."""
    environment = Environment.make(tmp_path / "empty")
    assert not environment.holds("torch")
    next((tmp_path / "empty").glob("lib/*/site-packages")).joinpath("torch").mkdir()
    with pytest.raises(InstallError, match="tierkv-disk brought torch"):
        environment.smoke(["tierkv-disk"], tmp_path)


def test_a_file_that_the_lock_does_not_know_is_named(tmp_path: Path) -> None:
    """Like every other session, this one installs no file that the lock does not name."""
    for name in ("ours", "locked", "swapped"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    house = WheelHouse(tmp_path, (tmp_path / "ours",))
    assert house.strangers("") == ["locked", "swapped"]
    assert house.strangers(f"--hash=sha256:{sha256(tmp_path / 'locked')}") == ["swapped"]


def test_archives_are_named_by_their_distribution() -> None:
    """The core comes first."""
    paths = [Path("tierkv_disk-0.1.0-py3-none-any.whl"), Path("tierkv-0.1.0-py3-none-any.whl")]
    assert list(names_of(paths)) == ["tierkv", "tierkv-disk"]
