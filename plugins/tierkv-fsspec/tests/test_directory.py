"""Directories: atomic files, files of dead writers, a full disk, odd names; and other file systems of fsspec."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec_support import CHILD_TIMEOUT_S, check, get, key, namespace, object_name, open_at, put

from tierkv.errors import BackendError
from tierkv_fsspec.stores.local_store import STALE_S, SWEEP_S, LocalStore

FRAME = bytes(range(256)) * 200


def test_names_are_as_documented(tmp_path: Path) -> None:
    """Users read the directory, and other tools clean it: names are part of the format."""
    backend = open_at(f"file://{tmp_path}")
    put(backend, {key(1): FRAME})
    assert (tmp_path / object_name(key(1))).read_bytes() == FRAME
    assert (tmp_path / namespace().fingerprint().hex() / "namespace.json").is_file()
    backend.close()


def test_plain_path_is_a_url(tmp_path: Path) -> None:
    """An absolute path needs no scheme, and means the same directory."""
    backend = open_at(str(tmp_path))
    put(backend, {key(1): FRAME})
    backend.close()
    backend = open_at(f"file://{tmp_path}/")
    assert get(backend, key(1)) == [FRAME]
    backend.close()


KILLED = """
import os, sys
from pathlib import Path
from tierkv_fsspec.stores.local_store import LocalStore
store = LocalStore(Path(sys.argv[1]))
with store._written(memoryview(b"half a fra")):
    print("ready", flush=True)
    sys.stdin.read()
"""


def temporaries(store: Path) -> list[str]:
    """Names of the temporary files."""
    return sorted(file.name for file in (store / "tmp").iterdir())


def test_temporaries_of_killed_writers_are_removed_within_minutes(tmp_path: Path) -> None:
    """Kills must not fill the disk, whatever the clocks say; a file that is being written is never removed."""
    now_s = [0.0]
    store = LocalStore(tmp_path, monotonic=lambda: now_s[0])
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        (name,) = temporaries(tmp_path)
        os.utime(tmp_path / "tmp" / name, (4e9, 4e9))  # the clock of another machine is far ahead
        for _ in range(10):
            now_s[0] += SWEEP_S
            store.write("ab/object", memoryview(FRAME))
            assert temporaries(tmp_path) == [name]
        writer.kill()
        writer.wait()
        now_s[0] += SWEEP_S
        store.write("ab/object", memoryview(FRAME))
    assert temporaries(tmp_path) == []


@pytest.mark.parametrize("creates", [False, True])
def test_a_temporary_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, creates: bool) -> None:
    """Its descriptor and its lock are released: an error in a night of writes must not use up the descriptors."""
    now_s = [0.0]
    store = LocalStore(tmp_path, monotonic=lambda: now_s[0])
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names, no paths
    with monkeypatch.context() as fault:
        fault.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EIO, "unlink")))
        if creates:
            assert store.create("ab/object", FRAME)
        else:
            fault.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "rename")))
            with pytest.raises(OSError, match="rename"):
                store.write("ab/object", memoryview(FRAME))
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208 - (the same)
    assert len(temporaries(tmp_path)) == 1
    for _ in range(2):
        now_s[0] += SWEEP_S
        store.write("ab/next", memoryview(FRAME))
    assert temporaries(tmp_path) == []


def test_temporaries_are_removed_at_open(tmp_path: Path) -> None:
    """A file that is a minute old and has no living writer goes at once; others, and names not of ours, stay."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    old, fresh, foreign = temporary / ("a" * 32), temporary / ("b" * 32), temporary / "notes.txt"
    for file in (old, fresh, foreign):
        file.write_bytes(b"half a fra")
    (temporary / ("c" * 32)).symlink_to(foreign)
    for file in (old, foreign):
        os.utime(file, (1e9, 1e9))
    LocalStore(tmp_path)
    assert temporaries(tmp_path) == ["b" * 32, "c" * 32, "notes.txt"]


def test_without_locks_the_age_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have no locks: a file of a slow writer stays for an hour."""

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    for letter, age_s in (("a", STALE_S + 60), ("b", STALE_S - 60)):
        (temporary / (letter * 32)).write_bytes(b"half a fra")
        os.utime(temporary / (letter * 32), (time.time() - age_s,) * 2)
    LocalStore(tmp_path)
    assert temporaries(tmp_path) == ["b" * 32]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get)
def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """FAT, SMB and some of FUSE have none: the tier opens there, stores, and never replaces a whole object."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    for _ in range(2):
        backend = open_at(f"file://{tmp_path}")
        assert backend.contains([key(1)]) in ([False], [True])
        assert put(backend, {key(1): FRAME}) == [None]
        assert get(backend, key(1)) == [FRAME]
        backend.close()
    store = LocalStore(tmp_path)
    assert store.create("ab/object", b"first")
    assert not store.create("ab/object", b"second")
    assert store.read("ab/object") == b"first"
    assert temporaries(tmp_path) == []


