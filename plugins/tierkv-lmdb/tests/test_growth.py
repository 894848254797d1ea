"""The map grows when it is full, follows another process, and no transaction of this plugin stays open."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import lmdb
import pytest
from lmdb_support import KIB, MIB, context, directory, get, key, killed_at_end, open_at, put, run_child

from tierkv.errors import BackendError, OutOfSpaceError
from tierkv_lmdb import options
from tierkv_lmdb.environments import environment
from tierkv_lmdb.environments.gate import EnvironmentGate


@pytest.fixture
def small_map(monkeypatch: pytest.MonkeyPatch) -> int:
    """Open environments with a map of 1 MiB."""
    monkeypatch.setattr(options, "MAP_BYTES_AT_OPEN", MIB)
    return MIB


def test_map_grows_up_to_the_capacity(tmp_path: Path, small_map: int) -> None:
    """A map of the final size would need address space that a process may lack, long before it is used."""
    backend = open_at(tmp_path, context(16 * MIB))
    assert backend._env.map_bytes == small_map
    frames = {key(number): bytes([number]) * 60 * KIB for number in range(180)}
    for k, frame in frames.items():
        assert put(backend, {k: frame}) == [None]
    assert small_map < backend._env.map_bytes <= 16 * MIB
    assert get(backend, *frames) == list(frames.values())
    while put(backend, {key(1000 + len(frames)): bytes(60 * KIB)}) == [None]:
        frames[key(1000 + len(frames))] = bytes(60 * KIB)
    assert backend._env.map_bytes <= 16 * MIB
    assert get(backend, *frames) == list(frames.values())
    backend.close()


def test_one_frame_longer_than_the_map(tmp_path: Path, small_map: int) -> None:
    """One doubling is not always enough."""
    backend = open_at(tmp_path, context(64 * MIB, frame_bytes_max=8 * MIB))
    assert put(backend, {key(1): b"x" * 8 * MIB}) == [None]
    assert backend._env.map_bytes >= 8 * small_map
    assert get(backend, key(1), buffer_bytes=8 * MIB) == [b"x" * 8 * MIB]
    backend.close()


def test_map_grows_under_traffic(tmp_path: Path, small_map: int) -> None:
    """The map moves while other threads read: no read may see a byte of the old map, or fail."""
    backend = open_at(tmp_path, context(48 * MIB), durability="none")
    first = {key(number): bytes([number]) * 60 * KIB for number in range(8)}
    put(backend, first)
    wrong: list[object] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            wrong.extend(got for got, frame in zip(get(backend, *first), first.values(), strict=True) if got != frame)
            wrong.extend(there for there in backend.contains(list(first)) if not there)

    def write(start: int) -> None:
        wrong.extend(
            result for number in range(start, start + 250) for result in put(backend, {key(number): bytes(60 * KIB)})
            if result is not None
        )  # fmt: skip

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write, args=(start,)) for start in (1000, 2000)]
    for thread in [*readers, *writers]:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert wrong == []
    assert backend._env.map_bytes >= 32 * small_map
    backend.close()


GROW_WITHOUT_ADDRESS_SPACE = """
import pathlib, resource, sys, lmdb_support as s
from tierkv.errors import OutOfSpaceError
from tierkv_lmdb import options
options.MAP_BYTES_AT_OPEN = s.MIB
backend = s.open_at(pathlib.Path(sys.argv[1]), s.context(1 << 40), durability="none")
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (used + 24 * s.MIB,) * 2)
stored = 0
while (result := s.put(backend, {s.key(stored): bytes(60 * s.KIB)})[0]) is None:
    stored += 1
assert isinstance(result, OutOfSpaceError), result
assert 8 * s.MIB < stored * 60 * s.KIB < 24 * s.MIB, stored
assert s.get(backend, s.key(0), s.key(stored - 1), s.key(stored)) == [bytes(60 * s.KIB)] * 2 + [None]
backend.close()
print("alive")
"""


def test_growth_without_address_space_is_a_refusal(tmp_path: Path) -> None:
    """LMDB drops its old map before it requests the new one, and the next access would crash the process.

    Growth is therefore not started if a limit on virtual memory prevents it: the tier is full.
    """
    assert run_child(GROW_WITHOUT_ADDRESS_SPACE, tmp_path) == "alive\n"


NO_ADDRESS_SPACE = """
import pathlib, resource, sys, lmdb_support
from tierkv.errors import BackendError
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    lmdb_support.open_at(pathlib.Path(sys.argv[1]), lmdb_support.context(1 << 40))
except BackendError as error:
    print(error)
