"""Backend of an LMDB tier for the one process that writes: frames as LMDB values.

Two databases in one environment: ``frames`` (key -> frame) and ``index`` (key -> transaction id, frame length, rank),
always changed in one transaction. Entries of earlier releases have no rank. The index answers lookups and scans without
reading a page of a frame. On a cold disk that would be one random read per chunk.

One write transaction runs at a time; readers run beside it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import lmdb

from tierkv.abc import Entry, ReadRequest, ReadResult, StoredFrame, WriteRequest, WriteResult
from tierkv.abc.unlisted import UnlistedChunks
from tierkv.errors import BackendUnavailableError
from tierkv.types.keys import Key
from tierkv_lmdb import frame_reads
from tierkv_lmdb.batches import batches
from tierkv_lmdb.environments.environment import Environment
from tierkv_lmdb.environments.keeper import EnvironmentKeeper
from tierkv_lmdb.failures import Failures
from tierkv_lmdb.options import Sizes, page_round

READER_PAUSES_S = (0.01, 0.05, 0.2)
"""Pauses between tries of a write whose pages are held by a reader of another frame, in seconds."""
_RECYCLE_KEY = b"turn"
"""Key of a record beside the databases, written only to have something to commit."""
_Result = TypeVar("_Result")


class LmdbBackend:
    """One namespace of an LMDB tier. Verbs may be called on any threads.

    Args:
        environments: keeper of the open environment.
        failures: factory of the tier's errors.
        sizes: bounds of stored bytes and of transactions.
        sync_calls: whether a write call ends with a sync, so that acknowledged frames are on the disk.
    """

    def __init__(
        self,
        environments: EnvironmentKeeper,
        failures: Failures,
        sizes: Sizes,
        *,
        sync_calls: bool,
    ) -> None:
        self._environments = environments
        self._failures = failures
        self._sizes = sizes
        self._sync_calls = sync_calls
        self.room_bytes = sizes.room_bytes
        self._place: object = self._env.place
        self._place_lock = threading.Lock()  # held while chunks in another place are scanned
        self._unlisted = UnlistedChunks()

    @property
    def _env(self) -> Environment:
        """Environment in service."""
        return self._environments.current()

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key is in the index."""
        return frame_reads.contains(self._env, self._failures, keys)

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        """Copy each frame to its caller's buffer, several frames per transaction."""
        return frame_reads.read(self._env, self._failures, requests)

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        """Store frames, several per transaction; with durability "batch", sync once at the end."""
        place = self._env.place
        results = self._write_all(requests)
        with self._place_lock:
            if place != self._place:
                self._unlisted.replace(self.scan())
                self._place = place
        return self._unlisted.write_over(requests, results, self._write_all, self.delete)

    def _write_all(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        env = self._env
        failed_syncs = env.failed_syncs
        transactions = batches(requests, lambda request: len(request.frame), self._sizes.transaction_bytes)
        results = [result for batch in transactions for result in self._write(env, batch)]
        if not self._sync_calls or not requests:
            return results
        try:
            env.sync()
            if env.failed_syncs != failed_syncs:
                raise lmdb.Error("a sync failed meanwhile")  # noqa: TRY301  handled like a failure of this sync
        except lmdb.Error as error:
            # Frames that may not last are deleted: readers would see them until the next power cut only.
            self._try_delete(env, [request.key for request in requests])
            return [
                result or self._failures.from_cause("sync", error, r.key)
                for r, result in zip(requests, results, strict=True)
            ]
        return results

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        """Delete keys in one transaction; absent keys are no error."""
        return self._try_delete(self._env, keys)

    def scan(self) -> Iterator[Entry]:
        """Everything in the index, oldest first. The transaction ends before the first entry is yielded."""
        try:
            with self._env.reading() as txn, txn.cursor() as cursor:
                # A packed value sorts by transaction id, its first big-endian field.
                found = sorted((bytes(value), bytes(key)) for key, value in cursor)
        except lmdb.Error as error:
            raise self._failures.from_cause("scan", error) from error
        return (Entry(Key(key), *frame_reads.unpack_index(value)) for value, key in found)

    def list_frames(self, *, keys: bool) -> Iterator[StoredFrame]:
        """Yield everything in the index, in the order of the keys. Times are unknown."""
        del keys  # they cost nothing here
        yield from frame_reads.list_frames(self._env, self._failures)

    def close(self) -> None:
        """Refuse further calls. Closes the environment now, or when the last call in flight has ended."""
        self._environments.close()

    def _write(self, env: Environment, batch: Sequence[WriteRequest]) -> list[WriteResult]:
        try:
            return self._with_room(env, lambda: self._store(env, batch))
        except lmdb.Error as error:
            if len(batch) == 1:
                return [self._failures.from_cause("write", error, batch[0].key, len(batch[0].frame))]
        except BackendUnavailableError as error:
            return [self._failures.unavailable(str(error), request.key) for request in batch]
        return [result for request in batch for result in self._write(env, [request])]

    def _store(self, env: Environment, batch: Sequence[WriteRequest]) -> list[WriteResult]:
        with env.writing() as txn:
            return [self._put(env, txn, request) for request in batch]

    def _put(self, env: Environment, txn: lmdb.Transaction[memoryview], request: WriteRequest) -> WriteResult:
        key, size = request.key, len(request.frame)
        if not frame_reads.is_storable(env, key):
            return self._failures.backend_error(f"key of {len(key)} bytes: LMDB takes 1 to {env.key_bytes_max}", key)
        if not self._has_room(env, txn, key, size):
            limit = self._sizes.pages_bytes_max
            return self._failures.out_of_space(f"{limit} bytes of frames are the limit, by the tier's capacity", key)
        env.check_pages(txn, key)
        txn.put(key, request.frame, db=env.frames)
        page = env.page_of(txn, key)
        txn.put(key, frame_reads.PLACED_INDEX.pack(txn.id(), size, request.rank, page), db=env.index)
        return None

    def _has_room(self, env: Environment, txn: lmdb.Transaction[memoryview], key: Key, size: int) -> bool:
        stat = txn.stat(env.frames)
        used: int = (stat["overflow_pages"] + stat["leaf_pages"] + stat["branch_pages"]) * env.page_bytes
        if used > env.map_bytes:
            raise lmdb.CorruptedError(f"its trees state {used} bytes, more than the map has")
        needed = used + page_round(size, env.page_bytes)
        if needed <= self._sizes.pages_bytes_max:
            return True
        old = txn.get(key, db=env.index)
        freed = 0 if old is None else page_round(frame_reads.unpack_index(old)[0], env.page_bytes)
        return needed - freed <= self._sizes.pages_bytes_max

    def _try_delete(self, env: Environment, keys: Sequence[Key]) -> list[WriteResult]:
        try:
            self._with_room(env, lambda: env.delete(keys))
        except lmdb.Error as error:
            if len(keys) == 1:
                return [self._failures.from_cause("delete", error, keys[0])]
        except BackendUnavailableError as error:
            return [self._failures.unavailable(str(error), key) for key in keys]
        else:
            return [None] * len(keys)
        return [result for key in keys for result in self._try_delete(env, [key])]

    def _with_room(self, env: Environment, change: Callable[[], _Result]) -> _Result:
        """Run a transaction. If the map is full, grow it or recycle freed pages, and run it again.

        Raises:
            lmdb.MapFullError: there is no room; stored frames must be deleted first.
            lmdb.Error: any other failure.
            BackendUnavailableError: the environment is in trouble.
        """
        while True:
            try:
                return change()
            except lmdb.MapFullError:
                if not env.grow():
                    break
        for pause_s in (*READER_PAUSES_S, None):
            try:
                _recycle_pages(env)
                return change()
            except lmdb.MapFullError as error:
                pids = ", ".join(map(str, env.busy_readers()))
                if not pids:
                    raise
                if pause_s is None:
                    held = f"{error}; freed pages are held by a transaction in process {pids}"
                    raise lmdb.MapFullError(held) from error
            time.sleep(pause_s)
        raise AssertionError  # the last try returns or raises


def _recycle_pages(env: Environment) -> None:
    """Make freed pages reusable: LMDB reuses them from the second transaction after the one that freed them.

    A reader that died within a transaction would otherwise keep its pages for ever.
    """
    env.clear_stale_readers()
    for _ in range(2):
        with env.writing() as txn:
            txn.put(_RECYCLE_KEY, frame_reads.INDEX.pack(txn.id(), 0))