@pytest.mark.parametrize("kind", ["loop", "link", "pipe"])
def test_a_link_or_pipe_in_place_of_an_object_heals(tmp_path: Path, kind: str) -> None:
    """A place that cannot be read is a miss, and the next store replaces it; what a link points to stays as it is."""
    victim = tmp_path / "victim"
    victim.write_bytes(FRAME)
    backend = open_at(f"file://{tmp_path / 'tier'}")
    bad = tmp_path / "tier" / object_name(key(1))
    bad.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(bad)
    else:
        bad.symlink_to(bad if kind == "loop" else victim)
    assert backend.contains([key(1)]) == [False]
    assert get(backend, key(1)) == [None]
    assert put(backend, {key(1): FRAME[::-1]}) == [None]
    assert get(backend, key(1)) == [FRAME[::-1]]
    assert bad.is_file()
    assert not bad.is_symlink()
    assert victim.read_bytes() == FRAME
    backend.close()


def test_a_directory_in_place_of_an_object_is_a_miss(tmp_path: Path) -> None:
    """It was a hit for ever that never loaded. The next store reports it and keeps it."""
    backend = open_at(f"file://{tmp_path}")
    bad = tmp_path / object_name(key(1))
    bad.mkdir(parents=True)
    (bad / "content").touch()
    assert backend.contains([key(1)]) == [False]
    assert get(backend, key(1)) == [None]
    (result,) = put(backend, {key(1): FRAME})
    assert isinstance(result, BackendError)
    assert str(bad) in str(result)
    backend.close()


def test_bytes_are_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut a name must not refer to zeros: flush first, then rename, and never write in place."""
    store = LocalStore(tmp_path)
    target = tmp_path / "ab/object"
    seen: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noting_fsync(fd: int) -> None:
        assert not target.exists()
        fsync(fd)
        if stat.S_ISREG(os.fstat(fd).st_mode):  # not the directory, whose name is made durable
            assert os.fstat(fd).st_size == len(FRAME)
            seen.append("flush")

    def noting_replace(self: Path, other: Path) -> Path:
        seen.append("rename")
        return replace(self, other)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "replace", noting_replace)
    store.write("ab/object", memoryview(FRAME))
    assert seen[0] == "flush"
    assert seen[-1] == "rename"
    assert target.read_bytes() == FRAME
    assert list((tmp_path / "tmp").iterdir()) == []


def test_stored_frames_are_not_written_again(tmp_path: Path) -> None:
    """Several engines compute the same prefix; writing it again is a waste. A different frame replaces it."""
    backend = open_at(f"file://{tmp_path}")
    put(backend, {key(1): FRAME})
    file = tmp_path / object_name(key(1))
    first = file.stat().st_ino
    put(backend, {key(1): FRAME})
    assert file.stat().st_ino == first
    put(backend, {key(1): b"x" + FRAME[1:]})
    assert get(backend, key(1)) == [b"x" + FRAME[1:]]
    backend.close()


def test_directory_removed_under_the_tier(tmp_path: Path) -> None:
    """The cache is emptied while it is in use: misses, and stores work again."""
    backend = open_at(f"file://{tmp_path}")
    put(backend, {key(1): FRAME})
    subprocess.run(["rm", "-r", str(tmp_path / namespace().fingerprint().hex())], check=True)
    assert backend.contains([key(1)]) == [False]
    assert get(backend, key(1)) == [None]
    assert put(backend, {key(1): FRAME}) == [None]
    assert get(backend, key(1)) == [FRAME]
    backend.close()


def test_failure_of_one_file_is_its_own(tmp_path: Path) -> None:
    """One bad name (here: a directory of that name) must not fail its batch."""
    backend = open_at(f"file://{tmp_path}")
    bad = tmp_path / object_name(key(2))
    bad.mkdir(parents=True)
    (bad / "content").touch()
    results = put(backend, {key(n): FRAME for n in (1, 2, 3)})
    assert [type(result) for result in results] == [type(None), BackendError, type(None)]
    assert str(bad) in str(results[1])
    assert results[1].key == key(2)
    assert [type(result) for result in backend.delete([key(1), key(2), key(3)])] == [
        type(None),
        BackendError,
        type(None),
    ]
    assert list((tmp_path / namespace().fingerprint().hex() / "tmp").iterdir()) == []
    backend.close()


def test_a_namespace_that_others_can_change_is_refused(tmp_path: Path) -> None:
    """A place that all users may enter, and one directory below it with wrong rights: they decide what is served."""
    open_at(f"file://{tmp_path}").close()
    directory = tmp_path / namespace().fingerprint().hex()
    tmp_path.chmod(0o755)
    directory.chmod(0o777)
    with pytest.raises(BackendError, match=f"chmod o-w {directory}"):
        open_at(f"file://{tmp_path}")
    directory.chmod(0o755)
    open_at(f"file://{tmp_path}").close()


@pytest.mark.parametrize("name", ["a b", "a%20b", "ü", "a#b?c", "-", "a'b", "x" * 200])
def test_odd_directory_names(tmp_path: Path, name: str) -> None:
    """The path of the URL is used unchanged, without unescaping."""
    backend = open_at(f"file://{tmp_path / name}")
    put(backend, {key(1): FRAME})
    assert get(backend, key(1)) == [FRAME]
    backend.close()
    assert (tmp_path / name / object_name(key(1))).is_file()


DISK_FULL = """
import pathlib, sys, fsspec_support as s
from tierkv.errors import OutOfSpaceError
place = pathlib.Path(sys.argv[1])
room = place.with_name("room")
backend = s.open_at(f"file://{place}")
room.write_bytes(bytes(1 << 20))
stored, result = {}, None
for number in range(200):
    frame = bytes([number]) * 60000
    (result,) = s.put(backend, {s.key(number): frame})
    if result is not None:
        break
    stored[s.key(number)] = frame