"""


def test_not_even_the_first_map_fits(tmp_path: Path) -> None:
    """A limit on virtual memory, as in containers and batch systems, is named with its fix."""
    assert "ulimit -v" in run_child(NO_ADDRESS_SPACE, tmp_path)


def test_hung_reader_does_not_hang_the_growth(tmp_path: Path, small_map: int) -> None:
    """A read that hangs (on a dying disk) keeps the map in place; the write is refused within a bound."""
    backend = open_at(tmp_path, context(16 * MIB))
    backend._env._gate._exclusive_timeout_s = 0.05
    put(backend, {key(number): bytes(60 * KIB) for number in range(8)})
    with backend._env.reading():
        results = [put(backend, {key(100 + number): bytes(60 * KIB)})[0] for number in range(16)]
        assert any(isinstance(result, OutOfSpaceError) for result in results)
        assert backend._env.map_bytes == small_map
        assert get(backend, key(1)) == [bytes(60 * KIB)], "other readers are served as before"
    assert put(backend, {key(200 + number): bytes(60 * KIB) for number in range(40)}) == [None] * 40
    backend.close()


def test_exclusive_use_excludes_all_others() -> None:
    """The map moves during exclusive use."""
    released = []
    gate = EnvironmentGate("tier", lambda: released.append(True))
    order: list[str] = []

    def use() -> None:
        try:
            with gate.used():
                order.append("used")
        except BackendError:
            order.append("refused")

    with gate.exclusive() as is_exclusive:
        assert is_exclusive
        thread = threading.Thread(target=use)
        thread.start()
        time.sleep(0.05)
        order.append("alone")
        gate.close()
        assert not released
    thread.join()
    assert order in (["alone", "refused"], ["refused", "alone"]), "closed meanwhile"
    assert released == [True]
    with pytest.raises(BackendError, match="closed"):
        gate.enter()


FOREIGN_READER = """
import sys, time, lmdb
env = lmdb.open(sys.argv[1], max_dbs=2, readonly=True)
txn = env.begin()
print("ready", flush=True)
time.sleep(600)
"""


def test_no_own_transaction_prevents_reuse_of_pages(tmp_path: Path) -> None:
    """Every verb ends its transaction: also an unfinished scan, a miss, and a frame that is too long."""
    backend = open_at(tmp_path, context(2 * MIB))
    put(backend, {key(number): bytes(60 * KIB) for number in range(8)})
    scan = backend.scan()
    next(iter(scan))
    get(backend, key(1), key(77))
    get(backend, key(2), buffer_bytes=100)
    backend.contains([key(3)])
    assert "-" in backend._env._env.readers() or "no active readers" in backend._env._env.readers()
    assert backend._env.busy_readers() == []
    for number in range(300):
        assert put(backend, {key(number % 8): bytes([number % 256]) * 60 * KIB}) == [None]
    assert (directory(tmp_path) / "data.mdb").stat().st_size <= 2 * MIB
    assert next(iter(scan)).frame_bytes == 60 * KIB
    backend.close()


def test_reader_that_hangs_fills_the_tier_and_is_named(tmp_path: Path) -> None:
    """A foreign transaction keeps every page freed after its start; LMDB offers no way around that.

    The tier is full meanwhile, says whose fault it is, loses nothing, and goes on as soon as that process is gone, also
    where it was killed in the middle.
    """
    backend = open_at(tmp_path, context(4 * MIB))
    put(backend, {key(number): bytes([number]) * 60 * KIB for number in range(8)})
    with killed_at_end(FOREIGN_READER, directory(tmp_path)) as pid:
        for number in range(200):
            (result,) = put(backend, {key(number % 8): bytes([number % 8]) * 60 * KIB})
            if result is not None:
                break
        assert isinstance(result, OutOfSpaceError)
        assert f"process {pid}" in str(result)
        assert get(backend, *(key(n) for n in range(8))) == [bytes([n]) * 60 * KIB for n in range(8)]
        assert (directory(tmp_path) / "data.mdb").stat().st_size <= 4 * MIB
    for number in range(100):
        assert put(backend, {key(number % 8): bytes(60 * KIB)}) == [None], "the dead reader was not cleared"
    backend.close()


def test_environment_follows_a_map_enlarged_by_another_process(tmp_path: Path, small_map: int) -> None:
    """A tool that writes into the environment may have enlarged its map: this process follows."""
    backend = open_at(tmp_path, context(16 * MIB))
    put(backend, {key(1): b"ours"})
    run_child(WRITE_BESIDE, directory(tmp_path))
    assert get(backend, key(1)) == [b"ours"]
    assert backend._env.map_bytes > 4 * small_map
    assert put(backend, {key(2): b"later"}) == [None]
    backend.close()


WRITE_BESIDE = """
import sys, lmdb
env = lmdb.open(sys.argv[1], max_dbs=3, map_size=32 << 20)
with env.begin(write=True, db=env.open_db(b"foreign")) as txn:
    for number in range(5):
        txn.put(b"%d" % number, bytes(1 << 20))
env.close()
"""


def test_map_that_cannot_be_followed_is_an_error(
    tmp_path: Path, small_map: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without address space for it, the result is an error, neither a loop nor a crash."""
    backend = open_at(tmp_path, context(16 * MIB))
    put(backend, {key(1): b"ours"})
    run_child(WRITE_BESIDE, directory(tmp_path))
    monkeypatch.setattr(environment, "_has_address_space", lambda size: False)
    (result,) = get(backend, key(1))
    assert isinstance(result, BackendError)
    assert isinstance(result.__cause__ or result.__context__, lmdb.MapResizedError | None)
    assert small_map == backend._env.map_bytes
    monkeypatch.undo()
    assert get(backend, key(1)) == [b"ours"]
    backend.close()
