"""A directory that is removed or replaced under a running tier: noticed, reported, and used again once back."""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_support import PAGE, OpenDisk, frames

import tierkv_disk
from tierkv.errors import BackendUnavailableError
from tierkv.testing.conformance.session import Session
from tierkv.testing.engines.hand_engine import Prompt
from tierkv.testing.engines.small_stack import COOLDOWN_S, TESTED, SmallStack
from tierkv.testing.frames import make_frame, make_key
from tierkv_disk import DiskOptions
from tierkv_disk.directory import watch

WAIT_S = 30.0


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; fail after ``WAIT_S``."""
    give_up_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up_s, what
        time.sleep(0.02)


def is_refused(disk: Session, number: int) -> bool:
    """Write a frame. Returns whether it was refused because of the directory."""
    (result,) = disk.write(frames(number))
    assert result is None or isinstance(result, BackendUnavailableError), result
    return result is not None and "was removed or replaced while it was in use: put it back" in str(result)


def test_a_directory_without_access_is_not_called_removed(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a wrong `chmod`, an operator who reads that the directory was removed would look for it elsewhere.

    It is used again by the next call: one error of the file system once cost all writes of a second.
    """
    disk = open_disk()
    disk.put(frames(0))

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    def answer() -> str:
        return str(disk.write(frames(1))[0])

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "tierkv_disk"):
        patch.setattr(watch.os, "lstat", refuse)
        until(lambda: "cannot be reached while it is in use (Permission denied)" in answer(), "no reason is given")
    assert "removed" not in caplog.text
    assert answer() == "None"
    disk.close()


