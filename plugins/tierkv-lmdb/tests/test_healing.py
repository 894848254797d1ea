"""Failures that end an environment of LMDB: the tier opens it afresh, and the first writes after the cause succeed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import lmdb
import pytest
from lmdb_support import FRAME, MIB, WAIT_S, context, directory, get, key, open_at, put, put_once, write_until_stored

from tierkv.abc import ReadRequest
from tierkv.errors import BackendError, BackendUnavailableError, TierKVError
from tierkv_lmdb import frame_reads
from tierkv_lmdb.environments import keeper
from tierkv_lmdb.environments.environment import Environment


def fail_next_meta_page(place: Path) -> None:
    """Let LMDB's next write of a meta page fail: its descriptor for those gets one that may not write.

    With durability "always", LMDB writes meta pages through a descriptor of their own, opened with O_DSYNC.
    """
    data = directory(place) / "data.mdb"
    read_only = os.open(data, os.O_RDONLY)
    for name in Path("/proc/self/fd").iterdir():
        fd = int(name.name)
        try:
            is_data = os.path.samestat(os.fstat(fd), data.stat())
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        except OSError:
            continue
        if is_data and flags & os.O_DSYNC:
            os.dup2(read_only, fd)
            break
    else:
        raise AssertionError("LMDB has no descriptor for meta pages")
    os.close(read_only)


def delete_once(backend: Any, number: int) -> None:
    """Delete one frame, if that is possible at present."""
    with contextlib.suppress(BackendError):
        backend.delete([key(number)])


def test_failed_meta_page_costs_one_write(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LMDB refuses every later call, reads as well (MDB_PANIC). The tier must not end with its first I/O error."""
    backend = open_at(tmp_path, durability="always")
    assert put(backend, {key(1): FRAME}) == [None]
    with caplog.at_level(logging.WARNING, "tierkv_lmdb"):
        fail_next_meta_page(tmp_path)
        (failed,) = put(backend, {key(2): FRAME})
        assert isinstance(failed, BackendError)
        assert get(backend, key(1), key(2)) == [FRAME, None]
        assert put(backend, {key(2): FRAME, key(3): FRAME}) == [None, None]
    (line,) = [record.message for record in caplog.records]
    assert "in service again, opened afresh: a meta page could not be written" in line
    assert "MDB_PANIC" in line
    backend.close()
    backend = open_at(tmp_path)
    assert get(backend, key(1), key(2), key(3)) == [FRAME] * 3
    assert len(list(backend.scan())) == 3
    backend.close()


def test_a_call_whose_environment_was_replaced_is_tried_again(tmp_path: Path) -> None:
    """It got the environment a moment before another call closed that one; its chunk is whole, and was a miss."""
    backend = open_at(tmp_path, durability="always")
    put(backend, {key(1): FRAME})
    replaced = backend._env
    fail_next_meta_page(tmp_path)
    assert put(backend, {key(2): FRAME}) != [None]
    write_until_stored(backend, 2)
    buffer = memoryview(bytearray(len(FRAME)))
    (result,) = frame_reads.read(replaced, backend._failures, [ReadRequest(key(1), buffer)])
    assert isinstance(result, BackendUnavailableError)
    assert result.retryable
    assert get(backend, key(1)) == [FRAME]
    backend.close()


def test_failures_in_a_row_are_answered_with_pauses(tmp_path: Path) -> None:
    """Each failure costs a reopening; a disk that always fails must not cost one per call."""
    backend = open_at(tmp_path, durability="always")
    for number in range(4):
        fail_next_meta_page(tmp_path)
        assert put(backend, {key(number): FRAME}) != [None]
        write_until_stored(backend, 10 + number)
    environments = backend._environments
    assert environments.restarts == 4
    assert environments._pause_s == 4 * keeper.PAUSE_MIN_S
    assert get(backend, *[key(10 + number) for number in range(4)]) == [FRAME] * 4
    backend.close()


