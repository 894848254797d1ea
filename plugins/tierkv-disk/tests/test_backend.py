"""Cases beyond the kit: device errors, reads beside deletes, calls that outlive the close."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import pytest
from disk_support import PAGE, OpenDisk, frames, make_namespace, read_log, run_alone

from tierkv.abc import ReadRequest, WriteRequest
from tierkv.errors import BackendError, BackendUnavailableError, ConfigError, OutOfSpaceError
from tierkv.testing.frames import aligned_buffer, aligned_copy, make_frame, make_key
from tierkv.types.keys import Key
from tierkv_disk.extents import address_at
from tierkv_disk.segments.segment_files import SegmentFiles

WAIT_S = 60.0


def fails_with(number: int) -> Callable[..., int]:
    """System call that always fails with this errno."""

    def fail(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


class Held:
    """Hold the calls of one method of SegmentFiles until released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.entered, self.let_go = threading.Event(), threading.Event()
        original = getattr(SegmentFiles, method)

        def held(*arguments: object) -> object:
            self.entered.set()
            assert self.let_go.wait(WAIT_S)
            return original(*arguments)

        monkeypatch.setattr(SegmentFiles, method, held)


def test_pages_are_not_reused_during_a_read(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame is deleted, and others are written, during its read: the read returns its own bytes."""
    disk = open_disk(capacity_bytes=4 * PAGE)
    disk.put(frames(0, 1, 2))
    held = Held(monkeypatch, "read_frame")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(disk.get, make_key(0))
        assert held.entered.wait(WAIT_S)
        disk.forget([make_key(0)])
        assert disk.write(frames(3)) == [None]
        (full,) = disk.write(frames(4))
        assert isinstance(full, OutOfSpaceError), "the pages were reused during the read"
        held.let_go.set()
        assert reading.result(WAIT_S) == frames(0)[make_key(0)]
    assert disk.write(frames(4)) == [None], "the pages did not become free after the read"


def test_an_overwritten_frame_is_read_whole(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages freed by an overwrite are not reused during two reads."""
    disk = open_disk(capacity_bytes=2 * PAGE)
    disk.put(frames(0))
    held = Held(monkeypatch, "read_frame")
    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(disk.get, make_key(0)) for _ in range(2)]
        assert held.entered.wait(WAIT_S)
        while disk.backend.current._table._pins._readers != {address_at(0, 0): 2}:  # type: ignore[union-attr]
            pass
        disk.put(frames(0, version=2))
        assert isinstance(disk.write(frames(1))[0], OutOfSpaceError)
        held.let_go.set()
        assert [future.result(WAIT_S) for future in reading] == [frames(0)[make_key(0)]] * 2
    assert disk.write(frames(1)) == [None]
    assert disk.get(make_key(0)) == frames(0, version=2)[make_key(0)]


