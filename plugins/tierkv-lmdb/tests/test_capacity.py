"""What happens at the tier's capacity and at the end of the disk."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from lmdb_support import KIB, MIB, context, directory, get, key, open_at, put, run_child, run_on_small_disk

from tierkv.errors import OutOfSpaceError
from tierkv.types.keys import Key
from tierkv_lmdb.options import LmdbOptions, MapSizes


def test_lengths_that_vary_do_not_break_the_map_up(tmp_path: Path) -> None:
    """A codec makes frames of any length, and LMDB wants each in one run of pages.

    While the framework stays within the capacity, holes of the wrong size must not lead to a refusal.
    """
    rng = random.Random(5)
    capacity = 16 * MIB
    backend = open_at(tmp_path, context(capacity), durability="none")  # 3000 syncs would prove nothing here
    resident: dict[Key, int] = {}
    for number in range(1500):
        size = rng.randint(30 * KIB, 64 * KIB)
        victims = []
        while sum(resident.values()) + size > capacity:
            victims.append(rng.choice(list(resident)))
            del resident[victims[-1]]
        assert backend.delete(victims) == [None] * len(victims)
        assert put(backend, {key(number): bytes(size)}) == [None], f"refused at frame {number}"
        resident[key(number)] = size
    assert {entry.key: entry.frame_bytes for entry in backend.scan()} == resident
    backend.close()
    assert (directory(tmp_path) / "data.mdb").stat().st_size <= 1.25 * capacity + 16 * MIB + 17 * 64 * KIB


def test_full_refuses_by_key_and_delete_makes_room(tmp_path: Path) -> None:
    """A delete needs pages too: a map filled to the brim by writes could never be emptied again."""
    backend = open_at(tmp_path, context(2 * MIB), map_headroom=0.05)
    stored, refused = [], None
    for number in range(1000):
        (refused,) = put(backend, {key(number): bytes(60 * KIB)})
        if refused is not None:
            break
        stored.append(key(number))
    assert isinstance(refused, OutOfSpaceError)
    assert (refused.tier, refused.key) == ("cold", key(len(stored)))
    assert sum(60 * KIB for _ in stored) >= 0.9 * 2 * MIB
    assert put(backend, {stored[0]: b"x" * 60 * KIB}) == [None], "replacing takes no room"
    assert backend.delete(stored) == [None] * len(stored)
    assert list(backend.scan()) == []
    assert put(backend, {key(1): bytes(60 * KIB)}) == [None]
    backend.close()


def test_capacity_made_smaller(tmp_path: Path) -> None:
    """After an edit of the configuration the tier holds more than it may; it must open, and let itself be emptied."""
    backend = open_at(tmp_path, context(16 * MIB))
    keys = [key(number) for number in range(200)]
    assert all(put(backend, {k: bytes(64 * KIB)}) == [None] for k in keys)
    backend.close()
    backend = open_at(tmp_path, context(1 * MIB))
    assert isinstance(put(backend, {key(999): b"x" * 60 * KIB})[0], OutOfSpaceError)
    for k in keys[:190]:
        assert backend.delete([k]) == [None]
    assert put(backend, {key(999): b"x" * 60 * KIB}) == [None]
    assert get(backend, keys[-1]) == [bytes(64 * KIB)]
    backend.close()


def test_one_refusal_does_not_refuse_the_batch(tmp_path: Path) -> None:
    """Short frames share a transaction, and one that cannot be stored must not undo its neighbours."""
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
from tierkv.errors import OutOfSpaceError
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
room.unlink()
assert put(backend, {last: b"fits now"}) == [None]
backend.close()
backend = open_at(place, context(64 * MIB))
assert {k: get(backend, k)[0] for k in kept} == kept
assert get(backend, last) == [b"fits now"]
assert len(list(backend.scan())) == len(kept) + 1
"""


def test_disk_full(tmp_path: Path) -> None:
    """Below the capacity the disk may be full all the same.

    Its refusal is an error by key, nothing stored is lost, deletes work, and so do writes as soon as there is room.
    """
    run_on_small_disk(DISK_FULL, tmp_path, mib=5)


NO_ADDRESS_SPACE = """
import pathlib, resource, sys, lmdb_support
from tierkv.errors import BackendError
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
try:
    lmdb_support.open_at(pathlib.Path(sys.argv[1]), lmdb_support.context(1 << 40))
except BackendError as error:
    print(error)
"""


def test_capacity_beyond_the_address_space(tmp_path: Path) -> None:
    """A limit on virtual memory, as containers and batch systems set it, is named with its fix."""
    assert "ulimit -v" in run_child(NO_ADDRESS_SPACE, tmp_path)


def test_without_capacity_the_disk_is_the_limit(tmp_path: Path) -> None:
    """No capacity means as much as the disk has, whatever is free at this moment."""
    backend = open_at(tmp_path, context(None))
    assert put(backend, {key(1): b"frame"}) == [None]
    backend.close()
    sizes = MapSizes.of(LmdbOptions(path="x"), None, frame_bytes_max=MIB, file_bytes=0, disk_bytes=1000 * MIB)
    assert 900 * MIB < sizes.frames_bytes_max < 1000 * MIB
    assert sizes.map_bytes > sizes.frames_bytes_max


@pytest.mark.parametrize("file_mib", [0, 5000])
def test_map_covers_what_is_there(file_mib: int) -> None:
    """A map smaller than the file, or with no room beyond the frames, cannot be worked in."""
    sizes = MapSizes.of(
        LmdbOptions(path="x"), 1000 * MIB, frame_bytes_max=2 * MIB, file_bytes=file_mib * MIB, disk_bytes=10**12
    )
    assert sizes.frames_bytes_max == 1250 * MIB
    assert sizes.map_bytes == (max(1250, file_mib) + 16 + 32) * MIB
