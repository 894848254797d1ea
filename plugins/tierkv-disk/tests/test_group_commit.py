"""One forced write for many callers: records apply only when durable, and a failure concerns its callers alone."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from disk_support import PAGE, OpenDisk, frames

from tierkv.errors import BackendError
from tierkv.testing.frames import make_frame, make_key

WAIT_S = 60.0
CALLERS = 6


class HeldSync:
    """``fdatasync`` that waits at its first call on a file until released, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, error: int = 0) -> None:
        self.entered, self.let_go, self.calls = threading.Event(), threading.Event(), 0
        original = os.fdatasync

        def sync(fd: int) -> None:
            if os.readlink(f"/proc/self/fd/{fd}").endswith(name):  # noqa: PTH115 - a descriptor is no path
                self.calls += 1
                self.entered.set()
                assert self.let_go.wait(WAIT_S)
                if error:
                    raise OSError(error, os.strerror(error))
            original(fd)

        monkeypatch.setattr(os, "fdatasync", sync)


def wait_for_callers(disk: object, count: int) -> None:
    """Wait until ``count`` calls have queued their records."""
    while len(disk.backend.current._commits._pending) < count:  # type: ignore[attr-defined]
        pass


def test_callers_that_wait_share_a_forced_write(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first call waits for the device, five more arrive; one further forced write serves them all."""
    disk = open_disk()
    disk.put(frames(99))
    held = HeldSync(monkeypatch, "index.log")
    with ThreadPoolExecutor(CALLERS) as pool:
        first = pool.submit(disk.write, frames(0))
        assert held.entered.wait(WAIT_S)
        others = [pool.submit(disk.write, frames(number)) for number in range(1, CALLERS)]
        wait_for_callers(disk, CALLERS - 1)
        seen = disk.contains([make_key(number) for number in range(CALLERS)])
        done = [future.done() for future in others]
        held.let_go.set()
        assert not any(seen), "visible before it was durable"
        assert not any(done), "acknowledged before it was durable"
        assert [future.result(WAIT_S) for future in [first, *others]] == [[None]] * CALLERS
    assert held.calls == 2
    assert disk.contains([make_key(number) for number in range(CALLERS)]) == [True] * CALLERS


def test_a_failed_forced_write_fails_all_waiting_callers(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """No caller gets an acknowledgement, no record is visible, and the error names the device's error."""
    disk = open_disk()
    disk.put(frames(99))
    with monkeypatch.context() as patch:
        held = HeldSync(patch, "index.log", error=errno.EIO)
        with ThreadPoolExecutor(CALLERS) as pool:
            futures = [pool.submit(disk.write, frames(0))]
            assert held.entered.wait(WAIT_S)
            futures += [pool.submit(disk.write, frames(number)) for number in range(1, CALLERS)]
            wait_for_callers(disk, CALLERS - 1)
            held.let_go.set()
            for future in futures:
                (result,) = future.result(WAIT_S)
                assert isinstance(result, BackendError)
    assert disk.scan() == {make_key(99): PAGE}


def test_the_log_has_the_order_of_the_table(open_disk: OpenDisk) -> None:
    """Many threads overwrite the same keys; a reopen finds the final state of the table."""
    versions = dict.fromkeys(range(4), 0)

    def overwrite(worker: int) -> None:
        for turn in range(40):
            number = (worker + turn) % len(versions)
            key = make_key(number)
            if (worker + turn) % 5 == 0:
                disk.forget([key])
            else:
                disk.put({key: make_frame(key, 1000 * worker + turn, PAGE)})

    with open_disk(durability="none") as disk:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(overwrite, range(4)))
        final = {key: disk.get(key) for key in map(make_key, versions)}
    with open_disk() as disk:
        assert {key: disk.get(key) for key in final} == final