def test_pauses_between_attempts_grow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While the directory cannot be opened, the tier makes few attempts, and logs the first refusal with the cause."""
    backend = open_at(tmp_path, durability="always")
    put(backend, {key(1): FRAME})
    environments = backend._environments
    now_s, attempts = [environments._clock() + 100.0], []
    environments._clock = lambda: now_s[0]
    original = environments._open

    def refuse(*_arguments: object) -> Environment:
        attempts.append(now_s[0])
        raise OSError(5, "Input/output error")

    with caplog.at_level(logging.WARNING, "tierkv_lmdb"):
        environments._open = refuse
        fail_next_meta_page(tmp_path)
        assert put(backend, {key(2): FRAME}) != [None]
        for _ in range(2000):
            with pytest.raises(BackendUnavailableError):
                backend.contains([key(1)])
            now_s[0] += 0.01
        gaps = [later - earlier for earlier, later in pairwise(attempts)]
        assert 30 <= len(attempts) <= 50, attempts
        assert gaps == pytest.approx(sorted(gaps), abs=0.02)
        assert max(gaps) <= keeper.PAUSE_MAX_S + 0.02
        (refusal,) = caplog.records
        assert "cannot be opened afresh: [Errno 5]" in refusal.getMessage()
        assert "it was closed: a meta page" in refusal.getMessage()
        environments._open = original
        now_s[0] += keeper.PAUSE_MAX_S
        assert put(backend, {key(2): FRAME}) == [None]
    assert get(backend, key(1), key(2)) == [FRAME, FRAME]
    backend.close()


def test_call_in_flight_keeps_the_failed_environment(tmp_path: Path) -> None:
    """LMDB opens an environment once per process: the next one must wait for the last call, and not crash it."""
    backend = open_at(tmp_path, durability="always")
    put(backend, {key(1): FRAME})
    failed = backend._env
    with failed.reading(frames=True) as txn:
        fail_next_meta_page(tmp_path)
        assert put(backend, {key(2): FRAME}) != [None]
        with pytest.raises(BackendUnavailableError, match="in flight"):
            backend.contains([key(1)])
        assert bytes(txn.get(key(1))) == FRAME
    write_until_stored(backend, 2)
    assert backend._env is not failed
    backend.close()


def fail_next_close(patch: pytest.MonkeyPatch, name: str) -> None:
    """Let a close report an earlier failure, as a network file system does. The descriptor is closed all the same."""
    close, left = os.close, [name]

    def close_and_fail(fd: int) -> None:
        is_meant = Path(os.readlink(f"/proc/self/fd/{fd}")).name in left  # noqa: PTH115 - a descriptor is no path
        close(fd)
        if is_meant:
            left.clear()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    patch.setattr(os, "close", close_and_fail)


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "owner.lock"])
def test_a_close_that_fails_keeps_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A file system that reports a failed write at the close of a file kept the tier locked until the engine ended.
    The environment was not closed either: one in trouble was never opened afresh."""
    backend = open_at(tmp_path, durability="always")
    assert put(backend, {key(1): FRAME}) == [None]
    fail_next_meta_page(tmp_path)
    with monkeypatch.context() as patch:
        fail_next_close(patch, name)
        assert put(backend, {key(2): FRAME}) != [None]
        write_until_stored(backend, 3)
    with monkeypatch.context() as patch:
        fail_next_close(patch, name)
        with contextlib.suppress(OSError):
            backend.close()
    again = open_at(tmp_path)
    assert get(again, key(1), key(3)) == [FRAME, FRAME]
    again.close()


