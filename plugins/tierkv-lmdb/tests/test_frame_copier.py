"""Frames that are not in memory are read from the file: equal bytes, and a dying disk is an error of the frame."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmdb_support import KIB, MIB, context, directory, get, key, open_at, put, run_child

from tierkv.errors import BackendError
from tierkv_lmdb import frame_reads, options
from tierkv_lmdb.environments.frame_copier import FrameCopier, _mincore
from tierkv_lmdb.frame_reads import READ_BYTES_MAX
from tierkv_lmdb.options import page_round


def supports_direct(folder: Path) -> bool:
    """Whether files of this folder take O_DIRECT."""
    (folder / "probe").write_bytes(bytes(4096))
    try:
        os.close(os.open(folder / "probe", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Treat no page as cached. Lengths of the reads of frames."""
    lengths: list[int] = []
    inner = os.preadv

    def preadv(fd: int, buffers: Sequence[Any], offset: int) -> int:
        lengths.append(sum(map(len, buffers)))
        return inner(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(FrameCopier, "_is_cached", lambda *_: False)
    return lengths


@pytest.fixture(params=["past the page cache", "through it", "refused at the first read"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ways of a read: what the file system can do, which may turn out late."""
    inner, inner_read = os.open, os.preadv

    def no_direct(path: Any, flags: int, *arguments: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return inner(path, flags, *arguments, **more)

    def refused(fd: int, buffers: Sequence[Any], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return inner_read(fd, buffers, offset)

    way: str = request.param
    if way == "through it":
        monkeypatch.setattr(os, "open", no_direct)
    elif way == "refused at the first read":
        monkeypatch.setattr(os, "preadv", refused)
    return way


def test_cold_frames_are_read_from_the_file(
    tmp_path: Path, way: str, cold: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any length, before and after the map has moved; the header before each frame proves its position."""
    monkeypatch.setattr(options, "MAP_BYTES_AT_OPEN", MIB)
    backend = open_at(tmp_path, context(64 * MIB, frame_bytes_max=2 * MIB))
    frames = {
        key(n): os.urandom(size) for n, size in enumerate([64 * KIB, 64 * KIB + 1, 100_000, 2 * MIB, 2 * MIB - 17])
    }
    short = {key(100): os.urandom(60 * KIB), key(101): os.urandom(100), key(102): b""}
    for k, frame in [*frames.items(), *short.items()]:
        assert put(backend, {k: frame}) == [None]
    assert backend._env.map_bytes > MIB
    assert get(backend, *frames, buffer_bytes=2 * MIB) == list(frames.values())
    if backend._env._copier._direct.is_usable:
        assert cold == [page_round(len(frame), 4096) for frame in frames.values()]
    else:
        assert way != "past the page cache" or not supports_direct(tmp_path)
        assert cold[-len(frames) :] == [len(frame) + 16 for frame in frames.values()]
    reads = len(cold)
    assert get(backend, *short) == list(short.values())
    assert len(cold) == reads, "short frames come from the map"
    backend.close()


def test_adjacent_frames_are_read_by_one_call(tmp_path: Path, cold: list[int]) -> None:
    """Frames that one call has stored lie side by side, but for pages of the trees; a short one is in such a page."""
    if not supports_direct(tmp_path):
        pytest.skip("no O_DIRECT here")
    frames = {key(n): os.urandom(size) for n, size in enumerate([100, 68 * KIB, 70_000, 100, 68 * KIB, 70_000])}
    backend = open_at(tmp_path / "tier", context(64 * MIB, frame_bytes_max=MIB))
    assert put(backend, frames) == [None] * len(frames)
    cold.clear()
    assert get(backend, *frames, key(99), buffer_bytes=256 * KIB) == [*frames.values(), None]
    total = 2 * page_round(68 * KIB, 4096) + 2 * page_round(70_000, 4096)
    assert sum(cold) == total
    assert max(cold) > total // 2, "at least three of them in one call"
    cold.clear()
    assert get(backend, key(5), key(4), buffer_bytes=256 * KIB) == [frames[key(5)], frames[key(4)]]
    assert len(cold) == 2, "in another order they are read one by one"
    backend._env._copier._asks_map = False  # as for a file of another user
    cold.clear()
    assert get(backend, key(4), key(5), buffer_bytes=256 * KIB) == [frames[key(4)], frames[key(5)]]
    assert len(cold) == 2, "each frame is looked for in memory by itself"
    backend.close()


def test_a_run_is_bounded(tmp_path: Path, cold: list[int]) -> None:
    """A run of adjacent frames is read in pieces of bounded length, and a longer frame by itself."""
    if not supports_direct(tmp_path):
        pytest.skip("no O_DIRECT here")
    frames = {key(n): os.urandom(300 * KIB) for n in range(20)} | {key(20): os.urandom(6 * MIB)}
    backend = open_at(tmp_path / "tier", context(64 * MIB, frame_bytes_max=6 * MIB))
    assert put(backend, frames) == [None] * 21
    cold.clear()
    assert get(backend, *map(key, range(20)), buffer_bytes=300 * KIB) == [frames[key(n)] for n in range(20)]
    assert get(backend, key(20), buffer_bytes=6 * MIB) == [frames[key(20)]]
    assert cold[-1] == page_round(6 * MIB, 4096)
    assert READ_BYTES_MAX // 2 < max(cold[:-1]) <= READ_BYTES_MAX
    assert len(cold) <= 6, "pages of the trees may follow the first frame, and a transaction ends with the thirteenth"
    backend.close()


def test_one_bad_frame_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of adjacent frames that one call reads, only the one on a bad block is an error."""
    backend = open_at(tmp_path, context(64 * MIB, frame_bytes_max=100_000))
    frames = {key(n): os.urandom(100_000) for n in range(3)}
    assert put(backend, frames) == [None] * 3
    with backend._env.reading() as txn:
        bad_at = 4096 * frame_reads.page_of(txn.get(key(1)))
    inner = os.preadv

    def dying(fd: int, buffers: Sequence[Any], offset: int) -> int:
        if offset <= bad_at < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "Input/output error")
        return inner(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", dying)
    monkeypatch.setattr(FrameCopier, "_is_cached", lambda *_: False)
    first, second, third = get(backend, *frames, buffer_bytes=100_000)
    assert (first, third) == (frames[key(0)], frames[key(2)])
    assert isinstance(second, BackendError)
    assert second.key == key(1)
    backend.close()


def test_a_real_cold_read(tmp_path: Path) -> None:
    """A cold read of a file that is truly not in memory, if the file system supports dropping it from the cache."""
    frames = {key(n): os.urandom(200_000) for n in range(20)}
    backend = open_at(tmp_path, context(64 * MIB, frame_bytes_max=MIB))
    assert put(backend, frames) == [None] * 20
    backend.close()
    data = os.open(directory(tmp_path) / "data.mdb", os.O_RDONLY)
    os.fdatasync(data)
    os.posix_fadvise(data, 0, 0, os.POSIX_FADV_DONTNEED)
    backend = open_at(tmp_path, context(64 * MIB, frame_bytes_max=MIB))
    assert get(backend, *frames, buffer_bytes=MIB) == list(frames.values())
    backend._env._copier._asks_map = False  # as for a file of another user
    assert get(backend, *frames, buffer_bytes=MIB) == list(frames.values())
    os.close(data)
    backend.close()


@pytest.mark.parametrize("off_by", [-4096, 4096, 2 * 4096, 1 << 40])
def test_a_wrong_map_address_is_detected(tmp_path: Path, cold: list[int], off_by: int) -> None:
    """The address of the map is reported by the system. If it were wrong, a good frame would be discarded as damaged.

    The header that LMDB writes before a value must therefore match.
    """
    backend = open_at(tmp_path, context(frame_bytes_max=100_000))
    frames = {key(n): os.urandom(100_000) for n in range(9)}
    put(backend, frames)
    copier = backend._env._copier
    copier._map = range(copier._map.start + off_by, copier._map.stop + off_by)
    for k, frame in frames.items():
        (got,) = get(backend, k, buffer_bytes=100_000)
        assert got == frame or isinstance(got, BackendError)
    backend.close()


def test_without_proc_all_frames_come_from_the_map(tmp_path: Path, cold: list[int]) -> None:
    """Some containers have no /proc; reads are only slower then."""
    backend = open_at(tmp_path, context(frame_bytes_max=100_000))
    put(backend, {key(1): b"x" * 100_000})
    backend._env._copier._map = None
    assert get(backend, key(1), buffer_bytes=100_000) == [b"x" * 100_000]
    assert cold == []
    backend.close()


def test_a_block_that_cannot_be_read_is_an_error_of_its_frame(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the map it would be a SIGBUS, which ends the process."""
    backend = open_at(tmp_path, context(frame_bytes_max=100_000))
    put(backend, {key(1): b"x" * 100_000, key(2): b"y" * 1000})

    def dying(fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        raise BlockingIOError(errno.EAGAIN, "not in memory") if flags else OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", dying)
    monkeypatch.setattr(backend._env._copier, "_asks_map", False)
    bad, good = get(backend, key(1), key(2), buffer_bytes=100_000)
    assert isinstance(bad, BackendError)
    assert "Input/output error" in str(bad)
    assert bad.key == key(1)
    assert good == b"y" * 1000
    backend.close()


CUT_SHORT = """
import mmap, os, struct, sys
from pathlib import Path
from tierkv_lmdb.environments.frame_copier import CutShortError, FrameCopier
data, page = Path(sys.argv[1]), 4096
content = bytearray(os.urandom(64 * page))
content[8 * page : 8 * page + 16] = struct.pack("<QHHI", 8, 0, 4, 32)
data.write_bytes(content)
with data.open("rb") as file:
    map_ = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
fetcher = FrameCopier(data, page)
value = memoryview(map_)[8 * page + 16 : 40 * page]
buffer = memoryview(bytearray(len(value)))
fetcher.copy(value, buffer)
assert buffer == value
os.truncate(data, 20 * page)
try:
    fetcher.copy(value, buffer)
except CutShortError as error:
    print(error)
"""


def test_a_file_cut_short_under_the_map(tmp_path: Path) -> None:
    """The file is truncated while it is open: a frame beyond its end is an error, not a crash of the engine."""
    assert "ends 81920 bytes before the frame" in run_child(CUT_SHORT, tmp_path / "data")


@pytest.mark.parametrize("asks_map", [True, False])
def test_pages_in_memory_are_told_from_others(tmp_path: Path, asks_map: bool) -> None:
    """A frame in memory is copied from there; a frame of which a part is missing must not fault page by page."""
    data = tmp_path / "data"
    data.write_bytes(os.urandom(64 * 4096))
    with data.open("r+b") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        copier = FrameCopier(data, 4096)
        copier._asks_map = asks_map
        assert copier._map is not None
        assert copier._is_cached(copier._map.start + 8208, 8208, 40 * 4096)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if asks_map:  # a probing read would itself read ahead
            assert not copier._is_cached(copier._map.start + 8208, 8208, 40 * 4096) or not _drops_pages(tmp_path)
        copier.close()
        del pages


def _drops_pages(folder: Path) -> bool:
    """Whether files of this folder leave the page cache when asked: not on tmpfs."""
    return os.statvfs(folder).f_fsid != 0


def test_copier_finds_no_map_of_an_unmapped_file(tmp_path: Path) -> None:
    """A file that is not mapped has no address: no offset may be computed from one."""
    (tmp_path / "data").write_bytes(bytes(8192))
    fetcher = FrameCopier(tmp_path / "data", 4096)
    assert fetcher._map is None
    fetcher.close()


def resident_bytes(data: Path) -> int:
    """Bytes of a file in the page cache."""
    with data.open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=3) as pages:
        resident = np.zeros(-(-len(pages) // mmap.PAGESIZE), np.uint8)
        start = np.frombuffer(pages, np.uint8).__array_interface__["data"][0]
        assert _mincore(start, len(pages), resident.__array_interface__["data"][0]) == 0
        return int((resident & 1).sum()) * mmap.PAGESIZE


def drop_from_cache(data: Path) -> None:
    """Drop a file from the page cache."""
    with data.open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_cold_frames_leave_nothing_in_the_page_cache(tmp_path: Path) -> None:
    """The binding touches every page of a value that it finds, which reads the frame twice and evicts others."""
    if not supports_direct(tmp_path):
        pytest.skip("no O_DIRECT here")
    frames = {key(n): os.urandom(MIB) for n in range(16)}
    ctx = context(64 * MIB, frame_bytes_max=MIB)
    backend = open_at(tmp_path / "tier", ctx)
    assert put(backend, frames) == [None] * 16
    backend.close()
    data = directory(tmp_path / "tier") / "data.mdb"
    drop_from_cache(data)
    if resident_bytes(data) > MIB:
        pytest.skip("the page cache does not let go of the file")
    backend = open_at(tmp_path / "tier", ctx)
    assert get(backend, *frames, buffer_bytes=MIB) == list(frames.values())
    assert resident_bytes(data) < 4 * MIB
    backend.close()


def test_entries_without_a_page_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores of earlier versions, whose index has no page numbers, stay as they are."""
    frames = {key(n): os.urandom(MIB) for n in range(3)}
    with monkeypatch.context() as patch:
        patch.setattr(frame_reads, "PLACED_INDEX", _WithoutPage())
        backend = open_at(tmp_path, context(64 * MIB, frame_bytes_max=MIB))
        assert put(backend, frames) == [None] * 3
        backend.close()
    backend = open_at(tmp_path, context(64 * MIB, frame_bytes_max=MIB))
    assert get(backend, *frames, buffer_bytes=MIB) == list(frames.values())
    assert sorted(entry.key for entry in backend.scan()) == sorted(frames)
    backend.close()


def test_a_wrong_page_number_gives_no_wrong_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header of the page says whether it is one: if not, LMDB is asked; at the next start the entry is removed."""
    frames = {key(n): os.urandom(MIB) for n in range(3)}
    backend = open_at(tmp_path, context(64 * MIB, frame_bytes_max=MIB))
    with monkeypatch.context() as patch:
        patch.setattr(FrameCopier, "page_of", lambda *_: 100_000_000)
        assert put(backend, {key(0): frames[key(0)]}) == [None]
        patch.setattr(FrameCopier, "page_of", lambda *_: 7)
        assert put(backend, {key(1): frames[key(1)]}) == [None]
    assert put(backend, {key(2): frames[key(2)]}) == [None]
    assert get(backend, *frames, buffer_bytes=MIB) == list(frames.values())
    backend.close()
    backend = open_at(tmp_path, context(64 * MIB, frame_bytes_max=MIB))
    assert get(backend, *frames, buffer_bytes=MIB) == [None, None, frames[key(2)]]
    backend.close()


class _WithoutPage:
    """Entry of the index as earlier versions wrote it."""

    size = frame_reads.PLACED_INDEX.size

    def pack(self, transaction: int, size: int, rank: int, _page: int) -> bytes:
        return frame_reads.RANKED_INDEX.pack(transaction, size, rank)
