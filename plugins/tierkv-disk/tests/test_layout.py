"""Ownership of the directory: who may use it, and the messages to those who may not."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disk_support import PAGE, OpenDisk

from tierkv.errors import BackendUnavailableError, NamespaceMismatchError
from tierkv.testing.frames import make_frame, make_key
from tierkv_disk.directory import layout, locks

HOLD = """
import sys, time
from pathlib import Path
from tierkv_disk.directory.locks import NamespaceLock
lock = NamespaceLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


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


def test_a_new_file_system_is_not_foreign(open_disk: OpenDisk, place: Path) -> None:
    """`path` is often the mount point of a separate disk, where ext4 creates lost+found."""
    (place / "lost+found").mkdir(parents=True)
    open_disk().put({make_key(1): make_frame(make_key(1), 1, PAGE)})
    assert (place / "lost+found").is_dir()


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("{}", "another program"),
        ("not json", "damaged"),
        ("[1]", "damaged"),
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
    """Without namespace.json the slot size is unknown; a wrong one would read across frames."""
    with open_disk() as disk:
        disk.put({make_key(1): make_frame(make_key(1), 1, PAGE)})
    before = (directory / "segment-00000.dat").read_bytes()
    (directory / layout.NAMESPACE_NAME).unlink()
    with pytest.raises(NamespaceMismatchError, match="put that file back, or remove the directory"):
        open_disk()
    assert (directory / "segment-00000.dat").read_bytes() == before


def test_a_failed_open_leaves_the_lock_free(open_disk: OpenDisk, directory: Path) -> None:
    """The user repairs the file that the message named and retries, in the same process."""
    open_disk().close()
    manifest = directory / layout.NAMESPACE_NAME
    good = manifest.read_text()
    manifest.write_text("damaged")
    for _ in range(3):
        with pytest.raises(NamespaceMismatchError, match="damaged"):
            open_disk()
    manifest.write_text(good)
    open_disk().close()


def test_descriptors_are_closed(open_disk: OpenDisk) -> None:
    """Repeated opens and closes, as in tests and reconfiguration, must not exhaust the process's descriptors."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        with open_disk() as disk:
            disk.put({make_key(1): make_frame(make_key(1), 1, PAGE)})
    assert len(list(Path("/proc/self/fd").iterdir())) == before
