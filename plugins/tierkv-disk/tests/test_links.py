"""Links and directories in place of the tier's files: nothing outside is changed, and the tier goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_support import OpenDisk, frames

from tierkv.errors import BackendError
from tierkv.testing.frames import make_key

VICTIM = b"the only copy" * 1000


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of another program, outside the tier's directory, in a directory that holds nothing else."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis.txt").write_bytes(VICTIM)
    return outside / "thesis.txt"


def check(victim: Path) -> None:
    """Check that the victim is as it was, and alone."""
    assert victim.read_bytes() == VICTIM
    assert [path.name for path in victim.parent.iterdir()] == ["thesis.txt"]
    assert victim.stat().st_nlink <= 2


def soft(path: Path, victim: Path) -> None:
    """Put a symbolic link in place of a file."""
    path.unlink(missing_ok=True)
    path.symlink_to(victim)


def hard(path: Path, victim: Path) -> None:
    """Give the victim a second name in place of a file."""
    path.unlink(missing_ok=True)
    os.link(victim, path)


def folder(path: Path, _victim: Path) -> None:
    """Put a directory in place of a file."""
    path.unlink(missing_ok=True)
    path.mkdir()
    (path / "inside").write_bytes(b"")


def pipe(path: Path, _victim: Path) -> None:
    """Put a pipe in place of a file."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


KINDS = pytest.mark.parametrize("replace", [soft, hard, folder, pipe], ids=["link", "second name", "directory", "pipe"])


@KINDS
@pytest.mark.parametrize("name", ["segment-00000.dat", "index.log", "index.log.tmp", "namespace.json"])
def test_a_file_that_is_not_ours_is_set_aside(
    open_disk: OpenDisk, directory: Path, victim: Path, name: str, replace: Callable[[Path, Path], None]
) -> None:
    """A link that another user, or a backup, left in the directory must not lead writes to another file."""
    with open_disk() as disk:
        disk.put(frames(0))
    if name == "index.log.tmp":
        (directory / "index.log").unlink()
    replace(directory / name, victim)
    for number in (1, 2):
        with open_disk() as disk:
            assert disk.get(make_key(0)) in (None, frames(0)[make_key(0)])
            disk.put(frames(number))
            assert disk.get(make_key(number)) == frames(number)[make_key(number)]
            assert disk.delete([make_key(number)]) == [None]
    check(victim)


@pytest.mark.parametrize(("replace", "words"), [(soft, "it is a link"), (hard, "with 2 (hard links)")])
@pytest.mark.parametrize("name", ["tierkv-disk.json", "namespace.json"])
def test_a_link_in_place_of_a_document_is_called_a_link(
    open_disk: OpenDisk,
    place: Path,
    directory: Path,
    victim: Path,
    name: str,
    replace: Callable[[Path, Path], None],
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After `cp -al` for a backup, an operator who reads of a damaged marker would look for a broken disk."""
    with open_disk() as disk:
        disk.put(frames(0))
    path = (place if name == "tierkv-disk.json" else directory) / name
    replace(path, victim)
    with open_disk() as disk:
        assert disk.get(make_key(0)) == frames(0)[make_key(0)]
    assert f"{name} is not used, because" in caplog.text
    assert words in caplog.text
    assert "is damaged" not in caplog.text
    check(victim)


@pytest.mark.parametrize("replace", [soft, hard], ids=["link", "second name"])
@pytest.mark.parametrize("where", ["namespace", "directory"])
def test_a_lock_that_is_not_ours_is_refused(
    open_disk: OpenDisk, place: Path, directory: Path, victim: Path, where: str, replace: Callable[[Path, Path], None]
) -> None:
    """The lock file is truncated and written at each open; the error names it."""
    open_disk().close()
    path = directory / "lock" if where == "namespace" else place / "directory.lock"
    replace(path, victim)
    with pytest.raises(BackendError, match=rf"not a regular file.*{path.name}"):
        open_disk()
    check(victim)
    path.unlink()
    open_disk().put(frames(0))


@pytest.mark.parametrize("replace", [folder, pipe], ids=["directory", "pipe"])
@pytest.mark.parametrize("where", ["namespace", "directory"])
def test_what_can_be_no_lock_is_set_aside(
    open_disk: OpenDisk, place: Path, directory: Path, victim: Path, where: str, replace: Callable[[Path, Path], None]
) -> None:
    """A directory or a pipe leads to no other file, and would keep the tier out until it is removed by hand."""
    with open_disk() as disk:
        disk.put(frames(0))
    path = directory / "lock" if where == "namespace" else place / "directory.lock"
    replace(path, victim)
    for _ in range(2):
        with open_disk() as disk:
            assert disk.get(make_key(0)) == frames(0)[make_key(0)]
    assert path.is_file()
    assert path.with_name(f"{path.name}.damaged").exists()
    with open_disk(), pytest.raises(BackendError, match="in use by this process"):
        open_disk()


def test_a_namespace_that_is_a_link_is_refused(open_disk: OpenDisk, place: Path, directory: Path, victim: Path) -> None:
    """Segments behind a link would be outside the directory, where no limit and no lock counts them."""
    open_disk(model="other").close()
    directory.symlink_to(victim.parent)
    with pytest.raises(BackendError, match="is a link or a file"):
        open_disk()
    check(victim)


def test_temporaries_are_swept_by_their_exact_names(
    open_disk: OpenDisk, place: Path, directory: Path, victim: Path
) -> None:
    """Only names that this program makes are removed, and links among them are removed without their targets."""
    open_disk().close()
    fingerprint = "0123456789abcdef" * 2
    ours = [
        ".tierkv-disk.tierkv-disk.json.17-140000.tmp",
        f".tierkv-disk.{fingerprint}.17-140000.tmp",
        ".tierkv-disk.abc_1234.tmp",
    ]
    others = [".tierkv-disk.thesis.txt.17-140000.tmp", ".tierkv-disk.notes.tmp", "index.log.tmp"]
    (place / ours[0]).symlink_to(victim)
    (place / ours[1]).mkdir()
    (place / ours[1] / "segment-00000.dat").symlink_to(victim)
    (place / ours[1] / "folder").symlink_to(victim.parent)
    (place / ours[2]).write_bytes(b"x")
    for name in others:
        (place / name).write_bytes(b"x")
    (place / ".tierkv-disk.namespace.json.17-140000.tmp").mkdir()
    open_disk().close()
    left = {path.name for path in place.iterdir()}
    assert not left & set(ours)
    assert left >= {*others, ".tierkv-disk.namespace.json.17-140000.tmp"}
    check(victim)


def test_links_are_not_counted_as_bytes_of_the_tier(open_disk: OpenDisk, place: Path, directory: Path) -> None:
    """A link to a large file must not use up the limit of the directory."""
    large = place.parent / "large"
    with large.open("wb") as file:
        file.truncate(1 << 30)
    open_disk().close()
    (directory / "notes").symlink_to(large)
    disk = open_disk(directory_bytes_max=8 << 20)
    disk.put(frames(0))
