"""Files that change under an open environment: it notices, starts afresh, and stores again."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest
from lmdb_support import (
    FRAME,
    directory,
    get,
    key,
    open_at,
    put,
    run_child,
    run_on_small_disk,
    write_until_stored,
)

from tierkv.errors import BackendUnavailableError
from tierkv_lmdb.directory import MARKER, read_losses

CHANGES: dict[str, Callable[[Path], object]] = {
    "data removed": lambda where: (where / "data.mdb").unlink(),
    "data replaced": lambda where: (
        shutil.copy(where / "data.mdb", where / "copy") and (where / "copy").replace(where / "data.mdb")
    ),
    "data truncated": lambda where: os.truncate(where / "data.mdb", 5000),
    "data emptied": lambda where: os.truncate(where / "data.mdb", 0),
    "lock removed": lambda where: (where / "lock.mdb").unlink(),
    "lock truncated": lambda where: os.truncate(where / "lock.mdb", 0),
    "lock overwritten": lambda where: (where / "lock.mdb").write_bytes(b"\xff" * (where / "lock.mdb").stat().st_size),
}

DAMAGED_WHILE_OPEN = """
import sys, pathlib, lmdb_support as s, test_files_while_open as t
place = pathlib.Path(sys.argv[1])
backend = s.open_at(place)
for number in range(40):
    assert s.put(backend, {s.key(number): s.FRAME}) == [None]
t.CHANGES[sys.argv[2]](s.directory(place))
found = s.get(backend, *map(s.key, range(40)))
assert set(found) <= {s.FRAME, None}, found
s.write_until_stored(backend, 50)
for number in range(40):
    assert s.put(backend, {s.key(number): s.FRAME}) == [None]
assert s.get(backend, *map(s.key, range(40))) == [s.FRAME] * 40
assert len(list(backend.scan())) == 41
backend.close()
print("stored", found.count(None))
"""


@pytest.mark.parametrize("what", CHANGES)
def test_files_that_change_while_open(tmp_path: Path, what: str) -> None:
    """LMDB reads its files through maps: past the end of one that shrank, an access ends the process (SIGBUS).

    The tier starts empty, because the files no longer belong together.
    """
    assert run_child(DAMAGED_WHILE_OPEN, tmp_path, what) == "stored 40\n"


@pytest.mark.parametrize("length", [0, 5])
def test_a_short_read_of_the_lock_file_costs_no_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """A network file system may return a part of what was asked for. That counted as an overwritten file: the tier
    started empty."""
    backend = open_at(tmp_path)
    for number in range(10):
        assert put(backend, {key(number): FRAME}) == [None]
    read, short = os.pread, [length]

    def once_short(fd: int, size: int, offset: int) -> bytes:
        return read(fd, short.pop() if short and size == 8 else size, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", once_short)
        get(backend, key(0))
    assert not short, "it was read"
    write_until_stored(backend, 50)
    assert get(backend, *map(key, range(10))) == [FRAME] * 10
    backend.close()


ROOT_FIELDS = {"flags": (4, 2), "depth": (6, 2), "leaf pages": (16, 8), "overflow pages": (24, 8), "root": (40, 8)}
"""Offset and length of fields in LMDB's description of a tree, which follows the tree's name."""

OVERWRITTEN_WHILE_OPEN = """
import os, re, sys, pathlib, lmdb_support as s, test_files_while_open as t
place, (offset, length) = pathlib.Path(sys.argv[1]), t.ROOT_FIELDS[sys.argv[2]]
backend = s.open_at(place)
for number in range(40):
    assert s.put(backend, {s.key(number): s.FRAME}) == [None]
data = s.directory(place) / "data.mdb"
with data.open("r+b") as file:
    for name in re.finditer(b"frames", data.read_bytes()):
        file.seek(name.end() + offset)
        file.write(b"\\x00\\x00\\x00\\x00\\x10\\x00\\x00\\x00"[-length:] if length == 8 else b"\\x55" * length)
s.write_until_stored(backend, 50)
for number in range(40):
    assert s.put(backend, {s.key(number): s.FRAME}) == [None]
assert s.get(backend, *map(s.key, range(40))) == [s.FRAME] * 40
backend.close()
"""


@pytest.mark.parametrize("field", ROOT_FIELDS)
def test_the_root_of_a_tree_that_is_overwritten_while_open(tmp_path: Path, field: str) -> None:
    """LMDB reads it in each transaction, and refuses the tree; without a reopening it would store nothing again."""
    run_child(OVERWRITTEN_WHILE_OPEN, tmp_path, field)


@pytest.mark.parametrize("error", ["BadDbiError", "BadTxnError"])
def test_doubt_reopens_and_keeps_a_sound_file(tmp_path: Path, error: str) -> None:
    """The check of the file at its opening decides what is lost: here nothing is."""
    backend = open_at(tmp_path)
    put(backend, {key(1): FRAME})
    with pytest.raises(lmdb.Error), backend._env.reading():
        raise getattr(lmdb, error)("found")
    assert get(backend, key(1)) == [FRAME]
    assert backend._environments.restarts == 1
    backend.close()


@pytest.mark.parametrize("fails", [1, 2, 3])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_one_error_of_a_look_at_the_files_costs_no_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fails: int
) -> None:
    """A disk or a network that fails for an instant says nothing about the files: the next opening checks them.

    Taken for damage, it emptied the tier.
    """
    backend = open_at(tmp_path)
    put(backend, {key(1): FRAME})
    left, read = [fails], os.pread

    def fail(fd: int, length: int, offset: int) -> bytes:
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return read(fd, length, offset)

    monkeypatch.setattr(os, "pread", fail)
    write_until_stored(backend, 2)
    assert not left[0]
    assert get(backend, key(1)) == [FRAME]
    backend.close()
    assert read_losses(directory(tmp_path))[0] == 0


def test_directory_that_was_replaced_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The owner lock went with the directory: another process may write to the new one.

    The log says so once, and each refused call has the remedy, also those between two attempts: an operator who reads
    that the tier starts empty would wait for that for ever.
    """
    backend = open_at(tmp_path)
    put(backend, {key(1): FRAME})
    directory(tmp_path).rename(tmp_path / "elsewhere")
    directory(tmp_path).mkdir()
    with caplog.at_level(logging.WARNING, "tierkv_lmdb"):
        for _ in range(3):
            with pytest.raises(BackendUnavailableError, match=r"moved or replaced .*: put it back, or close the stack"):
                put(backend, {key(1): FRAME})
    assert caplog.text.count("moved or replaced") == 1
    assert list(directory(tmp_path).iterdir()) == []
    backend.close()


