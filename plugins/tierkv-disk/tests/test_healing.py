"""A device that fails for a while: reads go on, and the first writes after the cause succeed without reopening."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import pytest
from disk_support import PAGE, OpenDisk, frames, num_descriptors, read_log, run_alone

import tierkv_disk
from tierkv.errors import BackendError, OutOfSpaceError
from tierkv.testing.conformance.session import Session
from tierkv.testing.engines.hand_engine import Prompt
from tierkv.testing.engines.small_stack import COOLDOWN_S, TESTED, SmallStack
from tierkv.testing.frames import make_key
from tierkv_disk import DiskOptions

WAIT_S = 30.0
CALLS = ("pwrite", "fdatasync")
ERRORS = (errno.EIO, errno.EROFS, errno.ENOSPC)


def fail_on(patch: pytest.MonkeyPatch, call: str, number: int, *names: str) -> None:
    """Let one system call fail with this errno on files whose names begin like one of ``names``."""
    original: Callable[..., object] = getattr(os, call)

    def fail(fd: int, *arguments: object) -> object:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name  # noqa: PTH115 - a descriptor is no path
        if name.startswith(names):
            raise OSError(number, os.strerror(number))
        return original(fd, *arguments)

    patch.setattr(os, call, fail)


def refuse_new_files(patch: pytest.MonkeyPatch, number: int) -> None:
    """Let the creation of files fail with this errno, as on a file system that turned read-only."""
    original = os.open

    def fail(path: object, flags: int, *arguments: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number))
        return original(path, flags, *arguments)  # type: ignore[arg-type]

    patch.setattr(os, "open", fail)


def write_until_stored(disk: Session, number: int) -> None:
    """Repeat a write while the tier pauses; fail after ``WAIT_S``."""
    give_up_s = time.monotonic() + WAIT_S
    while disk.write(frames(number)) != [None]:
        assert time.monotonic() < give_up_s, "the tier does not write again"
        time.sleep(0.02)


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("call", CALLS)
def test_writes_resume_when_the_cause_has_ended(
    open_disk: OpenDisk, directory: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """One failure of the log must not end the writes of a tier for the life of the engine."""
    disk = open_disk()
    disk.put(frames(0, 1))
    for _ in range(3):
        with monkeypatch.context() as patch:
            fail_on(patch, call, number, "index.log")
            refuse_new_files(patch, number)
            for attempt in range(5):
                (failed,) = disk.write(frames(2 + attempt))
                assert isinstance(failed, BackendError)
            assert disk.get(make_key(0)) == frames(0)[make_key(0)]
        write_until_stored(disk, 50)
        assert disk.delete([make_key(1)]) == [None]
        disk.put(frames(1))
    disk.close()
    with open_disk() as again:
        assert again.backend.recovery.lossless  # type: ignore[union-attr]
        assert again.scan().keys() == {make_key(0), make_key(1), make_key(50)}


def test_a_failed_force_is_followed_by_a_new_log(
    open_disk: OpenDisk, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record whose force failed may be on the device: no later log holds it, and nothing is appended to it."""
    disk = open_disk()
    disk.put(frames(0))
    with monkeypatch.context() as patch:
        fail_on(patch, "fdatasync", errno.EIO, "index.log")
        assert disk.write(frames(1)) != [None]
    file_before = (directory / "index.log").stat().st_ino
    assert make_key(1) in {line.key for line in read_log(directory / "index.log")}
    write_until_stored(disk, 2)
    assert (directory / "index.log").stat().st_ino != file_before
    assert {line.key for line in read_log(directory / "index.log")} == {make_key(0), make_key(2)}


