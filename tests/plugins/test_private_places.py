"""Private places: the functions with which backends create directories and files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierkv.abc.places import (
    absolute_path,
    check_private_directory,
    differs_in_one_byte,
    exists,
    make_private_directory,
    open_private,
    read_short_file,
    why_not_writable,
)
from tierkv.errors import BackendError


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    """The umask that takes away nothing."""
    umask = os.umask(0)
    yield
    os.umask(umask)


def mode(path: Path) -> int:
    """Permission bits."""
    return path.stat().st_mode & 0o777


def test_a_relative_path_is_that_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may change its directory between two openings of a tier."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert absolute_path("kv") == str(tmp_path / "kv")
    assert absolute_path("~/kv") == "/home/me/kv"
    assert absolute_path("/kv") == "/kv"
    assert absolute_path(tmp_path / "kv") == str(tmp_path / "kv"), "a program may give a Path"


@pytest.mark.parametrize(
    ("path", "fix"),
    [("", "give the directory"), ("a\0b", "give the directory"), ("~nobody-of-this-name/kv", "without ~")],
)
def test_a_path_that_names_no_directory(path: str, fix: str) -> None:
    """The error names the option, its value and the fix: the framework adds file and table."""
    with pytest.raises(ValueError, match=f"^root = .*: .*{fix}"):
        absolute_path(path, "root")


def test_a_lost_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory of a shell may be removed."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ValueError, match=r"^path = 'kv': .*; give an absolute path"):
        absolute_path("kv")


def test_every_missing_parent_is_private(tmp_path: Path) -> None:
    """``mkdir(parents=True)`` gives its mode to the last directory only."""
    place = tmp_path / "a" / "b" / "c"
    make_private_directory(place)
    assert [mode(path) for path in (place, place.parent, place.parent.parent)] == [0o700] * 3


def test_new_names_are_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut must not take the directory of frames that were forced."""
    forced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (forced.append(os.fstat(fd).st_ino), fsync(fd)))
    make_private_directory(tmp_path / "a" / "b")
    assert forced == [tmp_path.stat().st_ino, (tmp_path / "a").stat().st_ino]
    make_private_directory(tmp_path / "a" / "b")
    assert len(forced) == 2


def test_an_existing_directory_keeps_its_mode(tmp_path: Path) -> None:
    """A group may read a place on purpose; only a place that every user may change is refused."""
    place = tmp_path / "place"
    place.mkdir(0o775)
    make_private_directory(place)
    assert mode(place) == 0o775


@pytest.mark.parametrize("function", [make_private_directory, check_private_directory])
def test_a_place_that_every_user_may_change(tmp_path: Path, function: type) -> None:
    """The error names the path, the command that mends it, and the option that chooses another path."""
    place = tmp_path / "place"
    place.mkdir(0o777)
    with pytest.raises(BackendError, match=rf"every user may write in {place}.*`chmod o-w {place}`.*another `url`"):
        function(place, "url")


def test_a_place_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of a directory may replace its files, whatever their modes."""
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:
        check_private_directory(tmp_path)  # the system's own user may read and change everything anyway
        os.chown(tmp_path, 12345, -1)
    with pytest.raises(BackendError, match=rf"{tmp_path} belongs to the user with number .*`chown` it to {owner + 1}"):
        check_private_directory(tmp_path)


def test_a_missing_place_is_not_created_by_a_check(tmp_path: Path) -> None:
    """``tierkv check`` changes nothing."""
    with pytest.raises(FileNotFoundError):
        check_private_directory(tmp_path / "place")
    assert not (tmp_path / "place").exists()


def test_files_are_private_and_not_inherited(tmp_path: Path) -> None:
    """A child process gets no descriptor of a file of frames."""
    with open(tmp_path / "frame", "wb", opener=open_private) as file:
        file.write(b"frame")
        assert not os.get_inheritable(file.fileno())
    assert mode(tmp_path / "frame") == 0o600
    with open(tmp_path / "frame", "rb", opener=open_private) as file:
        assert file.read() == b"frame"


def test_a_short_file_is_read(tmp_path: Path) -> None:
    """Up to its longest content, whatever the bytes."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)))
    assert read_short_file(path, 256) == bytes(range(256))
    with pytest.raises(OSError, match="longer than 255 bytes"):
        read_short_file(path, 255)
    with pytest.raises(FileNotFoundError):
        read_short_file(tmp_path / "absent")


@pytest.mark.parametrize("kind", ["grown", "link", "pipe", "directory"])
def test_nothing_endless_is_read(tmp_path: Path, kind: str) -> None:
    """A link to an endless device once took 7.4 GiB, and a pipe hung the engine's start."""
    path = tmp_path / "namespace.json"
    if kind == "grown":
        path.touch()
        os.truncate(path, 1 << 40)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(OSError, match=r"longer than|not a regular file|directory"):
        read_short_file(path)


def test_one_bad_byte_is_told_from_another_program() -> None:
    """Damage is repaired; the file of another program, or of another version, must stay."""
    written = b'{"format": "tierkv-lmdb"}'
    assert differs_in_one_byte(b'{"format": "tierkv-lmdc"}', written)
    assert not differs_in_one_byte(b'{"format": "tierkv-disk"}', written)
    assert not differs_in_one_byte(written, written)
    assert not differs_in_one_byte(written + b"\n", written)


def test_a_place_that_cannot_be_looked_at_is_not_absent(tmp_path: Path) -> None:
    """Since Python 3.14 ``Path.exists`` says that it is: a store whose directory cannot be searched would look new."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    absent = [tmp_path / "none", tmp_path / "file" / "below", tmp_path / "loop", tmp_path / "a\0b"]
    assert [exists(path) for path in [tmp_path, tmp_path / "file", *absent]] == [True, True, False, False, False, False]
    with pytest.raises(OSError, match="too long"):
        exists(tmp_path / ("n" * 300))


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs procfs, in which no user can create files")
def test_a_directory_is_tried_out(tmp_path: Path) -> None:
    """Root may write everywhere, and still not in `/proc`: a check by permissions promised a tier there."""
    assert why_not_writable(tmp_path) == ""
    assert list(tmp_path.iterdir()) == [], "nothing stays"
    assert why_not_writable(tmp_path / "absent") == f"{tmp_path / 'absent'} is not a directory"
    assert why_not_writable(Path("/proc")).startswith("no file can be created in /proc: ")
