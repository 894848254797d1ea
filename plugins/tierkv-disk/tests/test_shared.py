"""Several namespaces, stacks and processes in one directory: limits hold for all of them together, at all times."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disk_support import PAGE, OpenDisk, frames, make_namespace

from tierkv.errors import BackendError, BackendUnavailableError, ConfigError, OutOfSpaceError
from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import make_key
from tierkv_disk.at_rest import remove_stored, stored_namespaces
from tierkv_disk.directory import shared as shared_module
from tierkv_disk.directory.files import temporary_name
from tierkv_disk.directory.shared import DIRECTORY_LOCK_NAME, SharedDirectory, SharedLimits, used_bytes
from tierkv_disk.options import DiskOptions

MIB = 1 << 20
LIMIT = 40 * MIB
HIGH = 0.85
"""Leaves 6 MiB of the limit for the index logs of three namespaces, of 2 MiB each."""
SIZE = 1 << 16
SHARED = {
    "directory_bytes_max": LIMIT,
    "high_watermark": HIGH,
    "low_watermark": 0.6,
    "capacity_bytes": None,
    "durability": "none",
    "frame_bytes_max": SIZE,
}


def directory_of(place: Path, model: str) -> Path:
    """Directory of a model's namespace."""
    return place / make_namespace(model).fingerprint().hex()


def fill(disk: Session, count: int = 2000) -> int:
    """Write up to ``count`` frames, or until the first refusal. Returns how many were stored."""
    for number in range(count):
        (result,) = disk.write(frames(number, size=SIZE))
        if result is not None:
            assert isinstance(result, OutOfSpaceError), result
            assert "directory_bytes_max" in str(result)
            return number
    return count


def age(directory: Path, seconds: float) -> None:
    """Set the time of last use of the namespace to ``seconds`` seconds ago."""
    then = time.time() - seconds
    os.utime(directory / "lock", (then, then))


def test_the_limit_counts_all_namespaces(open_disk: OpenDisk, place: Path) -> None:
    """Two models share one limit, also after a restart."""
    one, two = open_disk(model="one", **SHARED), open_disk(model="two", **SHARED)
    in_one, in_two = fill(one, 300), fill(two)
    assert in_one == 300
    assert 0 < in_two < 300
    assert HIGH * LIMIT - 2 * MIB < used_bytes(place) <= HIGH * LIMIT
    one.close()
    with open_disk(model="one", **SHARED) as again:
        assert len(again.scan()) == in_one
        again.forget([make_key(0)])
        assert again.write(frames(0, size=SIZE)) == [None], "it may reuse its own pages"
    assert used_bytes(place) <= HIGH * LIMIT


OTHER = """
import sys
from tierkv.abc import BackendContext
from tierkv.testing.conformance.session import Session
import tierkv_disk
from disk_support import PAGE, frames, make_namespace
place, model, limit, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
options = tierkv_disk.DiskOptions(place, min_free_bytes=0, segment_bytes=1 << 20, directory_bytes_max=limit,
                                  high_watermark=0.85, low_watermark=0.6, durability="none")
with Session(tierkv_disk.PLUGIN, BackendContext("disk", make_namespace(model), 1 << 16, None), options) as disk:
    stored = sum(result is None for number in range(count) for result in disk.write(frames(number, size=1 << 16)))
    print(stored, flush=True)
    sys.stdin.read()
    assert len(disk.scan()) == stored
"""


def start(place: Path, model: str, limit: int, count: int) -> subprocess.Popen[str]:
    """Another process that fills a namespace and holds it open until its input ends."""
    path = [str(Path(__file__).parent), *sys.path]
    program = f"import sys; sys.path[:0] = {path!r}\n{OTHER}"
    command = [sys.executable, "-I", "-c", program, str(place), model, str(limit), str(count)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_the_limit_counts_all_processes(place: Path) -> None:
    """Three processes grow at once: together they stay within the limit, and each keeps its acknowledged frames."""
    processes = [start(place, f"model {number}", LIMIT, 400) for number in range(3)]
    total = 0
    try:
        for process in processes:
            assert process.stdout is not None
            stored = process.stdout.readline()
            total += int(stored)
        assert 400 < total < 3 * 400, "the limit stopped no process: the test is too small"
        assert used_bytes(place) <= LIMIT
    finally:
        for process in processes:
            process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0, 0]