assert isinstance(result, OutOfSpaceError), result
assert result.key == s.key(number)
assert len(stored) > 30
assert s.get(backend, *stored) == list(stored.values())
assert s.get(backend, s.key(number)) == [None]
assert not list(place.glob("*/tmp/*")), "a failed write leaves nothing"
room.unlink()
assert s.put(backend, {s.key(number): b"fits now"}) == [None]
"""


def test_disk_full(tmp_path: Path) -> None:
    """A refusal of the disk is an error by key, leaves no file, and ends when there is room again."""
    alone = ["unshare", "--map-root-user", "--mount"]
    mount = 'mount -t tmpfs -o size=5m tmpfs "$0"'
    allowed = subprocess.run([*alone, "sh", "-c", mount, tmp_path], capture_output=True, check=False)
    if allowed.returncode != 0:
        pytest.skip(f"may not mount here: {allowed.stderr.decode()}")
    script = [sys.executable, "-c", DISK_FULL, f"{tmp_path}/place"]
    done = subprocess.run(
        [*alone, "sh", "-c", f'{mount} && exec "$@"', str(tmp_path), *script],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_check_of_directories(tmp_path: Path) -> None:
    """Good and bad paths are distinguished before the start, and nothing is created."""
    (tmp_path / "file").write_text("x")
    found = check(f"file://{tmp_path}/new/deep")
    assert all(check_result.ok for check_result in found.values())
    assert "will be created" in found["write"].detail
    assert found["space"].detail.endswith("iB free")
    assert not (tmp_path / "new").exists()
    assert not check(f"file://{tmp_path}/file")["access"].ok
    assert not check(f"file://{tmp_path}/file/below")["access"].ok


class PlainFileSystem(LocalFileSystem):
    """File system with real directories that this plugin does not know, like SFTP or HDFS."""

    protocol = "tierkvplain"
    auto_mkdir = False

    @classmethod
    def _strip_protocol(cls, path: str, *args: Any) -> str:
        return str(super()._strip_protocol(path.replace("tierkvplain://", "/"), *args))


def test_other_file_systems_with_directories(tmp_path: Path) -> None:
    """Any protocol of fsspec works, also if a directory must exist before a file can be stored in it."""
    fsspec.register_implementation("tierkvplain", PlainFileSystem, clobber=True)
    url = f"tierkvplain:/{tmp_path}/share/prefix"
    backend = open_at(url)
    assert put(backend, {key(1): FRAME, key(2): b"x"}) == [None, None]
    assert backend.contains([key(1), key(3)]) == [True, False]
    assert get(backend, key(1), key(2), key(3)) == [FRAME, b"x", None]
    assert backend.delete([key(1), key(3)]) == [None, None]
    assert get(backend, key(1)) == [None]
    assert (tmp_path / "share/prefix" / object_name(key(2))).read_bytes() == b"x"
    backend.close()
    assert all(check_result.ok for check_result in check(url).values())


@pytest.mark.parametrize("makes", [False, True], ids=["nothing made", "made by another"])
def test_directories_created_by_others_at_the_same_time(tmp_path: Path, makes: bool) -> None:
    """SFTP servers refuse to create a directory, or a parent of it, that another process has just created."""
    fsspec.register_implementation("tierkvplain", PlainFileSystem, clobber=True)
    backend = open_at(f"tierkvplain:/{tmp_path}/share")
    file_system = backend._store.present._fs
    makedirs, tries = file_system.makedirs, []

    def refused_once(path: str, exist_ok: bool = False) -> None:
        tries.append(path)
        if makes:
            makedirs(path, exist_ok=exist_ok)
        if len(tries) == 1:
            raise OSError("Failure")
        makedirs(path, exist_ok=exist_ok)

    file_system.makedirs = refused_once
    assert put(backend, {key(1): FRAME}) == [None]
    assert get(backend, key(1)) == [FRAME]
    backend.close()
