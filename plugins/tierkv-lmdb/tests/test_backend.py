"""LMDB's additions to the contract: order of a scan, transactions, closing during a call."""

from __future__ import annotations

import threading
from pathlib import Path

import lmdb
import pytest
from lmdb_support import KIB, MIB, context, directory, get, key, open_at, put

from tierkv.abc import Entry, WriteRequest
from tierkv.errors import BackendError, TierKVError
from tierkv.types.keys import Key


def test_scan_yields_the_oldest_first(tmp_path: Path) -> None:
    """The framework rebuilds its eviction order from the scan: the frame stored last is the newest."""
    backend = open_at(tmp_path)
    order = [3, 1, 4, 0, 5, 9, 2, 6]
    for number in order:
        put(backend, {key(number): b"1"})
    put(backend, {key(4): b"again"})
    backend.close()
    backend = open_at(tmp_path)
    put(backend, {key(8): b"after a reopen"})
    scanned = [entry.key for entry in backend.scan()]
    assert scanned == [key(number) for number in (3, 1, 0, 5, 9, 2, 6, 4, 8)]
    backend.close()


def test_entries_of_earlier_releases_have_no_rank(tmp_path: Path) -> None:
    """Their index values end after the frame length. Nothing is lost, and new entries beside them have ranks."""
    backend = open_at(tmp_path)
    put(backend, {key(number): bytes(100 + number) for number in range(3)})
    backend.close()
    with lmdb.open(str(directory(tmp_path)), max_dbs=2) as env, env.begin(write=True) as txn:
        index = env.open_db(b"index", txn, create=False)
        for number in range(3):
            value = txn.get(key(number), db=index)
            assert len(value) == 32
            txn.put(key(number), value[:16], db=index)
    backend = open_at(tmp_path)
    frame = memoryview(b"new")
    assert backend.write([WriteRequest(key(3), frame, 77)]) == [None]
    assert get(backend, *map(key, range(3))) == [bytes(100 + number) for number in range(3)]
    expected = [*(Entry(key(number), 100 + number) for number in range(3)), Entry(key(3), 3, 77)]
    assert list(backend.scan()) == expected
    backend.close()


def test_scan_holds_no_transaction(tmp_path: Path) -> None:
    """A framework that iterates slowly over the entries must not stop pages from being reused meanwhile."""
    backend = open_at(tmp_path, context(2 * MIB))
    put(backend, {key(number): bytes(60 * KIB) for number in range(8)})
    entries = backend.scan()
    next(iter(entries))
    for number in range(500):
        assert put(backend, {key(number % 8): bytes([number % 256]) * 60 * KIB}) == [None]
    backend.close()


def test_index_and_frames_never_disagree(tmp_path: Path) -> None:
    """Lookups are answered from the index and bytes from the frames, so both change in one transaction."""
    backend = open_at(tmp_path)
    rest = {key(number): b"x" * 100 for number in range(10)}
    put(backend, rest)
    put(backend, {key(3): b"y" * 70, Key(b"k" * 600): b"refused", key(11): b"z"})
    backend.delete([key(5), key(77)])
    scanned = {entry.key: entry.frame_bytes for entry in backend.scan()}
    backend.close()
    with lmdb.open(str(directory(tmp_path)), max_dbs=2, readonly=True) as env:
        frames = env.open_db(b"frames", create=False)
        with env.begin(db=frames) as txn, txn.cursor() as cursor:
            assert {k: len(value) for k, value in cursor} == scanned
    assert scanned == {k: len(frame) for k, frame in rest.items() if k != key(5)} | {key(3): 70, key(11): 1}


def test_frame_longer_than_the_buffer_is_an_error(tmp_path: Path) -> None:
    """A frame of another configuration must not be truncated, and no byte of it may be copied."""
    backend = open_at(tmp_path, context(frame_bytes_max=4096))
    put(backend, {key(1): b"x" * 4097, key(2): b"y" * 4096})
    too_long, fits = get(backend, key(1), key(2), buffer_bytes=4096)
    assert isinstance(too_long, BackendError)
    assert too_long.key == key(1)
    assert "4097" in str(too_long)
    assert fits == b"y" * 4096
    backend.close()