@pytest.mark.parametrize("what", ["namespace", "path"])
def test_a_directory_that_comes_back(
    open_disk: OpenDisk, place: Path, directory: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A file system that was unmounted for a while, or a directory renamed by mistake, costs no restart."""
    moved = directory if what == "namespace" else place
    disk = open_disk()
    disk.put(frames(0))
    with caplog.at_level(logging.WARNING, "tierkv_disk"):
        moved.rename(moved.with_name("elsewhere"))
        until(lambda: is_refused(disk, 1), "the tier stores in a directory that is gone")
        assert isinstance(disk.delete([make_key(0)])[0], BackendUnavailableError)
        assert disk.get(make_key(0)) == frames(0)[make_key(0)], "open files are read all the same"
        moved.with_name("elsewhere").rename(moved)
        until(lambda: not is_refused(disk, 2), "the tier does not store again")
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2, messages
    assert "nothing more is stored" in messages[0]
    assert "is in its place again" in messages[1]
    disk.close()
    with open_disk() as again:
        assert again.scan().keys() >= {make_key(0), make_key(2)}


def test_a_lock_file_that_was_removed_is_made_again(
    open_disk: OpenDisk, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Users remove lock files that look left over. No other process has the directory then, so the tier goes on."""
    monkeypatch.setattr(watch, "CHECK_S", 0.0)
    disk = open_disk()
    disk.put(frames(0))
    with caplog.at_level(logging.WARNING, "tierkv_disk"):
        for number in (1, 2):
            (directory / "lock").unlink()
            disk.put(frames(number))
            assert disk.get(make_key(0)) == frames(0)[make_key(0)]
            with pytest.raises(BackendUnavailableError, match="is in use by this process"):
                open_disk()
    assert len(caplog.records) == 4
    assert "is in its place again" in caplog.records[-1].message
    disk.close()
    with open_disk() as again:
        assert again.scan().keys() == {make_key(0), make_key(1), make_key(2)}


def test_a_lock_file_in_place_of_one_that_was_removed_is_named(open_disk: OpenDisk, directory: Path) -> None:
    """Another process may have opened the directory meanwhile. It is in its place, and so is what it holds."""
    disk = open_disk()
    disk.put(frames(0))
    (directory / "lock").unlink()
    (directory / "lock").touch()
    until(lambda: disk.write(frames(1))[0] is not None, "the tier stores in a directory that another process may own")
    refusal = str(disk.write(frames(1))[0])
    assert f"{directory / 'lock'} was removed or replaced while it was in use" in refusal
    assert "starts empty" not in refusal
    disk.close()
    with open_disk() as again:
        assert again.scan().keys() >= {make_key(0)}


def test_removed_segment_files_are_reported(
    open_disk: OpenDisk, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A user who removes them to free room frees none, and the tier would go on as if nothing had happened."""
    monkeypatch.setattr(watch, "CHECK_S", 0.0)
    disk = open_disk()
    disk.put(frames(0))
    with caplog.at_level(logging.WARNING, "tierkv_disk"):
        assert disk.get(make_key(0)) == frames(0)[make_key(0)]
        assert not caplog.records
        (directory / "segment-00000.dat").unlink()
        for _ in range(3):
            assert disk.get(make_key(0)) == frames(0)[make_key(0)], "open files are read all the same"
    (message,) = [record.message for record in caplog.records]
    assert f"1 segment files in {directory} were removed while they were in use" in message
    disk.close()
    with open_disk() as again:
        assert again.scan() == {}


@pytest.mark.parametrize("what", ["path", "made again", "contents", "namespace", "files"])
def test_a_directory_that_was_removed_is_begun_again(
    open_disk: OpenDisk,
    place: Path,
    directory: Path,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An operator who frees the room of a tier must not end its writes until the engine is started again.

    The place can be opened again as well: the tier once left a lock file there, which looked like another program's.
    """
    monkeypatch.setattr(watch, "CHECK_S", 0.0)
    disk = open_disk(capacity_bytes=8 << 20)
    disk.put(frames(0))
    if what == "files":
        for path in [path for path in place.rglob("*") if path.is_file()]:
            path.unlink()
    elif what == "contents":
        shutil.rmtree(directory)
        for path in place.iterdir():
            path.unlink()
    else:
        shutil.rmtree(directory if what == "namespace" else place)
        if what == "made again":
            place.mkdir(0o700)
    with caplog.at_level(logging.WARNING, "tierkv_disk"):
        until(lambda: disk.write(frames(1)) == [None], "the tier does not store again")
    assert caplog.text.count("was begun again, empty") == 1
    assert disk.read([make_key(0), make_key(1)]) == [None, frames(1)[make_key(1)]]
    with pytest.raises(BackendUnavailableError, match="in use by this process"):
        open_disk()
    disk.close()
    with open_disk(capacity_bytes=8 << 20) as again:
        assert again.scan().keys() == {make_key(1)}


def test_a_tier_that_ends_meanwhile_is_not_begun_again(
    open_disk: OpenDisk, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write may look at the directory just when another thread has closed its lock file."""
    monkeypatch.setattr(watch, "CHECK_S", 0.0)
    disk = open_disk(capacity_bytes=8 << 20)
    disk.put(frames(0))
    shutil.rmtree(place)
    disk.close()
    assert not disk.backend.current.is_removed()  # type: ignore[union-attr]
    assert not place.exists()


def test_no_file_is_left_in_a_directory_that_was_removed(
    open_disk: OpenDisk, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tier that grows before it notices the removal once left its lock in the new, empty directory."""
    monkeypatch.setattr(watch, "CHECK_S", 3600.0)
    disk = open_disk(capacity_bytes=8 << 20, frame_bytes_max=1 << 20)
    disk.put(frames(0, size=1 << 20))
    shutil.rmtree(place)
    place.mkdir(0o700)
    (result,) = disk.write(frames(1, size=1 << 20))
    assert isinstance(result, BackendUnavailableError)
    assert list(place.iterdir()) == []


def test_a_full_tier_in_its_place_is_written(open_disk: OpenDisk, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another drive was mounted, full of chunks that the framework had not listed. It evicted none of them, so nothing
    was written until a restart."""
    monkeypatch.setattr(watch, "CHECK_S", 0.0)
    other = open_disk(path=str(place.with_name("other")))
    numbers = iter(range(10_000))
    while other.write(frames(next(numbers)))[0] is None:
        pass
    stored = list(other.scan())
    other.close()
    disk = open_disk()
    disk.put(frames(20_000))
    monkeypatch.setattr(disk.backend, "_open", other.backend._open)  # as if that file system were mounted here
    shutil.rmtree(place)
    until(lambda: disk.write(frames(20_001))[0] is None, "the tier does not store again")
    again = stored[-1]
    disk.put({again: make_frame(again, 2, PAGE)})
    disk.put(frames(*range(20_002, 20_030)))
    found = disk.scan()
    assert {*frames(*range(20_001, 20_030)), again} <= found.keys()
    assert stored[-2] in found, "no more than needed are deleted, oldest first"
    assert stored[0] not in found
    for number in range(30_000, 30_000 + len(stored) - 30):
        disk.put(frames(number))
    assert again in disk.scan(), "a chunk that was written again is listed"
    assert not disk.scan().keys() & {*stored[:-1]}


def test_another_directory_in_its_place_is_left_alone(open_disk: OpenDisk, place: Path, directory: Path) -> None:
    """Files that a user restored, or another process made there, are neither written nor removed."""
    disk = open_disk()
    disk.put(frames(0))
    shutil.rmtree(place)
    directory.mkdir(parents=True)
    (directory / "lock").write_bytes(b"")
    until(lambda: is_refused(disk, 1), "the tier stores in a directory that is gone")
    disk.close()
    assert [path.name for path in directory.iterdir()] == ["lock"]
    assert (directory / "lock").read_bytes() == b""


def test_the_stack_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Health says that the tier cannot be written, and a tier that is attached in its place starts empty."""
    monkeypatch.setattr(watch, "CHECK_S", 0.0)

    def options(path: Path) -> DiskOptions:
        return DiskOptions(str(path), min_free_bytes=0, segment_bytes=1 << 20)

    tier = {"breaker_failures": 2}
    with SmallStack(tierkv_disk.PLUGIN, options, place, capacity_bytes=8 << 20, tier=tier) as stack:
        stack.store_all(Prompt(0, 4))
        assert stack.stack.tiers.health()[TESTED].writable
        place.rename(place.with_name("elsewhere"))
        for number in range(1, 6):
            stack.store(Prompt(number, 4))
            stack.settle()
        assert not stack.stack.tiers.health()[TESTED].writable
        place.with_name("elsewhere").rename(place)
        for number in range(6, 12):
            stack.pass_time(10 * COOLDOWN_S)
            stack.store(Prompt(number, 4))
            stack.settle()
        assert stack.stack.tiers.health()[TESTED].writable