@pytest.mark.parametrize("when", ["in trouble", "in flight"])
def test_close_of_a_failed_environment_releases_the_directory(tmp_path: Path, when: str) -> None:
    """A stack that is closed before the tier has recovered must be able to open it again."""
    backend = open_at(tmp_path, durability="always")
    fail_next_meta_page(tmp_path)
    if when == "in trouble":
        assert put(backend, {key(1): FRAME}) != [None]
        backend.close()
    else:
        with backend._env.reading():
            assert put(backend, {key(1): FRAME}) != [None]
            with pytest.raises(BackendUnavailableError, match="in flight"):
                backend.contains([key(1)])
            backend.close()
            with pytest.raises(TierKVError, match="in use by this process"):
                open_at(tmp_path)
    with pytest.raises(BackendError, match="closed"):
        backend.contains([key(1)])
    again = open_at(tmp_path)
    assert put(again, {key(1): FRAME}) == [None]
    again.close()


def test_threads_share_one_reopening(tmp_path: Path) -> None:
    """Many threads find the trouble at once; one of them opens the environment, which LMDB allows once."""
    backend = open_at(tmp_path, durability="always")
    put(backend, {key(1): FRAME})
    wrong: list[object] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                wrong.extend(got for got in get(backend, key(1)) if got != FRAME and not isinstance(got, TierKVError))
            except BackendError:
                time.sleep(0.001)

    threads = [threading.Thread(target=read) for _ in range(7)]
    for thread in threads:
        thread.start()
    for number in range(12):
        fail_next_meta_page(tmp_path)
        assert put_once(backend, 2) != [None]
        backend._environments._next_try_s = 0.0
        write_until_stored(backend, 100 + number)
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert backend._environments.restarts == 12
    assert get(backend, key(1), key(111)) == [FRAME, FRAME]
    backend.close()


@pytest.mark.parametrize("error", sorted(["CorruptedError", "PageNotFoundError", "PageFullError", "InvalidError"]))
def test_damage_that_lmdb_finds_starts_empty(tmp_path: Path, error: str, caplog: pytest.LogCaptureFixture) -> None:
    """Data that LMDB cannot read stays so; a namespace that kept it would never store again."""
    backend = open_at(tmp_path)
    put(backend, {key(1): FRAME})
    with pytest.raises(lmdb.Error), backend._env.reading():
        raise getattr(lmdb, error)("found")
    with caplog.at_level(logging.WARNING, "tierkv_lmdb"):
        assert get(backend, key(1)) == [None]
    assert "starts empty" in caplog.text
    assert put(backend, {key(1): FRAME}) == [None]
    backend.close()


class FirstSyncWaits:
    """Environment whose first sync waits and succeeds; meanwhile every other one fails.

    The kernel reports lost bytes to one of several callers only.
    """

    def __init__(self, env: lmdb.Environment) -> None:
        self.env = env
        self.waits, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self.env, name)

    def sync(self, force: bool) -> None:
        """Sync, or fail."""
        if self.waits.is_set() and not self.go_on.is_set():
            raise lmdb.Error("mdb_env_sync: Input/output error")
        self.waits.set()
        assert self.go_on.wait(WAIT_S)
        self.env.sync(force)


def test_a_failed_sync_concerns_all_that_it_covered(tmp_path: Path) -> None:
    """A sync that succeeds after another one has failed says nothing about the bytes that were lost before."""
    backend = open_at(tmp_path)
    put(backend, {key(1): FRAME})
    backend._env._env = disk = FirstSyncWaits(backend._env._env)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(put, backend, {key(2): FRAME})
        assert disk.waits.wait(WAIT_S)
        assert [type(result) for result in put(backend, {key(3): FRAME})] == [BackendError]
        disk.go_on.set()
        (result,) = other.result(WAIT_S)
    assert isinstance(result, BackendError)
    assert "a sync failed meanwhile" in str(result)
    assert get(backend, key(1), key(2), key(3)) == [FRAME, None, None]
    assert put(backend, {key(2): FRAME}) == [None]
    backend.close()


