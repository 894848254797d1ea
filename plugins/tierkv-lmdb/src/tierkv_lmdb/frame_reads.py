"""Reads shared by the writer and the readers: look frames up, list them, and copy them out."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import islice

import lmdb

from tierkv.abc import ReadRequest, ReadResult, StoredFrame
from tierkv.errors import BackendUnavailableError, TierKVError
from tierkv.types.keys import Key
from tierkv_lmdb.batches import batches
from tierkv_lmdb.environments.environment import Environment
from tierkv_lmdb.environments.frame_copier import Place
from tierkv_lmdb.failures import Failures

INDEX = struct.Struct(">QQ")
"""Entry of earlier releases: transaction id and frame length."""
RANKED_INDEX = struct.Struct(">QQQ")
"""The same with the rank."""
PLACED_INDEX = struct.Struct(">QQQQ")
"""Entry of the index: transaction id, frame length, rank, number of the frame's first page or 0.

LMDB's Python binding touches every page of a value that it finds, which reads a cold frame through the page cache. So a
frame is found by its page, and not asked for.
"""
READ_BYTES_MAX = 4 << 20
"""Bytes of buffers per call and transaction of a read, or one longer frame. With fewer bytes, the call itself is a
large part; a longer transaction would keep the writer from reusing pages."""
LISTED_AT_ONCE = 4096
"""Entries of the index per transaction of a listing: a transaction keeps the writer from reusing pages."""


def contains(environment: Environment, failures: Failures, keys: Sequence[Key]) -> list[bool]:
    """Whether each key is in the index.

    Raises:
        BackendError: the index cannot be read.
    """
    try:
        with environment.reading() as txn:
            return [is_storable(environment, key) and txn.get(key) is not None for key in keys]
    except lmdb.Error as error:
        raise failures.from_cause("look up keys", error) from error


def read(environment: Environment, failures: Failures, requests: Sequence[ReadRequest]) -> list[ReadResult]:
    """Copy each frame to its caller's buffer, up to ``READ_BYTES_MAX`` of buffers per transaction."""
    parts = batches(requests, lambda request: len(request.buffer), READ_BYTES_MAX)
    return [result for part in parts for result in _read(environment, failures, part)]


def _read(environment: Environment, failures: Failures, requests: Sequence[ReadRequest]) -> list[ReadResult]:
    """Copy the frames in one transaction. What fails for one of them costs no other."""
    results: list[ReadResult] = []
    try:
        with environment.reading(frames=True) as txn:
            for result in _results(txn, environment, failures, requests):
                results.append(result)  # noqa: PERF402 - those before an error are good
    except BackendUnavailableError as error:
        return [failures.unavailable(str(error), request.key) for request in requests]
    except TierKVError:
        raise  # closed: this concerns every key
    except lmdb.Error as error:
        number = len(results)
        rest = requests[number + 1 :]
        failed = failures.from_cause("read", error, requests[number].key)
        return [*results, failed, *(_read(environment, failures, rest) if rest else ())]
    except OSError as error:
        if len(requests) == 1:
            return [failures.from_cause("read", error, requests[0].key)]
        return [result for request in requests for result in _read(environment, failures, [request])]
    return results


def _results(
    txn: lmdb.Transaction[memoryview], environment: Environment, failures: Failures, requests: Sequence[ReadRequest]
) -> Iterator[ReadResult]:
    """Yield the result of each request, up to the first that LMDB cannot look up.

    Raises:
        lmdb.Error: LMDB could not look that one up.
        OSError: the disk cannot read one of the frames.
    """
    places: dict[int, Place] = {}
    known, trouble = len(requests), None
    for number, request in enumerate(requests):
        try:
            entry = txn.get(request.key, db=environment.index) if is_storable(environment, request.key) else None
        except lmdb.Error as error:
            known, trouble = number, error
            break
        page, size = (0, 0) if entry is None else (page_of(entry), unpack_index(entry)[0])
        if page and size <= len(request.buffer):
            places[number] = Place(page, size, request.buffer)
    filled = dict(zip(places, environment.copy_all(places.values()), strict=True))
    for number in range(known):
        if filled.get(number):
            yield places[number].size
        else:
            yield _copied(environment, failures, requests[number], txn)
    if trouble is not None:
        raise trouble


def _copied(
    environment: Environment, failures: Failures, request: ReadRequest, txn: lmdb.Transaction[memoryview]
) -> ReadResult:
    """Copy a value that LMDB finds."""
    value = txn.get(request.key) if is_storable(environment, request.key) else None
    if value is None:
        return None
    size, room = len(value), len(request.buffer)
    if size > room:
        return failures.backend_error(f"frame of {size} bytes does not fit the buffer of {room}", request.key)
    if size:
        environment.copy(value, request.buffer)
    return size


def list_frames(environment: Environment, failures: Failures) -> Iterator[StoredFrame]:
    """Yield every entry of the index in the order of the keys. A transaction covers a page of entries only.

    Raises:
        BackendError: the index cannot be read.
    """
    start, is_first = b"", True
    while True:
        try:
            with environment.reading() as txn, txn.cursor() as cursor:
                found = cursor.first() if is_first else cursor.set_range(start)
                page = [(bytes(key), bytes(value)) for key, value in islice(cursor, LISTED_AT_ONCE)] if found else []
        except lmdb.Error as error:
            raise failures.from_cause("list", error) from error
        for key, value in page:
            size, rank = unpack_index(value)
            yield StoredFrame(Key(key), size, None, rank)
        if len(page) < LISTED_AT_ONCE:
            return
        start, is_first = page[-1][0] + b"\0", False


def unpack_index(value: bytes | memoryview) -> tuple[int, int]:
    """Frame length and rank of an entry of the index; zeros for one that was damaged after the check at open."""
    if len(value) < RANKED_INDEX.size:
        return (INDEX.unpack(value)[1] if len(value) == INDEX.size else 0), 0
    _, size, rank = RANKED_INDEX.unpack_from(value)
    return size, rank


def page_of(value: bytes | memoryview) -> int:
    """Page number of an entry of the index; 0 if it has none."""
    page: int = PLACED_INDEX.unpack(value)[3] if len(value) == PLACED_INDEX.size else 0
    return page


def is_storable(environment: Environment, key: Key) -> bool:
    """Whether LMDB accepts the length of ``key``."""
    return 0 < len(key) <= environment.key_bytes_max