def test_close_waits_for_calls_without_blocking(
    open_disk: OpenDisk, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that hangs past the close must not write to a file that reuses its descriptor's number."""
    disk = open_disk()
    disk.put(frames(0))
    held = Held(monkeypatch, "write_frame")
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(disk.write, frames(1))
        assert held.entered.wait(WAIT_S)
        disk.close()
        for call in (lambda: disk.read([make_key(0)]), lambda: disk.write(frames(2)), lambda: disk.delete([])):
            with pytest.raises(BackendError, match="closed"):
                call()
        with pytest.raises(BackendUnavailableError, match="in use"):
            open_disk()
        held.let_go.set()
        assert writing.result(WAIT_S) == [None]
    with open_disk() as again:
        assert again.read([make_key(0), make_key(1)]) == list(frames(0, 1).values())


@pytest.mark.parametrize("direct_io", ["auto", "off"])
@pytest.mark.parametrize("size", [1, 511, 4095, 4097, 3 * PAGE - 1, 3 * PAGE])
@pytest.mark.parametrize("shift", [0, 1, 512])
def test_unaligned_buffers_work_too(open_disk: OpenDisk, direct_io: str, size: int, shift: int) -> None:
    """The framework aligns its buffers; a tool with unaligned buffers must get its bytes as well."""
    disk = open_disk(frame_bytes_max=3 * PAGE, direct_io=direct_io)
    key = make_key(size)
    frame = make_frame(key, 1, size)
    source = aligned_buffer(size + shift)[shift:]
    source[:] = frame
    assert disk.write_requests([WriteRequest(key, source.toreadonly())]) == [None]
    target = aligned_buffer(size + shift)[shift:]
    assert disk.read_into([ReadRequest(key, target)]) == [size]
    assert bytes(target) == frame


def test_misfits_are_refused_by_key(open_disk: OpenDisk) -> None:
    """A frame, key or buffer of the wrong size is an error of that key, with the sizes in the message."""
    disk = open_disk()
    long_key = Key(b"k" * 105)
    requests = [
        WriteRequest(make_key(0), aligned_copy(bytes(PAGE + 1))),
        WriteRequest(make_key(1), aligned_copy(make_frame(make_key(1), 1, PAGE))),
        WriteRequest(long_key, aligned_copy(bytes(PAGE))),
        WriteRequest(Key(b""), aligned_copy(bytes(PAGE))),
    ]
    large, stored, long, empty = disk.write_requests(requests)
    assert stored is None
    assert isinstance(large, BackendError)
    assert "a frame of 4097 bytes: 1 to 4096 are possible here" in str(large)
    assert isinstance(long, BackendError)
    assert "a key of 105 bytes: 1 to 104 are possible" in str(long)
    assert isinstance(empty, BackendError)
    assert "a key of 0 bytes" in str(empty)
    assert (large.key, large.tier) == (make_key(0), "disk")
    assert disk.scan() == {make_key(1): PAGE}
    (short,) = disk.read_into([ReadRequest(make_key(1), aligned_buffer(100))])
    assert isinstance(short, BackendError)
    assert "the buffer has 100 bytes, the frame 4096" in str(short)
    assert disk.write_requests([WriteRequest(Key(b"k" * 104), aligned_copy(bytes(PAGE)))]) == [None]


def test_a_read_error_is_one_keys_error(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector must not turn the whole batch into errors, nor leave its pages pinned."""
    disk = open_disk()
    disk.put(frames(0, 1, 2))
    original = os.preadv

    def second_fails(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= PAGE < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", second_fails)
        first, second, third = disk.read([make_key(number) for number in range(3)])
    assert (first, third) == (frames(0)[make_key(0)], frames(2)[make_key(2)])
    assert isinstance(second, BackendError)
    assert "Input/output error" in str(second)
    assert second.key == make_key(1)
    assert not disk.backend.current._table._pins  # type: ignore[union-attr]


def test_adjacent_frames_are_moved_in_one_call(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call per small frame costs more than its bytes. Frames of one batch lie side by side, in any order of keys."""
    disk = open_disk()
    calls = dict.fromkeys(("pwritev", "preadv"), 0)

    def counted(name: str, original: Callable[[int, list[memoryview], int], int]) -> Callable[..., int]:
        def call(fd: int, buffers: list[memoryview], offset: int) -> int:
            calls[name] += 1
            return original(fd, buffers, offset)

        return call

    wanted = frames(*range(8))
    with monkeypatch.context() as patch:
        for name in calls:
            patch.setattr(os, name, counted(name, getattr(os, name)))
        disk.put(wanted)
        keys = [make_key(number) for number in (5, 0, 7, 2, 1, 6, 3, 4)]
        assert disk.read(keys) == [wanted[key] for key in keys]
        assert calls == {"pwritev": 1, "preadv": 1}
        disk.forget([make_key(3)])
        assert disk.read([make_key(number) for number in range(8)])[3] is None
    assert calls == {"pwritev": 1, "preadv": 3}, "three frames, a gap, and four frames"


@pytest.mark.parametrize("count", [0, PAGE, 3 * PAGE - 512])
def test_a_row_that_is_cut_short_is_moved_frame_by_frame(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """The kernel may move fewer bytes than asked for; every frame is whole all the same."""
    disk = open_disk()
    wanted = frames(0, 1, 2)
    write, read = os.pwritev, os.preadv

    def cut(call: Callable[..., int]) -> Callable[..., int]:
        def short(fd: int, buffers: list[memoryview], offset: int) -> int:
            if len(buffers) == 1:
                return call(fd, buffers, offset)
            starts = accumulate(map(len, buffers), initial=0)
            parts = [buffer[: max(0, count - start)] for buffer, start in zip(buffers, starts, strict=False)]
            return call(fd, [part for part in parts if part], offset) if count else 0

        return short

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", cut(write))
        disk.put(wanted)
    assert disk.read(list(wanted)) == list(wanted.values())
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", cut(read))
        assert disk.read(list(wanted)) == list(wanted.values())


def test_a_write_error_leaves_nothing(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed store is not visible, takes no pages, and can be retried."""
    disk = open_disk(capacity_bytes=4 * PAGE)
    disk.put(frames(9))
    for _ in range(5):
        with monkeypatch.context() as patch:
            for call in ("pwrite", "pwritev"):
                patch.setattr(os, call, fails_with(errno.EIO))
            results = disk.write(frames(0, 1))
        assert all(isinstance(result, BackendError) for result in results)
        assert disk.scan() == {make_key(9): PAGE}
    disk.put(frames(0, 1, 2))


def test_data_that_cannot_be_synced_is_not_acknowledged(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The previous frame of the key stays; the log has no record of the new one; no page is lost."""
    disk = open_disk(capacity_bytes=4 * PAGE)
    disk.put(frames(0))
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fails_with(errno.EIO))
            assert all(isinstance(result, BackendError) for result in disk.write(frames(0, 1, version=2)))
    assert disk.scan() == {make_key(0): PAGE}
    assert disk.get(make_key(0)) == frames(0)[make_key(0)]
    disk.put(frames(0, 1, version=3))


def test_min_free_bytes_stops_the_growth(open_disk: OpenDisk) -> None:
    """A tier without a capacity must not fill the disk of the operating system, and says which limit is reached."""
    disk = open_disk(capacity_bytes=None, min_free_bytes=1 << 60)
    (result,) = disk.write(frames(0))
    assert isinstance(result, OutOfSpaceError)
    assert re.search(
        r"0 B are allocated, and .*B are free on the disk, of which .*B stay free \(min_free_bytes\)", str(result)
    )
    assert disk.scan() == {}


FULL_DISK = """
import resource, sys
from pathlib import Path
import tierkv_disk
from tierkv.abc import BackendContext
from tierkv.errors import BackendError, OutOfSpaceError
from tierkv.testing.frames import make_frame, make_key
from tierkv.testing.conformance.session import Session
from disk_support import PAGE, frames, make_namespace
context = BackendContext("disk", make_namespace(), PAGE, 8 << 20)
options = tierkv_disk.DiskOptions(sys.argv[1], min_free_bytes=0, segment_bytes=2 << 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE - 1, PAGE - 1))
with Session(tierkv_disk.PLUGIN, context, options) as disk:
    for _ in range(3):
        (result,) = disk.write(frames(0))
        assert isinstance(result, BackendError) and not isinstance(result, OutOfSpaceError), result
        assert "File too large" in str(result) and "ulimit -f" in str(result), result
    assert disk.scan() == {} and disk.get(make_key(0)) is None
"""


def test_a_disk_that_cannot_hold_a_segment(place: Path, directory: Path) -> None:
    """The device (here the limit of file sizes) refuses a page: an error that no eviction mends, no partial file."""
    run_alone(FULL_DISK, place)
    assert not list(directory.glob("segment-*"))


def test_disk_is_taken_segment_by_segment(open_disk: OpenDisk, directory: Path) -> None:
    """A tier of a terabyte does not write a terabyte at start; it allocates whole segments, within the capacity."""
    disk = open_disk(capacity_bytes=(2 << 20) + PAGE + 100)
    assert not list(directory.glob("segment-*"))
    sizes = []
    for number in range(514):
        results = disk.write(frames(number))
        assert (results == [None]) == (number < 513)
        sizes.append(sum(path.stat().st_size for path in directory.glob("segment-*")))
    assert sorted(set(sizes)) == [1 << 20, 2 << 20, (2 << 20) + PAGE]
    blocks = sum(path.stat().st_blocks * 512 for path in directory.glob("segment-*"))
    assert blocks >= sizes[-1], "the segments are sparse: a store could run out of disk"


def test_shorter_frames_leave_room_for_more(open_disk: OpenDisk) -> None:
    """Bytes that a codec saves are room on the disk: a frame takes its length, not that of the longest one."""
    stored = []
    for size in (16 * PAGE, 4 * PAGE, PAGE):
        with open_disk(frame_bytes_max=16 * PAGE, model=f"of-{size}") as disk:
            results = [disk.write(frames(number, size=size)) for number in range(260)]
            stored.append(results.count([None]))
    assert stored == [16, 64, 256]


def test_segments_of_a_large_tier_are_few(open_disk: OpenDisk, directory: Path) -> None:
    """Each open segment takes a descriptor, and a process has about a thousand."""
    disk = open_disk(capacity_bytes=1 << 30)
    disk.put(frames(0))
    assert (directory / "segment-00000.dat").stat().st_size == (1 << 30) // 128


def test_always_syncs_each_frame_and_none_never(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sync of data and one of the log per call, per frame, or none, as the option states."""
    original, synced = os.fdatasync, []

    def count(fd: int) -> None:
        synced.append(fd)
        original(fd)

    monkeypatch.setattr(os, "fdatasync", count)
    expected = {"none": (0, 0), "batch": (2, 1), "always": (8, 1)}
    for durability, (writes, deletes) in expected.items():
        with open_disk(durability=durability) as disk:
            disk.put(frames(0))
            synced.clear()
            disk.put(frames(0, 1, 2, 3))
            assert len(synced) == writes
            synced.clear()
            disk.forget([make_key(0), make_key(1)])
            assert len(synced) == deletes


def test_a_capacity_below_one_frame(open_disk: OpenDisk) -> None:
    """Such a tier could store nothing: an error at open, with the required number."""
    with pytest.raises(ConfigError, match="capacity of 4095 bytes: one frame of this stack needs 4096"):
        open_disk(capacity_bytes=PAGE - 1)


def test_direct_io_on_insists(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """direct_io = "on" refuses the page cache; "auto" falls back to it with a warning."""
    monkeypatch.setattr("tierkv_disk.opening.supports_direct", lambda directory: False)
    with pytest.raises(BackendError, match=r"direct_io = 'on', but the file system of .* has no O_DIRECT"):
        open_disk(direct_io="on")
    open_disk(direct_io="off").close()


def test_missing_direct_io_is_logged_once(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The tier works through the page cache, and the log gives the reason for the lower speed."""
    monkeypatch.setattr("tierkv_disk.opening.supports_direct", lambda directory: False)
    disk = open_disk()
    disk.put(frames(0, 1))
    assert disk.get(make_key(1)) == frames(1)[make_key(1)]
    assert caplog.text.count("no O_DIRECT") == 1


def test_scan_is_oldest_first(open_disk: OpenDisk) -> None:
    """The framework rebuilds its recency from this order; it must survive a reopen."""
    with open_disk() as disk:
        for number in (3, 1, 2, 0):
            disk.put(frames(number))
        disk.put(frames(1, version=2))
    with open_disk() as disk:
        assert list(disk.scan()) == [make_key(number) for number in (3, 2, 0, 1)]


def test_log_and_scan_agree(open_disk: OpenDisk, directory: Path) -> None:
    """The log, read as docs/format.md describes it, lists the stored frames."""
    with open_disk() as disk:
        disk.put(frames(*range(8)))
        disk.forget([make_key(2), make_key(5)])
        scanned = disk.scan()
    known: dict[bytes, int] = {}
    for line in read_log(directory / "index.log"):
        known.pop(line.key, None)
        if line.kind == 1:
            known[line.key] = line.frame_bytes
            data = (directory / f"segment-{line.segment:05d}.dat").read_bytes()
            assert data[line.page * PAGE :][: line.frame_bytes] == frames(*range(8))[Key(line.key)]
    assert known == scanned
    assert make_namespace().fingerprint().hex() == directory.name
