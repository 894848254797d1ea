"""Ownership of the directory, its one writer, and data that cannot be trusted."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from itertools import product
from pathlib import Path

import lmdb
import pytest
from lmdb_support import context, directory, get, key, killed_at_end, open_at, put, run_child

import tierkv_lmdb
from tierkv.abc import BackendPlugin
from tierkv.errors import BackendUnavailableError, NamespaceMismatchError
from tierkv.types.keys import Key
from tierkv_lmdb import directory as layout
from tierkv_lmdb import documents

OWNER = """
import sys, pathlib, time, lmdb_support
backend = lmdb_support.open_at(pathlib.Path(sys.argv[1]))
lmdb_support.put(backend, {lmdb_support.key(1): b"of the first owner"})
print("ready", flush=True)
time.sleep(600)
"""


def test_a_marker_that_cannot_be_read_now_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without a free descriptor took it for damaged, and wrote its own in place of one of a newer format."""
    open_at(tmp_path).close()
    marker = tmp_path / layout.MARKER
    marker.write_text(newer := json.dumps({**layout.FORMAT, "version": 99}))

    def without_descriptors(path: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(documents, "read_short_file", without_descriptors)
        with pytest.raises(OSError, match="Too many open files"):
            open_at(tmp_path)
    with pytest.raises(NamespaceMismatchError, match="99"):
        open_at(tmp_path)
    assert marker.read_text() == newer


def test_error_of_a_second_process_names_the_pid_of_the_first(tmp_path: Path) -> None:
    """Two writers would corrupt each other's index; the message must name the process to stop.

    A killed owner holds no lock, and its acknowledged frames are stored.
    """
    with killed_at_end(OWNER, tmp_path) as pid:
        with pytest.raises(BackendUnavailableError, match=rf"process {pid}\b") as refused:
            open_at(tmp_path)
        assert refused.value.tier == "cold"
        assert str(tmp_path) in str(refused.value)
    backend = open_at(tmp_path)
    assert get(backend, key(1)) == [b"of the first owner"]
    backend.close()


@pytest.mark.parametrize("plugin", [tierkv_lmdb.PLUGIN, tierkv_lmdb.READ_ONLY_PLUGIN])
def test_a_process_may_change_its_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugin: BackendPlugin
) -> None:
    """A relative path means the directory that it named at the start. Files that are missed later cost all chunks."""
    open_with(tmp_path / "tier", {key(1): b"first"})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    backend = plugin.open(context(), plugin.options(path="tier"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert get(backend, key(1)) == [b"first"]
    if plugin is tierkv_lmdb.PLUGIN:
        assert put(backend, {key(2): b"second"}) == [None]
    backend.close()
    assert not list((tmp_path / "elsewhere").iterdir())


def open_with(place: Path, frames: dict[Key, bytes]) -> None:
    """Write a tier that holds these frames."""
    backend = open_at(place)
    assert put(backend, frames) == [None] * len(frames)
    backend.close()


def test_open_waits_out_a_check(tmp_path: Path) -> None:
    """`tierkv check` takes the lock for an instant; a service that starts then must not fail."""
    open_at(tmp_path).close()
    lock = directory(tmp_path) / layout.LOCK
    held = os.open(lock, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    pauses = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            os.close(held)

    layout.OwnerLock.take(lock, sleep=sleep).release()
    assert pauses == [layout.LOCK_TRIES_S[0]]


@pytest.mark.parametrize(
    "content",
    ["{}", '{"format": "tierkv-lmdb", "version": 2}', '{"format": "tierkv-disk", "version": 1}'],
)
def test_foreign_marker_is_refused_and_unchanged(tmp_path: Path, content: str) -> None:
    """A directory of another program, or of a later version, must not be written."""
    marker = tmp_path / "tierkv-lmdb.json"
    marker.write_text(content)
    with pytest.raises(NamespaceMismatchError, match="another path") as refused:
        open_at(tmp_path)
    assert str(marker) in str(refused.value)
    assert marker.read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == [marker.name]


def test_a_damaged_marker_beside_foreign_files_is_refused(tmp_path: Path) -> None:
    """Then it may be no marker of ours, and nothing may be written."""
    (tmp_path / "tierkv-lmdb.json").write_text("\x00not json")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(NamespaceMismatchError, match=r"notes\.txt"):
        open_at(tmp_path)
    assert (tmp_path / "tierkv-lmdb.json").read_text() == "\x00not json"


def test_a_lost_marker_is_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A namespace's manifest shows whose the directory is: a lost side file must not keep an engine from starting."""
    backend = open_at(tmp_path)
    put(backend, {key(1): b"frame"})
    backend.close()
    marker = tmp_path / "tierkv-lmdb.json"
    good = marker.read_bytes()
    marker.unlink()
    backend = open_at(tmp_path)
    assert backend.contains([key(1)]) == [True]
    backend.close()
    assert marker.read_bytes() == good
    assert caplog.text.count("has no tierkv-lmdb.json: it is written anew") == 1


@pytest.mark.parametrize("beside", ["notes.txt", "namespace.json of another program"])
def test_a_lost_marker_without_proof_is_refused(tmp_path: Path, beside: str) -> None:
    """A name of 32 digits makes no directory ours, and a manifest of ours none with other files."""
    open_at(tmp_path).close()
    (tmp_path / "tierkv-lmdb.json").unlink()
    if beside == "notes.txt":
        (tmp_path / beside).touch()
    else:
        (directory(tmp_path) / "namespace.json").write_text('{"program": "tierkv-disk", "format": 2}')
    with pytest.raises(NamespaceMismatchError, match=r"it has no tierkv-lmdb\.json"):
        open_at(tmp_path)
    assert not (tmp_path / "tierkv-lmdb.json").exists()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *product(("tierkv-lmdb.json", "namespace.json"), ("cut", "flipped", "another program", "no version")),
        ("namespace.json", "another value"),
        ("namespace.json", "another fingerprint"),
    ],
)
def test_a_damaged_side_file_is_written_anew(
    tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One bad byte keeps no engine from starting, and every chunk stays: each frame names its namespace."""
    backend = open_at(tmp_path)
    put(backend, {key(1): b"frame"})
    backend.close()
    file = (tmp_path if name == "tierkv-lmdb.json" else directory(tmp_path)) / name
    content = file.read_bytes()
    damaged = {
        "cut": content[:-5],
        "flipped": bytes([content[0] ^ 0x80]) + content[1:],
        "another program": content.replace(b"tierkv-lmdb", b"tierkv-lmdc"),
        "no version": content.replace(b"version", b"vershon"),
        "another value": content.replace(b'"dtype": "b', b'"dtype": "c'),
        "another fingerprint": content.replace(b"fingerprint", b"fingerprins"),
    }
    assert damaged[damage] != content
    file.write_bytes(damaged[damage])
    backend = open_at(tmp_path)
    assert get(backend, key(1)) == [b"frame"]
    backend.close()
    assert "written anew" in caplog.text
    assert file.read_bytes() == content


def test_manifest_of_another_namespace_is_refused(tmp_path: Path) -> None:
    """A directory renamed or copied by hand must not serve its bytes to another model."""
    backend = open_at(tmp_path)
    put(backend, {key(1): b"frame"})
    backend.close()
    manifest = directory(tmp_path) / "namespace.json"
    content = json.loads(manifest.read_text())
    content["namespace"]["model"], content["fingerprint"] = "another", 32 * "0"
    manifest.write_text(json.dumps(content))
    with pytest.raises(NamespaceMismatchError, match=str(manifest)):
        open_at(tmp_path)
    assert (directory(tmp_path) / "data.mdb").exists()


@pytest.mark.parametrize("kind", ["grown", "link", "pipe"])
@pytest.mark.parametrize("name", ["tierkv-lmdb.json", "namespace.json", "unsynced", "damage.json"])
def test_an_endless_side_file_is_not_read(tmp_path: Path, name: str, kind: str) -> None:
    """A link to an endless device must not fill the memory, and a pipe must not hang. It is set aside."""
    backend = open_at(tmp_path)
    put(backend, {key(1): b"frame"})
    backend.close()
    file = (tmp_path if name == "tierkv-lmdb.json" else directory(tmp_path)) / name
    file.unlink(missing_ok=True)
    if kind == "grown":
        file.touch()
        os.truncate(file, 1 << 40)
    elif kind == "link":
        file.symlink_to("/dev/zero")
    else:
        os.mkfifo(file)
    backend = open_at(tmp_path)
    put(backend, {key(2): b"another"})
    assert get(backend, key(2)) == [b"another"]
    backend.close()


def test_manifest_describes_the_namespace(tmp_path: Path) -> None:
    """A user who looks at a directory of hexadecimal names must find out which model it belongs to."""
    open_at(tmp_path).close()
    manifest = json.loads((directory(tmp_path) / "namespace.json").read_text())
    assert manifest["namespace"] == json.loads(json.dumps(context().namespace.describe()))
    assert manifest["fingerprint"] == directory(tmp_path).name


CRASHED_MACHINE = """
import sys, pathlib, os, lmdb_support
backend = lmdb_support.open_at(pathlib.Path(sys.argv[1]), durability="none")
lmdb_support.put(backend, {lmdb_support.key(1): b"never synced"})
os._exit(0)
"""


def test_unsynced_data_of_another_boot_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without syncs, a crash of the machine may leave a tree that crashes LMDB on reading.

    Such data is dropped, with a warning. A crash of the process alone loses nothing.
    """
    run_child(CRASHED_MACHINE, tmp_path)
    marker = directory(tmp_path) / "unsynced"
    backend = open_at(tmp_path, durability="none")
    assert get(backend, key(1)) == [b"never synced"]
    backend.close()
    assert not marker.exists(), "a clean close syncs"
    run_child(CRASHED_MACHINE, tmp_path)
    marker.write_text("00000000-0000-0000-0000-000000000000")
    with caplog.at_level(logging.WARNING, "tierkv_lmdb"):
        backend = open_at(tmp_path, durability="batch")
    assert str(directory(tmp_path)) in caplog.text
    assert get(backend, key(1)) == [None]
    assert put(backend, {key(1): b"again"}) == [None]
    backend.close()


def test_unsynced_data_of_this_boot_is_kept(tmp_path: Path) -> None:
    """Switching durability on must keep the existing data, and trust it from then on."""
    run_child(CRASHED_MACHINE, tmp_path)
    backend = open_at(tmp_path, durability="batch")
    assert not (directory(tmp_path) / "unsynced").exists()
    assert get(backend, key(1)) == [b"never synced"]
    backend.close()


@pytest.mark.parametrize("content", [b"\x00" * 8192, b"no database" * 1000, b"short"])
def test_garbage_instead_of_data(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """For any content of the data file, the namespace starts empty, says so, and counts it for `tierkv check`."""
    open_at(tmp_path).close()
    (directory(tmp_path) / "data.mdb").write_bytes(content)
    with caplog.at_level(logging.WARNING, "tierkv_lmdb"):
        backend = open_at(tmp_path)
    assert "the namespace starts empty" in caplog.text
    assert str(directory(tmp_path)) in caplog.text
    assert layout.read_losses(directory(tmp_path))[0] == 1
    assert put(backend, {key(1): b"frame"}) == [None]
    backend.close()


@pytest.mark.parametrize("content", ["[" * 100_000, "{}", '{"count": "many"}', "\udcff", "[1]"])
def test_damaged_count_of_losses_blocks_nothing(tmp_path: Path, content: str) -> None:
    """The count is a hint for `tierkv check`; a damaged one starts again."""
    open_at(tmp_path).close()
    (directory(tmp_path) / layout.LOSSES).write_text(content, errors="surrogateescape")
    (directory(tmp_path) / "data.mdb").write_bytes(b"garbage")
    open_at(tmp_path).close()
    assert layout.read_losses(directory(tmp_path))[0] == 1


READ_ALL = """
import sys, pathlib, lmdb_support
from tierkv.errors import BackendError
try:
    backend = lmdb_support.open_at(pathlib.Path(sys.argv[1]))
except BackendError as error:
    print("refused at open", error)
    raise SystemExit
good = 0
for number in range(64):
    (frame,) = lmdb_support.get(backend, lmdb_support.key(number))
    assert frame is None or isinstance(frame, (bytes, BackendError)), frame
    good += frame == bytes([number]) * 60000
    backend.contains([lmdb_support.key(number)])
print("good", good, *[type(r).__name__ for r in lmdb_support.put(backend, {lmdb_support.key(99): b"new"})])
backend.close()
"""


@pytest.mark.parametrize("kept", [0.9, 0.5, 0.1])
def test_truncated_data_is_no_crash(tmp_path: Path, kept: float) -> None:
    """Reading the map past the end of the file is a SIGBUS, which ends the engine: it must be misses or errors.

    An interrupted copy or a damaged file system can truncate a file.
    """
    backend = open_at(tmp_path)
    for number in range(64):
        assert put(backend, {key(number): bytes([number]) * 60000}) == [None]
    backend.close()
    data = directory(tmp_path) / "data.mdb"
    os.truncate(data, int(data.stat().st_size * kept))
    assert "good" in (output := run_child(READ_ALL, tmp_path)) or "refused at open" in output


FOREIGN_READER = """
import sys, time, lmdb
env = lmdb.open(sys.argv[1], max_dbs=2)
txn = env.begin() if sys.argv[2] == "reading" else None
print("ready", flush=True)
time.sleep(600)
"""


def test_readers_that_died_are_cleared(tmp_path: Path) -> None:
    """One dead reader stops LMDB from reusing any page until the map is full.

    The table of readers is reset only when no process has the environment open, and a monitoring tool may have.
    """
    open_at(tmp_path).close()
    where = directory(tmp_path)
    with killed_at_end(FOREIGN_READER, where, "idle"):
        with killed_at_end(FOREIGN_READER, where, "reading") as reader:
            pass
        with lmdb.open(str(where), max_dbs=2) as env:
            assert str(reader) in env.readers()
        open_at(tmp_path).close()
        with lmdb.open(str(where), max_dbs=2) as env:
            assert str(reader) not in env.readers()


def test_a_marker_that_stays_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault while the tier is closed once ended the close with an error of the system, and the directory locked."""
    backend = open_at(tmp_path, durability="none")
    put(backend, {key(1): b"stored"})

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "tierkv_lmdb"):
        patch.setattr(Path, "unlink", refuse)
        backend.close()
    assert "starts empty" in caplog.text
    backend = open_at(tmp_path)
    assert get(backend, key(1)) == [b"stored"]
    backend.close()
