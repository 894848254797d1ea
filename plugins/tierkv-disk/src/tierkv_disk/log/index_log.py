"""Index log: an append-only file of 128-byte records that map keys to pages.

A record is appended only after its frame is durable, so every logged frame is whole. Records have one size and never
straddle a disk sector, so damage affects only the records it hits. The file grows in zero-filled steps: an append then
changes no metadata, and a delete finds room even on a full disk. docs/format.md documents the bytes, and a test
compares them with a golden file.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from tierkv.types.keys import Key
from tierkv_disk.directory.files import create_file, open_file, sync_directory
from tierkv_disk.directory.layout import LOG_NAME, LOG_TEMPORARY_NAME
from tierkv_disk.extents import PAGE_BYTES, PageAddress, Run, address_at, page_of, segment_of
from tierkv_disk.failures import NO_SPACE
from tierkv_disk.segments.direct_io import round_up

MAGIC = b"tierkvdl"
VERSION = 2
SLOTTED_VERSION = 1
"""Version whose addresses are slots of one size instead of pages. Read, never written."""
RECORD_BYTES = 128
KEY_BYTES_MAX = 104
RANKED_KEY_BYTES_MAX = 96
"""Longest key whose record has room for a rank. Longer keys have none."""
GROW_BYTES = 1 << 20
_READ_BYTES = 1 << 22
_RECORDS_PER_WRITE = 256
"""Records of a new log per write: each write lets other threads run while a long log is rewritten."""

_CHECKED = struct.Struct("<Q120s")
"""Layout of header and records: a checksum of the following 120 bytes, then those bytes."""
_HEADER_BODY = struct.Struct("<8sIIQ16s80x")
_RECORD_BODY = struct.Struct("<BBHQI104s")
_RANKED_BODY = struct.Struct("<BBHQI96sQ")
_RECORD = struct.Struct("<QBBHQI96sQ")
_BODY = struct.Struct("<8x120s")
_KEY_LENGTH_AT, _KEY_AT = 9, 24
"""Places of the length of the key, and of the key, in a record."""


class RecordKind(IntEnum):
    """Meaning of a log entry; the byte on disk never changes."""

    PUT = 1
    DELETE = 2
    PART = 3


_PUT = int(RecordKind.PUT)


class Record(NamedTuple):
    """Record of the log.

    A frame in one run is a PUT with part 0. A frame in n runs is n - 1 PARTs, numbered from 0, then a PUT with
    part n - 1. All fields but kind and key are zero for DELETE.
    """

    kind: int
    key: Key
    part: int = 0
    address: PageAddress = PageAddress(0)
    """First page of this part of the frame."""
    frame_bytes: int = 0
    """Length of this part of the frame in bytes."""
    rank: int = 0
    """Place of the chunk in its prompt, in the last record of a frame; 0: unknown, or no room beside the key."""


Row = tuple[int, Key, int, PageAddress, int, int]
"""Fields of a :class:`Record`; a plain tuple is created in a third of the time."""


class LogIdentity(NamedTuple):
    """Namespace of a log. The fingerprint also seeds every checksum: records of another namespace never pass."""

    fingerprint: bytes

    @property
    def seed(self) -> int:
        """Seed of the record checksums."""
        return int.from_bytes(self.fingerprint[:8], "little")


@dataclass(slots=True)
class LogHealth:
    """Result of reading a log."""

    records: int = 0
    """Number of good records."""
    damaged: int = 0
    """Number of bad records before the last good one. The medium lost them: a crash damages only the tail."""
    torn_bytes: int = 0
    """Bytes after the last good record that are not zero: an append that a crash cut short."""
    header_ok: bool = True
    """Whether the first 128 bytes are as expected."""
    slotted: bool = False
    """Whether the log is of version 1."""


def encode_header(identity: LogIdentity) -> bytes:
    """Encode the first 128 bytes of a log."""
    return _encode_header(identity, VERSION, 0)


def _encode_header(identity: LogIdentity, version: int, slot_bytes: int) -> bytes:
    body = _HEADER_BODY.pack(MAGIC, version, RECORD_BYTES, slot_bytes, identity.fingerprint)
    return _CHECKED.pack(xxhash.xxh3_64_intdigest(body), body)


def encode_records(records: Iterable[Row], seed: int) -> bytes:
    """Pack entries into 128 bytes each, behind their seeded checksums. Written for speed: one per stored chunk."""
    pack, ranked, plain, digest = _CHECKED.pack, _RANKED_BODY.pack, _RECORD_BODY.pack, xxhash.xxh3_64_intdigest
    encoded = []
    for kind, key, part, address, frame_bytes, rank in records:
        if len(key) > RANKED_KEY_BYTES_MAX:
            body = plain(kind, len(key), part, address, frame_bytes, key)
        else:
            body = ranked(kind, len(key), part, address, frame_bytes, key, rank)
        encoded.append(pack(digest(body, seed), body))
    return b"".join(encoded)


def encode_record(record: Row, seed: int) -> bytes:
    """Pack an entry into 128 bytes, behind its seeded checksum."""
    return encode_records((record,), seed)


def has_log_of(directory: Path, identity: LogIdentity) -> bool:
    """Whether the log in ``directory`` begins with the header of this namespace, in the present version."""
    try:
        fd = open_file(directory / LOG_NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.pread(fd, RECORD_BYTES, 0) == encode_header(identity)
    except OSError:
        return False
    finally:
        os.close(fd)


def is_overlong(size: int, records: int) -> bool:
    """Whether a log is longer than its records and the zeros that are written ahead, so that it should be replaced."""
    return size > round_up(RECORD_BYTES * (1 + records) + 2 * GROW_BYTES, GROW_BYTES)


def replacement_bytes(live: int) -> int:
    """Bytes that a new log of ``live`` records needs beside the present one, until it has replaced it."""
    return RECORD_BYTES * (1 + live) + GROW_BYTES // 4


def spare_bytes(size: int, records_max: int, live: int) -> int:
    """Bytes that a log needs beside its file, to grow as far as it may and to be replaced by a compact one.

    Args:
        size: present length of the file.
        records_max: number of records at which it is replaced.
        live: number of records that the replacement would have.
    """
    longest = round_up(RECORD_BYTES * (1 + records_max) + GROW_BYTES, GROW_BYTES)
    return max(0, longest - size) + replacement_bytes(live) + GROW_BYTES // 4


def records_of(key: Key, runs: Sequence[Run], frame_bytes: int, rank: int) -> Sequence[Row]:
    """Records that log a frame in these runs."""
    if len(runs) == 1:
        return ((_PUT, key, 0, runs[0].address, frame_bytes, rank),)
    return list(_records_of_parts(key, runs, frame_bytes, rank))


def _records_of_parts(key: Key, runs: Sequence[Run], frame_bytes: int, rank: int) -> Iterator[Record]:
    last = len(runs) - 1
    for part, run in enumerate(runs):
        size = min(frame_bytes, run.pages * PAGE_BYTES)
        is_last = part == last
        kind = RecordKind.PUT if is_last else RecordKind.PART
        yield Record(kind, key, part, run.address, size, rank if is_last else 0)
        frame_bytes -= size


class Puts(NamedTuple):
    """Adjacent records of frames in one run, by column. Nearly all records are such, and there are millions."""

    keys: Sequence[Key]
    addresses: Sequence[PageAddress]
    frame_bytes: Sequence[int]
    ranks: Sequence[int]

    def rows(self) -> Iterator[Row]:
        """The same as rows."""
        return zip(repeat(_PUT), self.keys, repeat(0), self.addresses, self.frame_bytes, self.ranks)


def read_records(fd: int, identity: LogIdentity, health: LogHealth, slot_bytes: int = 0) -> Iterator[Row]:
    """Every good record of a log, oldest first. Arguments and errors as :func:`read_batches`."""
    for batch in read_batches(fd, identity, health, slot_bytes):
        yield from batch.rows() if isinstance(batch, Puts) else batch


def read_batches(
    fd: int, identity: LogIdentity, health: LogHealth, slot_bytes: int = 0
) -> Iterator[Puts | Sequence[Row]]:
    """Every good record of a log, oldest first, in batches. ``health`` is complete at the end of the iteration.

    Args:
        fd: descriptor of the log.
        identity: expected namespace.
        health: filled in.
        slot_bytes: slot size of a namespace of format 1, whose log may be of version 1; otherwise 0.

    Raises:
        OSError: the file cannot be read.
    """
    seed, digest, kinds = identity.seed, xxhash.xxh3_64_intdigest, frozenset(map(int, RecordKind))
    header = os.pread(fd, RECORD_BYTES, 0)
    old_header = bool(slot_bytes) and header == _encode_header(identity, SLOTTED_VERSION, slot_bytes)
    health.header_ok = old_header or header == encode_header(identity)
    health.slotted = old_header or (bool(slot_bytes) and not health.header_ok)
    slot_pages = slot_bytes // PAGE_BYTES if health.slotted else 1
    records = bad = torn_bytes = 0
    position = RECORD_BYTES
    # Written for speed: there may be millions of records.
    while data := os.pread(fd, _READ_BYTES, position):
        position += len(data)
        if data == bytes(len(data)):
            data_at = _next_data(fd, position)
            bad += (data_at - position + len(data)) // RECORD_BYTES
            position, data = data_at, b""
            continue
        whole = len(data) - len(data) % RECORD_BYTES
        view = memoryview(data)[:whole]
        sums = [digest(body, seed) for (body,) in _BODY.iter_unpack(view)]
        if whole and not bad and slot_pages == 1 and (puts := _puts_in(data[:whole], sums)) is not None:
            records += len(sums)
            yield puts
        else:
            rows: list[Row] = []
            for (checksum, kind, key_bytes, part, address, size, key, rank), found in zip(
                _RECORD.iter_unpack(view), sums, strict=True
            ):
                if checksum != found or kind not in kinds:
                    bad += 1
                    torn_bytes += RECORD_BYTES if checksum or kind or address or size or any(key) or rank else 0
                    continue
                if bad:
                    health.damaged += bad
                    bad = torn_bytes = 0
                if slot_pages != 1:
                    address = address_at(segment_of(address), page_of(address) * slot_pages)  # noqa: PLW2901 - from slots to pages
                if key_bytes > RANKED_KEY_BYTES_MAX:
                    key, rank = key + rank.to_bytes(8, "little"), 0  # noqa: PLW2901 - the end of the key is there
                rows.append((kind, key[:key_bytes], part, address, size, rank))
            records += len(rows)
            yield rows
        # Only the last read, at the end of the file, can end within a record.
        torn_bytes += len(data) - whole if any(data[whole:]) else 0
    health.records, health.torn_bytes = records, torn_bytes


def _puts_in(data: bytes, sums: Sequence[int]) -> Puts | None:
    """Columns of whole records; None unless all are undamaged, and put frames in one run under keys of one length.

    Columns are slices of the bytes: a tuple per record would take longer, most of it in garbage collections.

    Args:
        data: the records.
        sums: the checksum that each should have.
    """
    view, key_bytes = memoryview(data), data[_KEY_LENGTH_AT]
    if key_bytes > RANKED_KEY_BYTES_MAX or sys.byteorder != "little":
        return None
    halves, words, longs = view.cast("H"), view.cast("I"), view.cast("Q")
    kinds, parts = halves[4 :: RECORD_BYTES // 2].tolist(), halves[5 :: RECORD_BYTES // 2].tolist()
    if kinds.count(_PUT | key_bytes << 8) < len(sums) or any(parts) or longs[:: RECORD_BYTES // 8].tolist() != sums:
        return None
    keys: list[Any] = [data[start : start + key_bytes] for start in range(_KEY_AT, len(data), RECORD_BYTES)]
    low, high, sizes = (words[first :: RECORD_BYTES // 4].tolist() for first in (3, 4, 5))
    addresses: list[Any] = [above << 32 | below for above, below in zip(high, low, strict=True)] if any(high) else low
    return Puts(keys, addresses, sizes, longs[RECORD_BYTES // 8 - 1 :: RECORD_BYTES // 8].tolist())


def _next_data(fd: int, position: int) -> int:
    """Offset of the next record that is not in a hole: a file may end in a hole of any size, which would take hours."""
    try:
        found = os.lseek(fd, position, os.SEEK_DATA)
    except OSError:  # nothing but a hole up to the end, or a file system that does not know
        found = max(position, os.fstat(fd).st_size)
    return found - found % RECORD_BYTES


class IndexLog:
    """Open log, ready for appends. One thread at a time.

    Args:
        fd: descriptor of the log; closed by :meth:`close`.
        identity: namespace of the log.
        end: offset of the next record.
        sync: whether every append is forced to the device.
    """

    def __init__(self, fd: int, identity: LogIdentity, end: int, *, sync: bool) -> None:
        self._fd = fd
        self._identity = identity
        self._end = end
        self._size = os.fstat(fd).st_size
        self._sync = sync
        self._broken = ""

    @classmethod
    def create(cls, directory: Path, identity: LogIdentity, records: Iterable[Row], *, sync: bool) -> IndexLog:
        """Write a new log with these records and replace the old one atomically.

        Raises:
            OSError: the old log is unchanged.
        """
        temporary = directory / LOG_TEMPORARY_NAME
        fd = create_file(temporary)
        try:
            left = iter(records)
            with os.fdopen(os.dup(fd), "wb") as file:
                data = encode_header(identity)
                while data:
                    file.write(data)
                    data = encode_records(islice(left, _RECORDS_PER_WRITE), identity.seed)
                end = file.tell()
            log = cls(fd, identity, end, sync=sync)
            log._make_room(0)
            os.fsync(fd)
            temporary.rename(directory / LOG_NAME)
        except OSError:
            os.close(fd)
            temporary.unlink(missing_ok=True)
            raise
        try:
            sync_directory(directory)
        except OSError as error:
            # The new file is in place, but a power cut could restore the old one: neither may take further records.
            log._broken = f"the index log could not be replaced: {error}"
        return log

    @classmethod
    def resume(cls, fd: int, identity: LogIdentity, health: LogHealth, *, sync: bool) -> IndexLog:
        """Continue after the last good record of an undamaged log; appends overwrite a torn tail."""
        return cls(fd, identity, RECORD_BYTES * (1 + health.records), sync=sync)

    @property
    def broken(self) -> str:
        """Reason why the log takes no more appends; empty while it does."""
        return self._broken

    @property
    def size_bytes(self) -> int:
        """Length of the file, with the room for further records."""
        return self._size

    @property
    def records(self) -> int:
        """Number of records in the file, live and dead."""
        return self._end // RECORD_BYTES - 1

    def append(self, records: Iterable[Row]) -> None:
        """Append all records or none.

        Raises:
            OSError: none was appended. If the sync failed, the state on the device is unknown: this log takes no
                further record, and :class:`~tierkv_disk.log.rewriting.LogRewriter` replaces it.
        """
        if self._broken:
            raise OSError(errno.EIO, self._broken)
        data = encode_records(records, self._identity.seed)
        try:
            self._make_room(len(data))
            self._write(data, self._end)
        except OSError as error:
            self._undo(error)
            raise
        if self._sync:
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                self._broken = f"the index log could not be forced to the device: {error}"
                raise
        self._end += len(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _make_room(self, size: int) -> None:
        """Zero-fill ahead, so that half a step remains for deletes. Fails only if ``size`` itself has no room."""
        if self._size - self._end - size >= GROW_BYTES // 2:
            return
        target = round_up(self._end + size + GROW_BYTES, GROW_BYTES)
        try:
            self._write(bytes(target - self._size), self._size)
        except OSError as error:
            self._size = os.fstat(self._fd).st_size
            if error.errno not in NO_SPACE or self._size < self._end + size:
                raise
            return
        self._size = target
        if self._sync:
            os.fsync(self._fd)

    def _undo(self, error: OSError) -> None:
        self._broken = f"the index log could not be written: {error}"
        if error.errno in NO_SPACE:
            os.ftruncate(self._fd, self._end)
            self._size = self._end
            self._broken = ""

    def _write(self, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self._fd, view, offset)
            view, offset = view[count:], offset + count
