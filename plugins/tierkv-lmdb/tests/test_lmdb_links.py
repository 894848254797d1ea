"""Links, pipes and directories under the names of a tier's files: nothing outside of the directory is changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from lmdb_support import FRAME, context, directory, get, key, open_at, put

import tierkv_lmdb
from tierkv.errors import BackendError
from tierkv_lmdb import LmdbOptions, LmdbReaderOptions
from tierkv_lmdb.checking import check


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Data file of another tier: LMDB itself would take it for its own."""
    place = tmp_path / "other"
    backend = open_at(place)
    put(backend, {key(7): FRAME})
    backend.close()
    return directory(place) / "data.mdb"


def link(path: Path, victim: Path) -> None:
    """Make a link to the victim."""
    path.symlink_to(victim)


def name(path: Path, victim: Path) -> None:
    """Give the victim a second name."""
    path.hardlink_to(victim)


def loop(path: Path, victim: Path) -> None:
    """Make a link to itself."""
    del victim
    path.symlink_to(path)


def pipe(path: Path, victim: Path) -> None:
    """Make a pipe: opening it would wait for its other end."""
    del victim
    os.mkfifo(path)


def folder(path: Path, victim: Path) -> None:
    """Make a directory."""
    del victim
    path.mkdir()


KINDS = [link, name, loop, pipe, folder]
Replace = Callable[[Path, Path], None]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Tier with a frame, closed."""
    backend = open_at(tmp_path / "tier")
    put(backend, {key(1): FRAME})
    backend.close()
    return tmp_path / "tier"


@pytest.mark.parametrize("file", ["data.mdb", "lock.mdb"])
@pytest.mark.parametrize("replace", KINDS)
def test_what_is_no_data_file_is_set_aside(place: Path, victim: Path, file: str, replace: Replace) -> None:
    """LMDB follows links and waits for pipes: it would write into the file of another program, or hang."""
    before, path = victim.read_bytes(), directory(place) / file
    path.unlink()
    replace(path, victim)
    backend = open_at(place)
    assert put(backend, {key(2): FRAME}) == [None]
    assert get(backend, key(2), key(7)) == [FRAME, None]
    backend.close()
    assert victim.read_bytes() == before
    assert path.is_file()
    assert not path.is_symlink()
    assert os.path.lexists(path.with_name(f"{file}.damaged"))


@pytest.mark.parametrize("replace", [link, name, loop])
def test_a_lock_that_is_not_ours_is_refused(place: Path, victim: Path, replace: Replace) -> None:
    """The lock file is truncated at each open: never the file that a link leads to."""
    before, path = victim.read_bytes(), directory(place) / "owner.lock"
    path.unlink()
    replace(path, victim)
    with pytest.raises(BackendError, match=r"owner\.lock is not a regular file"):
        open_at(place)
    assert victim.read_bytes() == before
    list(check(LmdbOptions(path=str(place)), None))  # neither follows it nor waits


@pytest.mark.parametrize("replace", [pipe, folder])
def test_what_can_be_no_lock_is_set_aside(place: Path, victim: Path, replace: Replace) -> None:
    """A directory or a pipe leads to no other file, and would keep the tier out until it is removed by hand."""
    path = directory(place) / "owner.lock"
    path.unlink()
    replace(path, victim)
    list(check(LmdbOptions(path=str(place)), None))  # neither follows it nor waits
    for _ in range(2):
        backend = open_at(place)
        assert get(backend, key(1)) == [FRAME]
        with pytest.raises(BackendError, match="in use by this process"):
            open_at(place)
        backend.close()
    assert path.is_file()
    assert os.path.lexists(path.with_name("owner.lock.damaged"))


def test_a_namespace_that_is_a_link_is_refused(place: Path, victim: Path) -> None:
    """Data behind a link would be outside of the tier's path, where no check of private places looks."""
    before = victim.read_bytes()
    shutil.rmtree(directory(place))
    directory(place).symlink_to(victim.parent)
    with pytest.raises(BackendError, match="is a link"):
        open_at(place)
    assert victim.read_bytes() == before


@pytest.mark.parametrize("file", ["data.mdb", "lock.mdb"])
@pytest.mark.parametrize("replace", [link, name, pipe])
def test_a_reader_opens_no_file_of_others(place: Path, victim: Path, file: str, replace: Replace) -> None:
    """A reader writes the lock file, too, and must not wait for a pipe. In a place of others it renames nothing."""
    before, path = victim.read_bytes(), directory(place) / file
    path.unlink()
    replace(path, victim)
    reader = tierkv_lmdb.READ_ONLY_PLUGIN.open(context(), LmdbReaderOptions(path=str(place)))
    with pytest.raises(BackendError, match="not a regular file"):
        reader.contains([key(7)])
    reader.close()
    assert victim.read_bytes() == before