def test_close_under_a_call(tmp_path: Path) -> None:
    """An abandoned call may still read the map at close: unmapping it then would kill the process.

    The map, and the owner lock, end with the last call.
    """
    backend = open_at(tmp_path)
    put(backend, {key(1): b"frame"})
    inside, go_on = threading.Event(), threading.Event()
    seen: list[bytes] = []

    def slow_call() -> None:
        with backend._env.reading(frames=True) as txn:
            inside.set()
            go_on.wait(60)
            seen.append(bytes(txn.get(key(1))))

    thread = threading.Thread(target=slow_call)
    thread.start()
    inside.wait(60)
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        backend.contains([key(1)])
    with pytest.raises(TierKVError, match="in use by this process"):
        open_at(tmp_path)
    go_on.set()
    thread.join()
    assert seen == [b"frame"]
    open_at(tmp_path).close()


def test_reads_and_writes_race_a_close(tmp_path: Path) -> None:
    """Shutdown during traffic: every call returns its bytes or an error that names the closed backend."""
    backend = open_at(tmp_path)
    frame = bytes(range(256)) * 240
    put(backend, {key(number): frame for number in range(16)})
    wrong: list[object] = []
    started = threading.Barrier(4)

    def work(write: bool) -> None:
        started.wait()
        try:
            while True:
                results = put(backend, {key(1): frame}) if write else get(backend, key(1), key(2))
                wrong.extend(r for r in results if r != (None if write else frame) and not names_it(r))
        except BackendError as error:
            wrong.extend([] if names_it(error) else [error])

    def names_it(error: object) -> bool:
        return isinstance(error, BackendError) and "closed" in str(error)

    threads = [threading.Thread(target=work, args=(write,)) for write in (True, True, False)]
    for thread in threads:
        thread.start()
    started.wait()
    for _ in range(50):
        get(backend, key(3))
    backend.close()
    for thread in threads:
        thread.join()
    assert wrong == []
    backend = open_at(tmp_path)
    assert get(backend, *[key(number) for number in range(16)]) == [frame] * 16
    backend.close()


class FailingSync:
    """Environment whose syncs are counted, and fail while ``broken``, as on a dying disk."""

    def __init__(self, env: lmdb.Environment) -> None:
        self.env = env
        self.broken = False
        self.syncs = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.env, name)

    def sync(self, force: bool) -> None:
        """Sync, or fail while ``broken``."""
        self.syncs += 1
        if self.broken:
            raise lmdb.Error("mdb_env_sync: Input/output error")
        self.env.sync(force)


@pytest.mark.parametrize(("durability", "syncs"), [("batch", 1), ("always", 0), ("none", 0)])
def test_write_syncs_before_it_answers(tmp_path: Path, durability: str, syncs: int) -> None:
    """Acknowledged frames are on the disk: one sync for each call, or none with durability "none".

    With "always" LMDB itself syncs, in each transaction.
    """
    backend = open_at(tmp_path, durability=durability)
    flags = backend._env._env.flags()
    assert (flags["sync"], flags["metasync"]) == (durability != "none", durability == "always")
    backend._env._env = disk = FailingSync(backend._env._env)
    assert put(backend, {key(number): bytes(60 * KIB) for number in range(40)}) == [None] * 40
    assert disk.syncs == syncs
    backend.close()
    assert disk.syncs == syncs + 1, "a close syncs"


def test_failed_sync_is_a_failed_write(tmp_path: Path) -> None:
    """A store whose sync failed leaves no key, and the tier works again when the disk does."""
    backend = open_at(tmp_path)
    backend._env._env = disk = FailingSync(backend._env._env)
    put(backend, {key(1): b"before"})
    disk.broken = True
    results = put(backend, {key(2): b"a", Key(b"k" * 600): b"b"})
    assert [type(result) for result in results] == [BackendError, BackendError]
    assert "511" in str(results[1])
    disk.broken = False
    assert get(backend, key(1), key(2)) == [b"before", None]
    assert put(backend, {key(2): b"after"}) == [None]
    assert get(backend, key(2)) == [b"after"]
    backend.close()
