"""Behaviour at the tier's capacity and on a full disk."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lmdb_support import KIB, MIB, context, directory, get, key, open_at, put, run_on_small_disk

from tierkv.errors import BackendError, OutOfSpaceError
from tierkv.types.keys import Key
from tierkv_lmdb.options import LmdbOptions, Sizes


def used_bytes(place: Path) -> int:
    """Length of all files of the namespace: more than their size on the disk."""
    return sum(path.stat().st_size for path in directory(place).iterdir())


def churn(backend: Any, resident: dict[Key, int], sizes: Iterator[int], victim: Callable[[list[Key]], Key]) -> int:
    """Store frames as the framework does: within the reported room, and with an eviction for each refusal."""
    refusals = 0
    for number, size in enumerate(sizes, 1000 * len(resident)):
        victims = []
        while sum(resident.values()) + size > backend.room_bytes:
            victims.append(victim(list(resident)))
            del resident[victims[-1]]
        assert backend.delete(victims) == [None] * len(victims)
        while (result := put(backend, {key(number): bytes(size)})[0]) is not None:
            assert isinstance(result, OutOfSpaceError), result
            refusals += 1
            gone = victim(list(resident))
            del resident[gone]
            assert backend.delete([gone]) == [None]
        resident[key(number)] = size
    return refusals


@pytest.mark.parametrize("order", ["oldest first", "any"])
@pytest.mark.parametrize("shortest", [1.0, 0.4], ids=["one length", "lengths vary"])
def test_directory_stays_within_the_capacity(tmp_path: Path, shortest: float, order: str) -> None:
    """The capacity bounds the whole directory: trees, free pages and holes count, at all times.

    A codec makes frames of any length, and LMDB needs each in one run of pages. The reported room must still be
    available, but for a rare refusal. A reopen changes nothing.
    """
    rng, capacity, frame_max = random.Random(5), 16 * MIB, 64 * KIB
    resident: dict[Key, int] = {}
    refusals = 0
    for _ in range(2):
        backend = open_at(tmp_path, context(capacity, frame_max), durability="none")  # syncs would prove nothing here
        assert {entry.key: entry.frame_bytes for entry in backend.scan()} == resident
        assert backend.room_bytes >= 0.7 * capacity
        sizes = (rng.randint(int(shortest * frame_max), frame_max) for _ in range(700))
        refusals += churn(
            backend, resident, sizes, lambda keys: keys[0] if order == "oldest first" else rng.choice(keys)
        )
        assert sum(resident.values()) >= 0.95 * backend.room_bytes
        assert used_bytes(tmp_path) <= capacity
        backend.close()
        assert used_bytes(tmp_path) <= capacity
    assert refusals <= 14, "more than one of a hundred"


def test_small_capacity_is_kept(tmp_path: Path) -> None:
    """With little room every page counts; refusals are by key, and stored frames are whole."""
    capacity = 2 * MIB
    backend = open_at(tmp_path, context(capacity))
    for number in range(200):
        (result,) = put(backend, {key(number): bytes([number]) * 60 * KIB})
        assert result is None or isinstance(result, OutOfSpaceError)
        if result is not None:
            assert backend.delete([entry.key for entry in backend.scan()][:3]) == [None] * 3
        assert used_bytes(tmp_path) <= capacity
    for entry in backend.scan():
        assert get(backend, entry.key) == [bytes([entry.key[-1]]) * 60 * KIB]
    backend.close()


def test_capacity_without_room_for_a_frame(tmp_path: Path) -> None:
    """A tier that refuses every store would go unnoticed; the message names the required capacity."""
    with pytest.raises(BackendError, match=r"give at least (\d+)$") as refused:
        open_at(tmp_path, context(1 * MIB, frame_bytes_max=8 * MIB))
    needed = int(str(refused.value).split()[-1])
    backend = open_at(tmp_path, context(needed, frame_bytes_max=8 * MIB))
    assert put(backend, {key(1): bytes(8 * MIB)}) == [None]
    assert used_bytes(tmp_path) <= needed
    backend.close()


def test_full_refuses_by_key_and_delete_makes_room(tmp_path: Path) -> None:
    """A delete needs pages too: a map filled completely by writes could never be emptied again."""
    backend = open_at(tmp_path, context(2 * MIB), map_headroom=0.0)
    stored, refused = [], None
    for number in range(1000):
        (refused,) = put(backend, {key(number): bytes(60 * KIB)})
        if refused is not None:
            break
        stored.append(key(number))
    assert isinstance(refused, OutOfSpaceError)
    assert (refused.tier, refused.key) == ("cold", key(len(stored)))
    assert sum(60 * KIB for _ in stored) >= 0.7 * 2 * MIB
    assert put(backend, {stored[0]: b"x" * 60 * KIB}) == [None], "replacing takes no room"
    assert backend.delete(stored) == [None] * len(stored)
    assert list(backend.scan()) == []
    assert put(backend, {key(1): bytes(60 * KIB)}) == [None]
    backend.close()


def test_map_filled_to_its_last_page(tmp_path: Path) -> None:
    """Independent of this plugin's count, LMDB's own "map full" is a refusal by key, deletes work, and room returns."""
    backend = open_at(tmp_path, context(4 * MIB))
    backend._sizes = replace(backend._sizes, pages_bytes_max=1 << 40)
    stored = []
    for number in range(1000):
        (refused,) = put(backend, {key(number): bytes(60 * KIB)})
        if refused is not None:
            break
        stored.append(key(number))
    assert isinstance(refused, OutOfSpaceError)
    assert "MDB_MAP_FULL" in str(refused)
    assert get(backend, key(len(stored))) == [None]
    assert backend.delete(stored[:8]) == [None] * 8
    assert put(backend, {key(5000 + number): bytes(60 * KIB) for number in range(4)}) == [None] * 4
    assert get(backend, *stored[8:]) == [bytes(60 * KIB)] * len(stored[8:])
    assert used_bytes(tmp_path) <= 4 * MIB
    backend.close()


def test_smaller_capacity_after_an_edit(tmp_path: Path) -> None:
    """After an edit of the configuration the tier holds more than allowed; it must open, and allow deletes."""
    backend = open_at(tmp_path, context(16 * MIB))
    keys = [key(number) for number in range(150)]
    assert all(put(backend, {k: bytes(64 * KIB)}) == [None] for k in keys)
    backend.close()
    backend = open_at(tmp_path, context(2 * MIB))
    assert isinstance(put(backend, {key(999): b"x" * 60 * KIB})[0], OutOfSpaceError)
    for k in keys[:140]:
        assert backend.delete([k]) == [None]
    assert put(backend, {key(999): b"x" * 60 * KIB}) == [None]
    assert get(backend, keys[-1]) == [bytes(64 * KIB)]
    backend.close()


def test_two_writers_at_a_full_map(tmp_path: Path) -> None:
    """A transaction is aborted while another thread waits to write: the binding 2.1.1 hangs there for ever."""
    backend = open_at(tmp_path, context(4 * MIB), durability="none")
    backend._sizes = replace(backend._sizes, pages_bytes_max=1 << 40)
    refused: list[object] = []

    def write(start: int) -> None:
        for number in range(start, start + 150):
            refused.extend(put(backend, {key(number): bytes(60 * KIB)}))

    threads = [threading.Thread(target=write, args=(start,), daemon=True) for start in (1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert {type(result) for result in refused} == {type(None), OutOfSpaceError}
    backend.close()


def test_one_refusal_does_not_refuse_the_batch(tmp_path: Path) -> None:
    """Short frames share a transaction, and a frame that cannot be stored must not undo the others."""
    backend = open_at(tmp_path)
    good, long_key, empty_key = key(1), Key(b"k" * 512), Key(b"")
    results = put(backend, {good: b"one", long_key: b"two", empty_key: b"three", key(2): b"four"})
    assert [type(result).__name__ for result in results] == ["NoneType", "BackendError", "BackendError", "NoneType"]
    assert "511" in str(results[1])
    assert get(backend, good, long_key, empty_key, key(2)) == [b"one", None, None, b"four"]
    assert backend.contains([good, long_key, empty_key]) == [True, False, False]
    assert backend.delete([long_key, empty_key, good]) == [None, None, None]
    assert put(backend, {Key(b"k" * 511): b"longest"}) == [None]
    backend.close()


DISK_FULL = """
import pathlib, sys
from lmdb_support import MIB, context, get, key, open_at, put
from tierkv.errors import BackendError, OutOfSpaceError
place = pathlib.Path(sys.argv[1])
backend = open_at(place, context(64 * MIB))
stored, room = {}, place.with_name("room")
room.write_bytes(bytes(MIB))
for start in range(0, 200, 4):
    frames = {key(number): bytes([start]) * 60000 for number in range(start, start + 4)}
    results = put(backend, frames)
    stored.update((k, frame) for (k, frame), result in zip(frames.items(), results) if result is None)
    if results[-1] is not None:
        break