def test_unused_namespaces_make_room_oldest_first(
    open_disk: OpenDisk, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The chunks of an unused epoch are removed; an open namespace is never removed."""
    options = {**SHARED, "capacity_bytes": 10 * MIB, "low_watermark": 0.75}
    for days, model in enumerate(("younger", "older", "open")):
        with open_disk(model=model, **options) as disk:
            disk.put(frames(*range(128), size=SIZE))
        age(directory_of(place, model), (days + 1) * 86400)
    held = open_disk(model="open", **options)
    with caplog.at_level(logging.WARNING), open_disk(model="new", **options) as disk:
        disk.put(frames(*range(128), size=SIZE))
        assert not directory_of(place, "older").exists(), "the least recently used namespace must go first"
        assert directory_of(place, "younger").exists(), "more was removed than the low watermark requires"
        assert held.read([make_key(5)]) == [frames(5, size=SIZE)[make_key(5)]]
    assert caplog.text.count("removed the namespace") == 1
    assert directory_of(place, "older").name in caplog.text
    assert used_bytes(place) <= LIMIT


def test_unused_namespaces_stay_if_configured(open_disk: OpenDisk, place: Path) -> None:
    """``reclaim_unused = false``: growth is refused instead."""
    options = {**SHARED, "reclaim_unused": False}
    with open_disk(model="old", **options) as disk:
        stored = fill(disk)
        assert stored > 300
    with open_disk(model="new", **options) as disk:
        assert fill(disk) == 0
    with open_disk(model="old", **options) as disk:
        assert len(disk.scan()) == stored


def test_unused_namespaces_make_room_on_a_full_file_system(
    open_disk: OpenDisk, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``min_free_bytes`` applies as well, without any limit for the directory."""
    with open_disk(model="old") as disk:
        disk.put(frames(*range(10)))

    class Usage:
        total = 1 << 40

        @property
        def free(self) -> int:
            return 5 * MIB + MIB // 2 - used_bytes(place)

    monkeypatch.setattr("tierkv_disk.directory.shared.shutil.disk_usage", lambda path: Usage())
    with open_disk(model="new", min_free_bytes=MIB) as disk:
        disk.put(frames(0))
    assert not directory_of(place, "old").exists()
    with open_disk(model="third", min_free_bytes=MIB) as disk:
        disk.put(frames(0))
        with open_disk(model="fourth", min_free_bytes=MIB) as other:
            assert isinstance(other.write(frames(0))[0], OutOfSpaceError)


def test_a_smaller_limit_applies_from_the_open(open_disk: OpenDisk, place: Path) -> None:
    """The user lowers the limit and restarts: the directory is below it before the first write."""
    everything = frames(*range(800), size=SIZE)
    with open_disk(**{**SHARED, "directory_bytes_max": None, "capacity_bytes": 60 * MIB}) as disk:
        disk.put(everything)
    assert used_bytes(place) > LIMIT
    with open_disk(**SHARED) as disk:
        left = disk.scan()
        assert 500 < len(left) < 800
        assert {make_key(number) for number in range(500, 800)} <= left.keys(), "newer frames were dropped"
        assert disk.read(list(left)) == [everything[key] for key in left]
        assert used_bytes(place) <= LIMIT


def test_a_limit_below_one_frame(open_disk: OpenDisk) -> None:
    """Such a tier could store nothing: an error at open."""
    with pytest.raises(ConfigError, match="directory_bytes_max = 1048576: one frame of this stack needs 2097152 bytes"):
        open_disk(frame_bytes_max=2 * MIB, capacity_bytes=None, directory_bytes_max=MIB)


def test_a_process_that_hangs_with_the_lock(open_disk: OpenDisk, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process must not block the others for ever: an error names the file to inspect."""
    monkeypatch.setattr(shared_module, "LOCK_WAIT_S", 0.05)
    disk = open_disk()
    shared = SharedDirectory(place, SharedLimits(None, 1.0, 1.0, 0, reclaim=True), "other")
    with shared.locked():
        (result,) = disk.write(frames(0))
        assert isinstance(result, OSError)
        assert DIRECTORY_LOCK_NAME in str(result)
        with pytest.raises(BackendUnavailableError, match="look for a process that hangs"):
            open_disk(model="another")
    disk.put(frames(0))


def test_removal_and_opening_exclude_each_other(open_disk: OpenDisk, place: Path) -> None:
    """A namespace opened while others make room is opened whole or created again, never partially."""
    options = {"directory_bytes_max": 20 * MIB, "capacity_bytes": 4 * MIB, "durability": "none"}

    def cycle(worker: int) -> None:
        for number in range(12):
            with open_disk(model=f"model {(worker + number) % 6}" + "ab"[worker % 2], **options) as disk:
                held = disk.scan()
                assert set(disk.read(list(held))) <= set(frames(*range(300)).values())
                for result in disk.write(frames(*range(300))):
                    assert result is None or isinstance(result, OutOfSpaceError)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(cycle, range(2)))
    assert used_bytes(place) <= 20 * MIB
    assert not [path for path in place.iterdir() if path.name.endswith(".tmp")]


def test_remains_of_a_killed_removal_are_removed(open_disk: OpenDisk, place: Path) -> None:
    """A namespace under removal already has a temporary name; the next open finishes the removal."""
    open_disk().close()
    half = place / f".tierkv-disk.{'0123' * 8}.1-2.tmp"
    half.mkdir()
    (half / "segment-00000.dat").write_bytes(bytes(PAGE))
    open_disk().close()
    assert not half.exists()


def test_the_next_removal_finishes_a_killed_one(open_disk: OpenDisk, place: Path) -> None:
    """The machine of an engine that is gone for good has no next open."""
    for model in ("one", "two"):
        open_disk(model=model).close()
    directory_of(place, "one").rename(place / temporary_name(directory_of(place, "one").name))
    remove_stored(DiskOptions(str(place)), make_namespace("two"))
    assert not [path for path in place.iterdir() if path.is_dir()]


def test_a_namespace_that_was_never_finished_is_not_listed(open_disk: OpenDisk, place: Path) -> None:
    """A creation that was killed has stored nothing: `tierkv ls` must not call it damaged."""
    with open_disk(model="one") as disk:
        disk.put(frames(0))
    directory_of(place, "two").mkdir()
    assert [each.namespace.model for each in stored_namespaces(DiskOptions(str(place)))] == ["one"]
    (directory_of(place, "one") / "namespace.json").unlink()
    (lost,) = stored_namespaces(DiskOptions(str(place)))
    assert isinstance(lost, BackendError), "it has segments"
