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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import xxhash

from tierkv.types.keys import Key
from tierkv_disk.directory.files import create_file, open_file, sync_directory
from tierkv_disk.directory.layout import LOG_NAME, LOG_TEMPORARY_NAME
from tierkv_disk.extents import PAGE_BYTES, PageAddress, Run
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
_RECORDS_PER_WRITE = 256
"""Records of a new log per write: each write lets other threads run while a long log is rewritten."""

_CHECKED = struct.Struct("<Q120s")
"""Layout of header and records: a checksum of the following 120 bytes, then those bytes."""
_HEADER_BODY = struct.Struct("<8sIIQ16s80x")
_RECORD_BODY = struct.Struct("<BBHQI104s")
_RANKED_BODY = struct.Struct("<BBHQI96sQ")


class RecordKind(IntEnum):
    """Meaning of a log entry; the byte on disk never changes."""

    PUT = 1
    DELETE = 2
    PART = 3


PUT_KIND = int(RecordKind.PUT)


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
    return encode_header_of(identity, VERSION, 0)


def encode_header_of(identity: LogIdentity, version: int, slot_bytes: int) -> bytes:
    """Encode the header of a log of some version. slot_bytes: 0 in the present one."""
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
        return ((PUT_KIND, key, 0, runs[0].address, frame_bytes, rank),)
    return list(_records_of_parts(key, runs, frame_bytes, rank))


def _records_of_parts(key: Key, runs: Sequence[Run], frame_bytes: int, rank: int) -> Iterator[Record]:
    last = len(runs) - 1
    for part, run in enumerate(runs):
        size = min(frame_bytes, run.pages * PAGE_BYTES)
        is_last = part == last
        kind = RecordKind.PUT if is_last else RecordKind.PART
        yield Record(kind, key, part, run.address, size, rank if is_last else 0)
        frame_bytes -= size


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
