"""Frames as LMDB values.

Two databases in one environment: ``frames`` (key -> frame) and ``index`` (key -> transaction id, frame length), always
changed in one transaction. The index answers "is it there?" and "what is there?" without touching a page of a frame,
which on a cold disk would be one random read per chunk.

LMDB serialises writers and lets readers run beside them; no lock of ours is held across a transaction.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import lmdb
import numpy as np

from tierkv.abc import Entry, ReadRequest, ReadResult, WriteRequest, WriteResult
from tierkv.errors import BackendError, BackendUnavailableError, OutOfSpaceError
from tierkv.types.keys import Key
from tierkv_lmdb.gate import CallGate

TRANSACTION_BYTES = 1024**2
"""Frames up to this many bytes in sum share a transaction (each costs a flush of the disk); a longer frame has its own
(a transaction keeps a copy of its pages in memory that is fresh each time, and large ones pay for that)."""

DATABASES = (b"frames", b"index")
_INDEX = struct.Struct(">QQ")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_log = logging.getLogger(__name__)


class Release(Protocol):
    """Called once, when the environment is closed; told whether all of its data is on the disk."""

    def __call__(self, *, synced: bool) -> None:
        """Let go of the place."""


class LmdbBackend:
    """One namespace of an LMDB tier. Verbs may be called on any threads.

    ``frames_bytes_max`` bounds the pages of all frames. With ``sync_writes``, what a write acknowledged is on the disk.
    """

    def __init__(
        self,
        env: lmdb.Environment,
        *,
        tier: str,
        frames_bytes_max: int,
        sync_writes: bool,
        release: Release,
    ) -> None:
        self._env = env
        self._tier = tier
        self._where = Path(env.path())
        self._frames_bytes_max = frames_bytes_max
        self._sync_writes = sync_writes
        self._release = release
        self._gate = CallGate(f"{tier} ({self._where})", self._close_environment)
        self._key_bytes_max = env.max_key_size()
        self._page_bytes = env.stat()["psize"]
        self._frames, self._index = (env.open_db(name) for name in DATABASES)

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key is in the index."""
        with self._gate:
            try:
                with self._env.begin(db=self._index) as txn:
                    return [self._storable(key) and txn.get(key) is not None for key in keys]
            except lmdb.Error as error:
                raise self._failure("look up keys", error) from error

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        """Copy each frame from the map; disk reads happen in the copy, without the GIL."""
        with self._gate:
            return [self._read(request) for request in requests]

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        """Store frames, several in a transaction, and (with durability "batch") sync once at the end."""
        with self._gate:
            results = [result for batch in _transactions(requests) for result in self._write(batch)]
            if not self._sync_writes or not requests:
                return results
            try:
                self._env.sync(True)  # noqa: FBT003  bindings before 3.0 take no keyword
            except lmdb.Error as error:
                # What cannot be promised is not kept: readers would see it until the next power cut only.
                self._delete([request.key for request in requests])
                return [
                    result or self._failure("sync", error, r.key) for r, result in zip(requests, results, strict=True)
                ]
            return results

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        """Forget keys in one transaction."""
        with self._gate:
            return self._delete(keys)

    def scan(self) -> Iterator[Entry]:
        """Everything in the index, oldest first. The transaction is over before the first entry is told."""
        with self._gate:
            try:
                with self._env.begin(db=self._index) as txn, txn.cursor() as cursor:
                    # A packed value sorts by transaction id, its first big-endian field.
                    found = sorted((value, key) for key, value in cursor)
            except lmdb.Error as error:
                raise self._failure("scan", error) from error
        return (Entry(Key(key), _INDEX.unpack(value)[1]) for value, key in found)

    def close(self) -> None:
        """Refuse further calls; close the environment now, or when the last call in progress is out."""
        self._gate.close()

    def _read(self, request: ReadRequest) -> ReadResult:
        if not self._storable(request.key):
            return None
        try:
            with self._env.begin(db=self._frames, buffers=True) as txn:
                value = txn.get(request.key)
                if value is None:
                    return None
                size = len(value)
                if size > len(request.buffer):
                    return BackendError(
                        f"{self._where}: frame of {size} bytes does not fit the buffer of {len(request.buffer)}",
                        tier=self._tier,
                        key=request.key,
                    )
                if size:
                    # numpy releases the GIL; a slice assignment of memoryviews does not.
                    np.copyto(np.frombuffer(request.buffer, np.uint8, size), np.frombuffer(value, np.uint8))
                return size
        except lmdb.Error as error:
            return self._failure("read", error, request.key)

    def _write(self, batch: Sequence[WriteRequest]) -> list[WriteResult]:
        try:
            with self._env.begin(write=True) as txn:
                return [self._put(txn, request) for request in batch]
        except lmdb.Error as error:
            if len(batch) == 1:
                return [self._failure("write", error, batch[0].key, len(batch[0].frame))]
        return [result for request in batch for result in self._write([request])]

    def _put(self, txn: lmdb.Transaction, request: WriteRequest) -> WriteResult:
        size = len(request.frame)
        if not self._storable(request.key):
            return BackendError(
                f"key of {len(request.key)} bytes: LMDB takes 1 to {self._key_bytes_max}",
                tier=self._tier,
                key=request.key,
            )
        if not self._has_room(txn, request.key, size):
            return OutOfSpaceError(
                f"{self._where}: {self._frames_bytes_max} bytes of frames are the limit, by the tier's capacity",
                tier=self._tier,
                key=request.key,
            )
        txn.put(request.key, request.frame, db=self._frames)
        txn.put(request.key, _INDEX.pack(txn.id(), size), db=self._index)
        return None

    def _has_room(self, txn: lmdb.Transaction, key: Key, size: int) -> bool:
        stat = txn.stat(self._frames)
        used = (stat["overflow_pages"] + stat["leaf_pages"] + stat["branch_pages"]) * self._page_bytes
        if used + self._page_round(size) <= self._frames_bytes_max:
            return True
        old = txn.get(key, db=self._index)
        freed = self._page_round(_INDEX.unpack(old)[1]) if old is not None else 0
        return used - freed + self._page_round(size) <= self._frames_bytes_max

    def _page_round(self, size: int) -> int:
        """Bytes of pages that a value takes: its own, and 16 for the header of its first page."""
        return -(-(size + 16) // self._page_bytes) * self._page_bytes

    def _delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        try:
            with self._env.begin(write=True) as txn:
                for key in filter(self._storable, keys):
                    txn.delete(key, db=self._frames)
                    txn.delete(key, db=self._index)
        except lmdb.Error as error:
            if len(keys) == 1:
                return [self._failure("delete", error, keys[0])]
            return [result for key in keys for result in self._delete([key])]
        return [None] * len(keys)

    def _storable(self, key: Key) -> bool:
        return 0 < len(key) <= self._key_bytes_max

    def _failure(self, what: str, error: lmdb.Error, key: Key | None = None, size: int = 0) -> BackendError:
        message = f"{self._where}: cannot {what}{' ' + key.hex() if key else ''}: {error}"
        if self._is_full(error, size):
            return OutOfSpaceError(f"{message} (the disk, its quota or the map is full)", tier=self._tier, key=key)
        if isinstance(error, lmdb.ReadersFullError | lmdb.LockError):
            return BackendUnavailableError(message, tier=self._tier, key=key)
        return BackendError(message, tier=self._tier, key=key)

    def _is_full(self, error: lmdb.Error, size: int) -> bool:
        if isinstance(error, lmdb.MapFullError | lmdb.DiskError):
            return True
        # LMDB tells a write cut short by a full disk as an I/O error. Asking for as much room again tells which it was.
        return size > 0 and not _disk_has_room(self._where, size)

    def _close_environment(self) -> None:
        synced = True
        try:
            self._env.sync(True)  # noqa: FBT003  bindings before 3.0 take no keyword
        except lmdb.Error as error:
            _log.warning("%s: not synced at close: %s", self._where, error)
            synced = False
        self._env.close()
        self._release(synced=synced)


def _transactions(requests: Sequence[WriteRequest]) -> Iterator[Sequence[WriteRequest]]:
    """Cut a batch, in its order, into transactions of at most TRANSACTION_BYTES or one frame."""
    start, total = 0, 0
    for number, request in enumerate(requests):
        if number > start and total + len(request.frame) > TRANSACTION_BYTES:
            yield requests[start:number]
            start, total = number, 0
        total += len(request.frame)
    if start < len(requests):
        yield requests[start:]


def _disk_has_room(directory: Path, size: int) -> bool:
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        return error.errno not in _FULL
    return True