def test_pauses_between_attempts_grow(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A tier that cannot write costs the device few attempts and the log one line, until it writes again."""
    disk = open_disk()
    disk.put(frames(0))
    now_s, attempts = [0.0], []
    commits = disk.backend.current._commits  # type: ignore[union-attr]
    commits._rewriter._clock = lambda: now_s[0]

    def refuse() -> NoReturn:
        attempts.append(now_s[0])
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    create, commits._rewriter._create = commits._rewriter._create, refuse
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "tierkv_disk"):
        fail_on(patch, "fdatasync", errno.EIO, "index.log")
        for _ in range(2000):
            assert disk.write(frames(1)) != [None]
            now_s[0] += 0.01
    gaps = [later - earlier for earlier, later in pairwise(attempts)]
    assert 8 <= len(attempts) <= 20, attempts
    assert gaps == pytest.approx(sorted(gaps), abs=0.02)
    assert max(gaps) < 2.1
    commits._rewriter._create = create
    now_s[0] += 2.1
    with caplog.at_level(logging.WARNING, "tierkv_disk"):
        disk.put(frames(1))
        disk.put(frames(2))
    lines = [record.message for record in caplog.records if "index log" in record.message]
    assert len(lines) == 2, lines
    assert "cannot be rewritten" in lines[0]
    assert "takes records again" in lines[1]
    now_s[0] += 2.1
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "tierkv_disk"):
        fail_on(patch, "fdatasync", errno.EIO, "index.log")
        assert disk.write(frames(3)) != [None]
    disk.put(frames(3))
    (line,) = [record.message for record in caplog.records if "index log" in record.message][2:]
    assert "could not be forced" in line, "a log that is mended at once is one line"
    assert "takes records again" in line


def test_a_failed_sync_of_frames_concerns_all_that_it_covered(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports lost bytes to one caller only; the other caller's sync succeeds, and must not be believed."""
    disk = open_disk()
    disk.put(frames(0))
    segments = disk.backend.current._segments  # type: ignore[union-attr]
    original, written, go_on = segments.write_frame, threading.Event(), threading.Event()

    def pause_after_writing(runs: object, frame: memoryview) -> None:
        original(runs, frame)
        if not written.is_set():  # the other caller, which is first
            written.set()
            assert go_on.wait(WAIT_S)

    monkeypatch.setattr(segments, "write_frame", pause_after_writing)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(disk.write, frames(1))
        assert written.wait(WAIT_S)
        with monkeypatch.context() as patch:
            fail_on(patch, "fdatasync", errno.EIO, "segment-")
            assert disk.write(frames(2)) != [None]
        go_on.set()
        (result,) = other.result(WAIT_S)
    assert isinstance(result, BackendError)
    assert "another sync failed" in str(result)
    assert disk.scan() == {make_key(0): PAGE}
    disk.put(frames(1, 2))


def test_a_read_only_file_system_condemns_no_page(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that says nothing about the place of a frame keeps its pages in service."""
    disk = open_disk(capacity_bytes=4 * PAGE)
    disk.put(frames(0))
    for number in (errno.EROFS, errno.ENOSPC):
        with monkeypatch.context() as patch:
            fail_on(patch, "pwrite", number, "segment-")
            (failed,) = disk.write(frames(1))
        assert isinstance(failed, OutOfSpaceError) == (number == errno.ENOSPC)
    assert not len(disk.backend.current._quarantine)  # type: ignore[union-attr]
    disk.put(frames(1, 2, 3))


def fail_closes(patch: pytest.MonkeyPatch, name: str) -> None:
    """Let a close report an earlier failure, as a network file system does. The descriptor is closed all the same."""
    close = os.close

    def close_and_fail(fd: int) -> None:
        is_meant = Path(os.readlink(f"/proc/self/fd/{fd}")).name.startswith(name)  # noqa: PTH115 - a descriptor is no path
        close(fd)
        if is_meant:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    patch.setattr(os, "close", close_and_fail)


@pytest.mark.parametrize("name", ["segment", "index", "lock"])
def test_a_close_that_fails_keeps_no_lock(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A file system that reports a failed write at the close of a file kept the tier locked until the engine ended."""
    disk = open_disk(capacity_bytes=4 << 20)
    disk.put(frames(*range(600)))
    descriptors = num_descriptors()
    with monkeypatch.context() as patch:
        fail_closes(patch, name)
        with contextlib.suppress(OSError):
            disk.close()
    assert num_descriptors() < descriptors - 3, "segments, log and lock"
    with open_disk(capacity_bytes=4 << 20) as again:
        assert len(again.scan()) == 600


@pytest.mark.parametrize("call", ["ftruncate", "pwrite", "utime"])
def test_a_failure_beside_the_lock_keeps_no_lock(
    open_disk: OpenDisk, directory: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The pid and the time of use are hints: a fault there once kept the directory locked until the engine ended."""
    open_disk().close()
    with monkeypatch.context() as patch:
        fail_on(patch, call, errno.EIO, "lock")
        with open_disk() as disk:
            disk.put(frames(0))
    with open_disk() as again:
        assert again.scan().keys() == {make_key(0)}


def test_a_limit_of_file_sizes_costs_no_stored_chunk(place: Path) -> None:
    """A process that lowers its limit for a while: no eviction makes room, so none is tried, and health says it.

    Taken for a full disk, the limit once emptied the tier, while health said that it can be written.
    """

    def options(path: Path) -> DiskOptions:
        return DiskOptions(str(path), min_free_bytes=0, segment_bytes=1 << 20)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    tier = {"breaker_failures": 2}
    with SmallStack(tierkv_disk.PLUGIN, options, place, capacity_bytes=8 << 20, tier=tier) as stack:
        stored = [Prompt(number, 4) for number in range(4)]
        stack.store_all(*stored)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE, before[1]))
        try:
            for number in range(10, 20):
                stack.store(Prompt(number, 4))
                stack.settle()
            stack.until_usable()
            assert not stack.stack.tiers.health()[TESTED].writable
            assert [stack.load_cold(prompt) for prompt in stored] == [4] * 4
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        for number in range(20, 26):
            stack.pass_time(10 * COOLDOWN_S)
            stack.store(Prompt(number, 4))
            stack.settle()
        assert stack.stack.tiers.health()[TESTED].writable
        assert [stack.load_cold(prompt) for prompt in [*stored, Prompt(25, 4)]] == [4] * 5


WITHOUT_DESCRIPTORS = """
import logging, resource
from pathlib import Path
import tierkv_disk
from tierkv.abc import BackendContext
from tierkv.errors import OutOfSpaceError
from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import make_key
from disk_support import PAGE, frames, make_namespace
logging.basicConfig(stream=sys.stdout)
context = BackendContext("disk", make_namespace(), PAGE, 4 << 20)
options = tierkv_disk.DiskOptions(sys.argv[1], min_free_bytes=0, segment_bytes=1 << 20)
with Session(tierkv_disk.PLUGIN, context, options) as disk:
    disk.put(frames(0))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    number = 1
    while (result := disk.write(frames(number))[0]) is None:
        number += 1
    assert isinstance(result, OutOfSpaceError), result
    assert "no file can be added" in str(result)
    disk.delete([make_key(0)])
    assert disk.write(frames(number)) == [None]
    assert disk.read([make_key(number)]) == list(frames(number).values())
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert disk.write(frames(number + 1)) == [None], "the tier grows again at once"
"""


def test_without_descriptors_it_keeps_its_size(place: Path) -> None:
    """A program that runs out of descriptors needs none for the open files: new chunks replace old ones in them.

    The tier once failed each write, and left service, though it could be read.
    """
    printed = run_alone(WITHOUT_DESCRIPTORS, place)
    assert "cannot grow beyond" in printed
    assert "Too many open files" in printed
