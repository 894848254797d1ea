"""Damage of every field of a tier at rest: no crash, no hang, no wrong frame, and everything storable again."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import lmdb_damage
import pytest
from lmdb_damage import CAPACITY_BYTES
from lmdb_support import KIB, MIB, context, directory, get, key, open_at, put, run_child

from tierkv.errors import BackendError
from tierkv.testing.damage import run_program
from tierkv_lmdb.directory import read_losses
from tierkv_lmdb.environments.environment import Environment
from tierkv_lmdb.verification.file_format import DamageError
from tierkv_lmdb.verification.verify import verify

COUNT = int(os.environ.get("TIERKV_LMDB_DAMAGE", "150"))
"""Number of mutations; the variable gives more."""
SEED = int(os.environ.get("TIERKV_LMDB_SEED", "1"))
MEMORY = Path("/dev/shm")


@pytest.fixture
def fast_place(tmp_path: Path) -> Iterator[Path]:
    """Directory in memory, if the machine has one; removed at the end."""
    place = tempfile.mkdtemp(dir=MEMORY if os.access(MEMORY, os.W_OK) else tmp_path)
    yield Path(place)
    shutil.rmtree(place)


def test_mutations_by_field(fast_place: Path) -> None:
    """LMDB trusts its file: one bit may abort the process, hang it, or leave a tier that stores nothing.

    Each mutation runs in a process of its own; ``--only SEED`` of ``lmdb_damage.py`` repeats one.
    """
    summary = run_program(Path(lmdb_damage.__file__), fast_place, COUNT, SEED)
    assert set(summary["kinds"]) == {*lmdb_damage.KINDS, "lock"}
    damaged = damaged_by(fast_place / "again", range(SEED, SEED + COUNT))
    assert summary["notes"]["emptied at its start"] == damaged
    in_use = summary["notes"].get("emptied in use", 0)
    assert in_use <= summary["kinds"]["overflow"], "only the head of a long value shows its damage in use"


def damaged_by(place: Path, seeds: Sequence[int]) -> int:
    """Number of mutations after which a tier starts empty: those in which the check of the file finds damage."""
    base, count = place / "base", 0
    lmdb_damage.build(base)
    for seed in seeds:
        shutil.copytree(base, place / "one")
        what = lmdb_damage.mutate(place / "one", random.Random(seed))
        count += not what.startswith("lock") and is_damaged(directory(place / "one") / "data.mdb")
        shutil.rmtree(place / "one")
    assert 0 < count < len(seeds), "some mutations harm, and some are in bytes that nothing reads"
    return count


def is_damaged(data: Path) -> bool:
    """Whether the check of a data file finds damage."""
    try:
        verify(data, CAPACITY_BYTES)
    except DamageError:
        return True
    return False


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data file of a tier with branches, values of many lengths, and free pages."""
    place = tmp_path_factory.mktemp("image")
    lmdb_damage.build(place)
    return directory(place) / "data.mdb"


def test_a_sound_file_is_sound(image: Path) -> None:
    """A check that finds damage in a sound file would empty a tier at each start."""
    assert verify(image, CAPACITY_BYTES) == set()


def test_files_of_all_shapes_are_sound(tmp_path: Path) -> None:
    """Overwrites, deletes, aborted transactions and full tiers leave files that the check accepts."""
    backend = open_at(tmp_path, context(4 * MIB), durability="none")
    data = directory(tmp_path) / "data.mdb"
    assert verify(data, 4 * MIB) == set(), "empty trees"
    for turn in range(60):
        sizes = [(turn * 977 + number * 3571) % (60 * KIB) for number in range(8)]
        put(backend, {key((turn * 5 + number) % 90): bytes(size) for number, size in enumerate(sizes)})
        if turn % 3 == 0:
            backend.delete([key((turn * 7 + number) % 90) for number in range(20)])
        if turn % 5 == 0:
            with pytest.raises(KeyError):
                _abort_a_write(backend._env)
        assert verify(data, 4 * MIB) == set()
    backend.close()
    assert verify(data, 4 * MIB) == set()


def _abort_a_write(env: Environment) -> None:
    with env.writing() as txn:
        txn.put(bytes(key(7)), bytes(9000), db=env.frames)
        raise KeyError