def test_damage_within_a_batch_is_an_error_per_key(tmp_path: Path) -> None:
    """Frames read before the damage are good, and must not be thrown away with the rest of the call."""
    backend = open_at(tmp_path)
    frames = {key(number): bytes([number]) * 9000 for number in range(3)}
    put(backend, frames)
    backend.close()
    data = directory(tmp_path) / "data.mdb"
    content = bytearray(data.read_bytes())
    header = content.index(frames[key(1)]) - 16
    content[header + 10] = 5  # of two kinds
    data.write_bytes(content)
    backend = open_at(tmp_path)
    good, *failed = get(backend, *frames)
    assert good == frames[key(0)]
    assert [type(result) for result in failed] == [BackendError, BackendUnavailableError]
    write_until_stored(backend, 4)
    backend.close()


INJECTED = """
import sys, pathlib, lmdb_support as s, test_healing as t
t.keeper.STEADY_S = 0.0  # no pauses: the failures are more frequent than those of a disk
backend = s.open_at(pathlib.Path(sys.argv[1]), durability=sys.argv[2])
stored, failures = set(), 0
for number in range(60):
    failures += s.put_once(backend, number) != [None]
    s.write_until_stored(backend, number)
    stored.add(number)
    if number >= 8:
        t.delete_once(backend, number - 8)
        stored.discard(number - 8)
        s.write_until_stored(backend, 100)
    assert s.get(backend, *map(s.key, stored)) == [s.FRAME] * len(stored)
print(failures, backend._environments.restarts, *sorted(stored))
backend.close()
"""


def inject(call: str, number: str, place: Path, durability: str) -> list[int]:
    """Let every 13th call of one kind fail. Returns failed writes, reopenings, and the stored frames."""
    strace = shutil.which("strace")
    command = [strace or "strace", "-f", "-o", "/dev/null", "-e", f"trace={call}"]
    if strace is None or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("strace cannot trace here: it injects the errors of the disk")
    command += ["-e", f"inject={call}:error={number}:when=9+13", sys.executable, "-c", INJECTED, str(place), durability]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [int(number) for number in done.stdout.split()]


@pytest.mark.parametrize(
    ("call", "number", "durability"),
    [
        ("pwrite64", "EIO", "batch"),
        ("pwrite64", "EROFS", "always"),
        ("fdatasync", "EIO", "batch"),
        ("fdatasync", "ENOSPC", "always"),
    ],
)
def test_writes_resume_when_the_disk_does(tmp_path: Path, call: str, number: str, durability: str) -> None:
    """A failure of any one call of a commit must not end the tier, and takes no acknowledged frame."""
    failures, restarts, *stored = inject(call, number, tmp_path, durability)
    assert failures > 0
    assert restarts > 0 or call == "fdatasync", "no meta page failed"
    backend = open_at(tmp_path)
    assert get(backend, *map(key, stored)) == [FRAME] * 8
    backend.close()


def test_a_full_tier_in_its_place_is_written(tmp_path: Path) -> None:
    """Another directory took its place, full of chunks that the framework had not listed. It evicted none of them, so
    nothing was written until a restart."""
    place, other = tmp_path / "tier", tmp_path / "other"
    full = open_at(other, context(2 * MIB))
    numbers = iter(range(10_000))
    while put(full, {key(next(numbers)): FRAME}) == [None]:
        pass
    stored = [entry.key for entry in full.scan()]
    full.close()
    backend = open_at(place, context(2 * MIB))
    put(backend, {key(20_000): FRAME})
    shutil.rmtree(place)
    other.rename(place)
    write_until_stored(backend, 20_001)
    again = stored[-1]
    assert put(backend, {again: FRAME}) == [None]
    for number in range(30_000, 30_000 + len(stored) - 2):
        assert put(backend, {key(number): FRAME}) == [None]
    left = {entry.key for entry in backend.scan()}
    assert again in left, "a chunk that was written again is listed"
    assert stored[0] not in left
    backend.close()