def test_a_directory_without_access_is_not_called_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a wrong `chmod`, an operator who reads that the directory was moved would look for it elsewhere."""
    backend = open_at(tmp_path)
    put(backend, {key(1): FRAME})
    real = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{directory(tmp_path)}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        for _ in range(3):
            with pytest.raises(BackendUnavailableError, match=r"opened afresh: .*Permission denied"):
                put(backend, {key(2): FRAME})
    write_until_stored(backend, 2)
    assert get(backend, key(1)) == [FRAME]
    backend.close()


@pytest.mark.parametrize("what", ["namespace", "path"])
def test_a_directory_that_returns_has_its_chunks(tmp_path: Path, what: str) -> None:
    """A mount that is away for a while, or a wrong rename: the files were once taken for damaged, and removed."""
    place = tmp_path / "tier"
    backend = open_at(place)
    put(backend, {key(1): FRAME})
    moved = directory(place) if what == "namespace" else place
    moved.rename(tmp_path / "elsewhere")
    for _ in range(3):
        with pytest.raises(BackendUnavailableError, match="moved or replaced"):
            put(backend, {key(2): FRAME})
    (tmp_path / "elsewhere").rename(moved)
    write_until_stored(backend, 2)
    assert get(backend, key(1)) == [FRAME]
    backend.close()
    assert read_losses(directory(place))[0] == 0


@pytest.mark.parametrize("what", ["path", "made again", "contents", "namespace", "files"])
def test_a_directory_that_was_removed_is_begun_again(tmp_path: Path, what: str) -> None:
    """An operator who frees the room of a tier must not end its service until the engine is started again."""
    place = tmp_path / "tier"
    backend = open_at(place)
    put(backend, {key(1): FRAME})
    if what == "files":
        for path in [path for path in place.rglob("*") if path.is_file()]:
            path.unlink()
    elif what == "contents":
        shutil.rmtree(directory(place))
        (place / MARKER).unlink()
    else:
        shutil.rmtree(directory(place) if what == "namespace" else place)
        if what == "made again":
            place.mkdir()
    write_until_stored(backend, 2)
    assert get(backend, key(1), key(2)) == [None, FRAME]
    with pytest.raises(BackendUnavailableError, match="in use by this process"):
        open_at(place)
    backend.close()
    again = open_at(place)
    assert get(again, key(1), key(2)) == [None, FRAME]
    again.close()


def test_a_removed_directory_that_another_program_has_made_is_left_alone(tmp_path: Path) -> None:
    """Files of others that are at the path now are neither written nor removed."""
    place = tmp_path / "tier"
    backend = open_at(place)
    shutil.rmtree(place)
    place.mkdir()
    (place / "thesis.txt").write_text("the only copy")
    for _ in range(3):
        with pytest.raises(BackendUnavailableError, match=r"not a directory of tierkv-lmdb|opened afresh"):
            put(backend, {key(1): FRAME})
    assert [path.name for path in place.iterdir()] == ["thesis.txt"]
    backend.close()


REPLACED = """
import subprocess, sys
from pathlib import Path
from lmdb_support import FRAME, get, key, open_at, put, put_once, write_until_stored

place = Path(sys.argv[1])
backend = open_at(place)
put(backend, {key(1): FRAME})
def call(*command):
    subprocess.run([*command, place.parent], check=True)
"""


def test_a_file_system_that_was_replaced_is_used(tmp_path: Path) -> None:
    """A drive is changed under a running engine. While none is mounted, the file system below must not fill up."""
    run_on_small_disk(
        REPLACED
        + """
call("umount", "-l")
for _ in range(3):
    assert "moved or replaced" in str(put_once(backend, 2)[0])
assert not list(place.parent.iterdir()), "chunks fill the file system below"
call("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs")
write_until_stored(backend, 2)
assert get(backend, key(1), key(2)) == [None, FRAME]
backend.close()
again = open_at(place)
assert get(again, key(1), key(2)) == [None, FRAME]
""",
        tmp_path,
        mib=16,
    )


def test_a_file_system_that_was_hidden_for_a_while_has_its_chunks(tmp_path: Path) -> None:
    """Another one was mounted over it by mistake, and unmounted: its files are not those that are open, and sound."""
    run_on_small_disk(
        REPLACED
        + """
call("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs")
write_until_stored(backend, 2)
call("umount", "-l")
write_until_stored(backend, 3)
assert get(backend, key(1), key(2), key(3)) == [FRAME, None, FRAME]
backend.close()
""",
        tmp_path,
        mib=16,
    )