@pytest.mark.parametrize("bit", [20, 30, 40, 50, 62])
@pytest.mark.parametrize("page", [0, 1])
def test_growth_is_bounded(tmp_path: Path, image: Path, page: int, bit: int) -> None:
    """LMDB maps, and a writer extends the file to, the last page that a meta page states: terabytes, from one bit."""
    data = bytearray(image.read_bytes())
    place = page * 4096 + 136
    number = int.from_bytes(data[place : place + 8], "little") | 1 << bit
    data[place : place + 8] = number.to_bytes(8, "little")
    (tmp_path / "data").write_bytes(data)
    with pytest.raises(DamageError, match="pages, more than"):
        verify(tmp_path / "data", CAPACITY_BYTES)


def test_one_page_with_two_uses_is_found(tmp_path: Path, image: Path) -> None:
    """A used page in the list of free pages would be overwritten: LMDB itself finds that later, or never."""
    pages = lmdb_damage.Image(image.read_bytes())
    (free,) = pages.kinds["free"]
    start = free * 4096
    offset = int.from_bytes(pages.data[start + 16 : start + 18], "little")
    count_at = start + offset + 16
    used = max(pages.kinds["leaf"])
    assert int.from_bytes(pages.data[count_at : count_at + 8], "little") >= 1
    pages.data[count_at : count_at + 16] = (1).to_bytes(8, "little") + used.to_bytes(8, "little")
    (tmp_path / "data").write_bytes(pages.data)
    with pytest.raises(DamageError, match="two uses"):
        verify(tmp_path / "data", CAPACITY_BYTES)


@pytest.mark.parametrize(("place", "value"), [(0, 3), (12, 1), (12, 60)])
def test_damaged_header_of_a_frame_is_found_before_it_is_freed(tmp_path: Path, place: int, value: int) -> None:
    """LMDB frees the pages that the header states. The check at open reads no frame.

    LMDB itself finds too many pages only. It would free the pages of another frame, or too few of them.
    """
    backend = open_at(tmp_path)
    frames = {key(number): bytes([number]) * 9000 for number in range(20)}
    put(backend, frames)
    backend.close()
    data = directory(tmp_path) / "data.mdb"
    content = bytearray(data.read_bytes())
    header = content.index(frames[key(7)]) - 16
    content[header + place] = value
    data.write_bytes(content)
    for change in (lambda tier: tier.delete([key(7)]), lambda tier: put(tier, {key(7): b"new"})):
        data.write_bytes(content)
        backend = open_at(tmp_path)
        assert get(backend, *frames) == list(frames.values()), "a frame whose header is damaged is read"
        (failed,) = change(backend)
        assert isinstance(failed, BackendError)
        assert get(backend, key(1)) == [None], "starts empty"
        assert put(backend, frames) == [None] * 20
        backend.close()
    assert read_losses(directory(tmp_path))[0] == 2


def test_keys_of_one_tree_only_are_dropped(tmp_path: Path) -> None:
    """A frame that the index does not know takes room for ever, because only the index is scanned."""
    backend = open_at(tmp_path)
    put(backend, {key(number): bytes(9000) for number in range(20)})
    env = backend._env
    with env.writing() as txn:
        txn.delete(bytes(key(3)), db=env.frames)
        txn.delete(bytes(key(4)), db=env.index)
        txn.put(bytes(key(5)), b"of another length", db=env.frames)
    backend.close()
    backend = open_at(tmp_path)
    assert {entry.key for entry in backend.scan()} == {key(n) for n in range(20) if n not in (3, 4, 5)}
    assert get(backend, key(3), key(4), key(5), key(6)) == [None, None, None, bytes(9000)]
    assert backend._env._env.stat()["entries"] == 2, "nothing but the two trees"
    assert not (directory(tmp_path) / "damage.json").exists()
    backend.close()


def test_trees_of_other_programs_are_left_alone(tmp_path: Path) -> None:
    """A monitoring tool may keep a tree of its own in the file; that is no damage."""
    backend = open_at(tmp_path)
    put(backend, {key(1): b"frame"})
    backend.close()
    code = "import sys, lmdb\nenv = lmdb.open(sys.argv[1], max_dbs=4)\n" + "".join(
        f"with env.begin(write=True) as t:\n  db = env.open_db(b'd{flag}', t, dupsort={flag})\n"
        f"  [t.put(b'k', b'%d' % n, db=db) for n in range(3000)]\n"
        for flag in (True, False)
    )
    run_child(code, directory(tmp_path))
    backend = open_at(tmp_path)
    assert get(backend, key(1)) == [b"frame"]
    assert put(backend, {key(2): b"frame"}) == [None]
    backend.close()
    assert read_losses(directory(tmp_path))[0] == 0