assert isinstance(results[-1], OutOfSpaceError), results
last = list(frames)[-1]
assert results[-1].key == last
assert len(stored) > 30, len(stored)
assert backend.contains([last]) == [False]
gone = list(stored)[:8]
assert backend.delete(gone) == [None] * 8
kept = {k: frame for k, frame in stored.items() if k not in gone}
assert [frame for k in kept for frame in get(backend, k)] == list(kept.values())
kept[key(900)] = b"small"
fits, huge = put(backend, {key(900): b"small", key(901): bytes(1800000)})
assert (fits, type(huge)) == (None, OutOfSpaceError), (fits, huge)
assert get(backend, key(900)) == [b"small"]
room.unlink()
assert put(backend, {last: b"fits now"}) == [None]
backend.close()
backend = open_at(place, context(64 * MIB))
assert {k: get(backend, k)[0] for k in kept} == kept
assert get(backend, last) == [b"fits now"]
assert len(list(backend.scan())) == len(kept) + 1
"""


def test_disk_full(tmp_path: Path) -> None:
    """The disk may be full below the capacity.

    The refusal is an error by key, no stored frame is lost, deletes work, and so do writes as soon as there is room. A
    frame without room costs no other frame of its call, which once counted as not synced.
    """
    run_on_small_disk(DISK_FULL, tmp_path, mib=5)


def test_without_capacity_the_disk_is_the_limit(tmp_path: Path) -> None:
    """Without a capacity the size of the disk is the limit, independent of its free space."""
    backend = open_at(tmp_path, context(None))
    assert put(backend, {key(1): b"frame"}) == [None]
    disk = os.statvfs(tmp_path)
    assert 0.85 < backend.room_bytes / (disk.f_blocks * disk.f_frsize) < 1.0
    backend.close()


@pytest.mark.parametrize("file_mib", [0, 5000])
def test_map_covers_what_is_there(file_mib: int) -> None:
    """A map smaller than the file cannot be used; a map larger than the capacity would exceed it."""
    sizes = Sizes.of(
        LmdbOptions(path="x"), 1000 * MIB, frame_bytes_max=2 * MIB, file_bytes=file_mib * MIB, page_bytes=4 * KIB
    )
    assert sizes.map_bytes >= file_mib * MIB
    assert (sizes.map_bytes_max <= 1000 * MIB) == (file_mib == 0)
    assert sizes.room_bytes <= sizes.pages_bytes_max < 1000 * MIB
