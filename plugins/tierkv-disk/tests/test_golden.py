"""Golden directories of earlier versions, and of this one, byte for byte.

``golden/directory-vN`` is the result of :func:`write_history` under format N, without locks and without the
unused space at the ends of files.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from disk_support import PAGE, OpenDisk, read_log

from tierkv.errors import NamespaceMismatchError
from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import make_frame, make_key
from tierkv_disk import DiskBackend

GOLDEN = Path(__file__).parent / "golden"
NEWEST = GOLDEN / "directory-v2"
HELD = {number: make_frame(make_key(number), version, 2 * PAGE) for number, version in ((2, 1), (3, 1), (0, 2))}


def write_history(disk: Session) -> None:
    """Puts of both lengths, a delete whose pages are reused, an overwrite."""
    for number, size in ((0, 2 * PAGE), (1, PAGE), (2, 2 * PAGE)):
        disk.put({make_key(number): make_frame(make_key(number), 1, size)})
    disk.forget([make_key(1)])
    disk.put({make_key(3): make_frame(make_key(3), 1, 2 * PAGE)})
    disk.put({make_key(0): make_frame(make_key(0), 2, 2 * PAGE)})


@pytest.mark.parametrize("version", [1, 2])
def test_a_directory_of_that_version_is_read(open_disk: OpenDisk, place: Path, directory: Path, version: int) -> None:
    """Every later release reads and continues directories of earlier ones, so an upgrade loses nothing."""
    shutil.copytree(GOLDEN / f"directory-v{version}", place)
    expected = {make_key(number): frame for number, frame in HELD.items()}
    for _ in range(2):
        with open_disk(frame_bytes_max=2 * PAGE) as disk:
            assert isinstance(disk.backend, DiskBackend)
            assert disk.backend.recovery.lossless
            assert disk.scan() == {key: len(frame) for key, frame in expected.items()}
            assert disk.read(list(expected)) == list(expected.values())
            late = make_frame(make_key(9), 1, PAGE)
            disk.put({make_key(9): late})
            expected[make_key(9)] = late
            disk.forget([make_key(3)])
            expected.pop(make_key(3), None)
    assert json.loads((directory / "namespace.json").read_text())["format"] == 2


def test_an_interrupted_upgrade_continues(open_disk: OpenDisk, place: Path, directory: Path) -> None:
    """A kill between the new log and the new namespace.json: the log's own version decides how it is read."""
    shutil.copytree(GOLDEN / "directory-v1", place)
    old_manifest = (directory / "namespace.json").read_bytes()
    open_disk(frame_bytes_max=2 * PAGE).close()
    (directory / "namespace.json").write_bytes(old_manifest)
    with open_disk(frame_bytes_max=2 * PAGE) as disk:
        assert disk.read([make_key(number) for number in HELD]) == list(HELD.values())


def test_the_bytes_that_are_written_do_not_change(open_disk: OpenDisk, place: Path) -> None:
    """A fixed history gives fixed files. A change of them is a new format version, with a new directory here."""
    with open_disk(frame_bytes_max=2 * PAGE) as disk:
        write_history(disk)
    golden = {path.relative_to(NEWEST): path.read_bytes() for path in NEWEST.rglob("*") if path.is_file()}
    for name, expected in golden.items():
        written = (place / name).read_bytes()
        assert written[: len(expected)] == expected, f"{name} differs"
        assert not any(written[len(expected) :]), f"{name} goes on after its end"
    extra = {path.relative_to(place) for path in place.rglob("*") if path.is_file()} - golden.keys()
    assert {path.name for path in extra} == {"lock", "directory.lock"}


def test_the_golden_log_matches_the_documentation() -> None:
    """Read by the rules of docs/format.md, without the code under test."""
    (log,) = NEWEST.rglob("index.log")
    records = [(line.kind, line.key, line.part, line.page, line.frame_bytes) for line in read_log(log)]
    assert records == [
        (1, make_key(0), 0, 0, 2 * PAGE),
        (1, make_key(1), 0, 2, PAGE),
        (1, make_key(2), 0, 3, 2 * PAGE),
        (2, make_key(1), 0, 0, 0),
        (1, make_key(3), 0, 5, 2 * PAGE),
        (1, make_key(0), 0, 7, 2 * PAGE),
    ]


@pytest.mark.parametrize("name", ["tierkv-disk.json", "namespace.json"])
def test_a_newer_version_is_refused(open_disk: OpenDisk, place: Path, name: str) -> None:
    """After a downgrade: the error names file and remedy, and nothing is changed."""
    shutil.copytree(NEWEST, place)
    (path,) = place.rglob(name)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 3}))
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and "lock" not in path.name}
    with pytest.raises(NamespaceMismatchError, match=r"format 3, written by a newer tierkv-disk.*upgrade tierkv-disk"):
        open_disk(frame_bytes_max=2 * PAGE)
    for path, content in before.items():
        assert path.read_bytes() == content
