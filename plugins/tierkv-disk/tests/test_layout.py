"""Ownership of the directory: who may use it, and the messages to those who may not."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disk_support import PAGE, OpenDisk, frames, num_descriptors

from tierkv.errors import BackendError, BackendUnavailableError, NamespaceMismatchError
from tierkv.testing.frames import make_frame, make_key
from tierkv_disk.directory import layout, locks
from tierkv_disk.log.index_log import IndexLog

HOLD = """
import sys, time
from pathlib import Path
from tierkv_disk.directory.locks import NamespaceLock
lock = NamespaceLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""

FORKS = HOLD.replace('print("held"', 'os.fork() or print("held"')
"""As above; a forked process waits, too."""


def test_the_lock_names_the_process_that_holds_it(open_disk: OpenDisk, directory: Path) -> None:
    """Two servers started on one path by mistake: the error of the second names the process of the first."""
    open_disk().close()
    (directory / locks.LOCK_NAME).write_text("12345678901234\n")
    program = f"import sys; sys.path[:0] = {sys.path!r}\n{HOLD}"
    command = [sys.executable, "-I", "-c", program, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(BackendUnavailableError, match=f"in use by process {other.pid}: stop it, or give"):
            open_disk()
        other.kill()
    open_disk().close()


def test_a_forked_process_keeps_no_directory(open_disk: OpenDisk, directory: Path) -> None:
    """An engine forks a helper and is killed: the next engine opens the tier while the helper lives."""
    open_disk().close()
    program = f"import os, sys; sys.path[:0] = {sys.path!r}\n{FORKS}"
    command = [sys.executable, "-I", "-c", program, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        other.kill()
        other.wait()
        open_disk().close()


def test_two_namespaces_share_a_path(open_disk: OpenDisk, place: Path) -> None:
    """Ranks and models of one machine share the disk; each has its own directory, lock and log."""
    one, two = open_disk(model="one"), open_disk(model="two")
    one.put({make_key(1): make_frame(make_key(1), 1, PAGE)})
    assert two.scan() == {}
    assert sorted(path.is_dir() for path in place.iterdir()) == [False, False, True, True]


def test_many_processes_claim_one_path_at_once(place: Path) -> None:
    """The ranks of a server start at the same time on a path that does not exist yet."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: layout.claim_directory(place), range(64)))
    assert [path.name for path in place.iterdir()] == [layout.MARKER_NAME]
    assert json.loads((place / layout.MARKER_NAME).read_text()) == {"program": "tierkv-disk", "format": 1}


def test_a_namespace_that_others_can_change_is_refused(open_disk: OpenDisk, place: Path, directory: Path) -> None:
    """A place that all users may enter, and one directory below it with wrong rights: they decide what is served."""
    open_disk().close()
    place.chmod(0o755)
    directory.chmod(0o777)
    with pytest.raises(BackendError, match=f"chmod o-w {directory}"):
        open_disk()
    directory.chmod(0o755)
    open_disk().close()


def test_a_new_file_system_is_not_foreign(open_disk: OpenDisk, place: Path) -> None:
    """`path` is often the mount point of a separate disk, where ext4 creates lost+found."""
    (place / "lost+found").mkdir(parents=True)
    open_disk().put({make_key(1): make_frame(make_key(1), 1, PAGE)})
    assert (place / "lost+found").is_dir()


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("{}", "another program"),
        ('{"program": "tierkv-lmdb", "format": 1}', "another program"),
        (
            '{"program": "tierkv-disk", "format": 99}',
            "format 99, written by a newer .* upgrade tierkv-disk",
        ),
    ],
)
def test_a_marker_that_is_not_ours(open_disk: OpenDisk, place: Path, marker: str, message: str) -> None:
    """A later format, or another program's file of that name, is refused and left unchanged."""
    place.mkdir()
    (place / layout.MARKER_NAME).write_text(marker)
    with pytest.raises(NamespaceMismatchError, match=message):
        open_disk()
    assert [path.name for path in place.iterdir()] == [layout.MARKER_NAME]
    assert (place / layout.MARKER_NAME).read_text() == marker


def test_foreign_files_are_named(open_disk: OpenDisk, place: Path) -> None:
    """The message names a file found there, so that the user recognises the directory."""
    place.mkdir()
    (place / "thesis.txt").write_text("the only copy")
    with pytest.raises(NamespaceMismatchError, match=rf"{place} holds 'thesis.txt' and no tierkv-disk.json"):
        open_disk()
    assert [path.name for path in place.iterdir()] == ["thesis.txt"]


def test_a_namespace_of_another_name_is_refused(open_disk: OpenDisk, place: Path, directory: Path) -> None:
    """A renamed or copied directory holds the bytes of another model."""
    with open_disk(model="other") as disk:
        disk.put({make_key(1): make_frame(make_key(1), 1, PAGE)})
    (other,) = (path for path in place.iterdir() if path.is_dir())
    other.rename(directory)
    with pytest.raises(NamespaceMismatchError, match="another namespace"):
        open_disk()


def test_segments_without_a_manifest_are_refused(open_disk: OpenDisk, directory: Path) -> None:
    """Without namespace.json and a log of this format the slot size is unknown; a wrong one reads across frames."""
    with open_disk() as disk:
        disk.put({make_key(1): make_frame(make_key(1), 1, PAGE)})
    before = (directory / "segment-00000.dat").read_bytes()
    (directory / layout.NAMESPACE_NAME).unlink()
    (directory / layout.LOG_NAME).unlink()
    with pytest.raises(NamespaceMismatchError, match="put that file back, or remove the directory"):
        open_disk()
    assert (directory / "segment-00000.dat").read_bytes() == before


def test_a_missing_manifest_is_written_anew(
    open_disk: OpenDisk, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory's name and its log say what it holds: a file that only describes it must not block a start."""
    with open_disk() as disk:
        disk.put({make_key(1): make_frame(make_key(1), 1, PAGE)})
    described = (directory / layout.NAMESPACE_NAME).read_text()
    (directory / layout.NAMESPACE_NAME).unlink()
    with open_disk() as disk:
        assert disk.get(make_key(1)) == make_frame(make_key(1), 1, PAGE)
    assert (directory / layout.NAMESPACE_NAME).read_text() == described
    assert caplog.text.count("it is written anew") == 1


def test_a_failed_close_leaves_the_lock_free(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A close that the disk fails must not keep the next start from the directory: no stored chunk is lost by it."""
    disk = open_disk()
    disk.put(frames(0))
    close = IndexLog.close

    def fail_at_the_end(log: IndexLog) -> None:
        close(log)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(IndexLog, "close", fail_at_the_end)
        with pytest.raises(OSError, match="Input/output"):
            disk.close()
    with open_disk() as again:
        assert again.read([make_key(0)]) == list(frames(0).values())


def test_a_failed_open_leaves_the_lock_free(open_disk: OpenDisk, directory: Path) -> None:
    """The user repairs the file that the message named and retries, in the same process."""
    open_disk().close()
    manifest = directory / layout.NAMESPACE_NAME
    good = manifest.read_text()
    manifest.write_text('{"program": "tierkv-disk", "format": 99}')
    for _ in range(3):
        with pytest.raises(NamespaceMismatchError, match="format 99"):
            open_disk()
    manifest.write_text(good)
    open_disk().close()


def test_descriptors_are_closed(open_disk: OpenDisk) -> None:
    """Repeated opens and closes, as in tests and reconfiguration, must not exhaust the process's descriptors."""
    before = num_descriptors()
    for _ in range(5):
        with open_disk() as disk:
            disk.put({make_key(1): make_frame(make_key(1), 1, PAGE)})
    assert num_descriptors() == before


def test_a_manifest_that_cannot_be_read_now_is_not_damaged(
    open_disk: OpenDisk, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without a free descriptor took it for damaged, and wrote its own in place of one of a newer format."""
    open_disk().close()
    manifest = directory / layout.NAMESPACE_NAME
    manifest.write_text(newer := '{"program": "tierkv-disk", "format": 99}')

    def without_descriptors(path: Path) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(layout, "read_text", without_descriptors)
        with pytest.raises(OSError, match="Too many open files"):
            open_disk()
    with pytest.raises(NamespaceMismatchError, match="format 99"):
        open_disk()
    assert manifest.read_text() == newer


def test_a_manifest_that_the_disk_does_not_read_is_called_so(
    open_disk: OpenDisk, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tools said of a disk with a bad sector that the directory, with all its chunks, should be removed."""
    open_disk().close()

    def on_a_bad_sector(path: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(layout, "read_text", on_a_bad_sector)
    with pytest.raises(layout.DamagedDocumentError) as error:
        layout.read_document(directory / layout.NAMESPACE_NAME)
    assert str(error.value).endswith("namespace.json cannot be read (Input/output error): check the disk")


@pytest.mark.parametrize(
    "damage", [b"damaged", b"\xff\xfe", b"[" * 100_000, b'{"program": "tierkv-disk", "format": 2}', b""]
)
def test_a_damaged_manifest_costs_nothing(open_disk: OpenDisk, directory: Path, damage: bytes) -> None:
    """One flipped bit in a description must not keep an engine from its cache: directory and log name the namespace."""
    with open_disk() as disk:
        disk.put(frames(0, 1))
    manifest = directory / layout.NAMESPACE_NAME
    good = manifest.read_bytes()
    manifest.write_bytes(damage)
    with open_disk() as disk:
        assert disk.read([make_key(0), make_key(1)]) == list(frames(0, 1).values())
    assert manifest.read_bytes() == good
    assert manifest.with_name("namespace.json.damaged").read_bytes() == damage


@pytest.mark.parametrize(
    "damage", ["not json", "[1]", "", '{"program": "tierkv-disk", "format": "1"}', '{"program": "tierkv-disk"}']
)
def test_a_damaged_marker_costs_nothing(
    open_disk: OpenDisk, place: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One flipped bit in the marker must not keep an engine from its cache; the log names what happened."""
    with open_disk() as disk:
        disk.put(frames(0, 1))
    marker = place / layout.MARKER_NAME
    good = marker.read_bytes()
    for _ in range(2):
        marker.write_text(damage)
        with open_disk() as disk:
            assert disk.read([make_key(0), make_key(1)]) == list(frames(0, 1).values())
        assert marker.read_bytes() == good
        assert marker.with_name("tierkv-disk.json.damaged").read_text() == damage
    assert "tierkv-disk.json is kept as tierkv-disk.json.damaged" in caplog.text


@pytest.mark.parametrize("word", [b"program", b"tierkv-disk", b"format"])
@pytest.mark.parametrize("name", ["tierkv-disk.json", "namespace.json"])
def test_a_flipped_bit_makes_no_file_of_another_program(
    open_disk: OpenDisk, place: Path, directory: Path, name: str, word: bytes
) -> None:
    """The file can be parsed, and names a program that does not exist: half of all single bits of a marker did that."""
    with open_disk() as disk:
        disk.put(frames(0, 1))
    document = (place if name == layout.MARKER_NAME else directory) / name
    good = document.read_bytes()
    at = good.index(word) + 2
    damaged = good[:at] + bytes([good[at] ^ 2]) + good[at + 1 :]
    document.write_bytes(damaged)
    with open_disk() as disk:
        assert disk.read([make_key(0), make_key(1)]) == list(frames(0, 1).values())
    assert document.read_bytes() == good
    assert document.with_name(f"{name}.damaged").read_bytes() == damaged


def test_a_lost_marker_is_written_anew(open_disk: OpenDisk, place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A namespace's manifest shows whose the directory is: a lost side file must not keep an engine from starting."""
    with open_disk() as disk:
        disk.put(frames(0, 1))
    marker = place / layout.MARKER_NAME
    good = marker.read_bytes()
    marker.unlink()
    with open_disk() as disk:
        assert disk.read([make_key(0), make_key(1)]) == list(frames(0, 1).values())
    assert marker.read_bytes() == good
    assert caplog.text.count("has no tierkv-disk.json: it is written anew") == 1


@pytest.mark.parametrize("beside", ["thesis.txt", "namespace.json of another program"])
def test_a_lost_marker_without_proof_is_refused(open_disk: OpenDisk, place: Path, directory: Path, beside: str) -> None:
    """A name of 32 digits makes no directory ours, and a manifest of ours none with other files."""
    with open_disk() as disk:
        disk.put(frames(0, 1))
    (place / layout.MARKER_NAME).unlink()
    if beside == "thesis.txt":
        (place / beside).write_text("the only copy")
    else:
        (directory / layout.NAMESPACE_NAME).write_text('{"format": "tierkv-lmdb", "version": 1}')
    with pytest.raises(NamespaceMismatchError, match=r"no tierkv-disk\.json"):
        open_disk()
    assert not (place / layout.MARKER_NAME).exists()


def test_a_damaged_marker_beside_foreign_files_is_refused(open_disk: OpenDisk, place: Path) -> None:
    """A file that only has the name of our marker makes no directory ours."""
    place.mkdir()
    (place / layout.MARKER_NAME).write_text("not json")
    (place / "thesis.txt").write_text("the only copy")
    with pytest.raises(NamespaceMismatchError, match="damaged"):
        open_disk()
    assert sorted(path.name for path in place.iterdir()) == ["thesis.txt", layout.MARKER_NAME]


@pytest.mark.parametrize("log", ["lost", "damaged", "of a format to come"])
def test_a_damaged_manifest_and_a_damaged_log(open_disk: OpenDisk, directory: Path, log: str) -> None:
    """With neither description nor log the frames name their namespace themselves, and are found by a search."""
    with open_disk() as disk:
        disk.put(frames(0, 1))
    (directory / layout.NAMESPACE_NAME).write_bytes(b"damaged")
    if log == "lost":
        (directory / "index.log").unlink()
    else:
        with (directory / "index.log").open("r+b") as file:
            file.write(b"\0" * 4096 if log == "damaged" else b"tierkvdl\x09")
    with open_disk() as disk:
        found = disk.scan()
        assert found.keys() <= {make_key(0), make_key(1)}
        disk.put(frames(2))
        assert disk.read([make_key(2)]) == list(frames(2).values())
        for key, frame in zip(found, disk.read(list(found)), strict=True):
            assert frame == frames(0, 1)[key]


@pytest.mark.parametrize("kind", ["pipe", "link", "long"])
def test_an_odd_manifest_neither_hangs_nor_fills_the_memory(open_disk: OpenDisk, directory: Path, kind: str) -> None:
    """A pipe would never answer, and a link to a device would never end."""
    open_disk().close()
    manifest = directory / layout.NAMESPACE_NAME
    manifest.unlink()
    if kind == "pipe":
        os.mkfifo(manifest)
    elif kind == "link":
        manifest.symlink_to("/dev/zero")
    else:
        manifest.write_bytes(b" " * (8 << 20))
    open_disk().close()
    assert json.loads(manifest.read_text())["program"] == "tierkv-disk"
