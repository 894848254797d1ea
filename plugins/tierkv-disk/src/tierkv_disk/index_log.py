"""The index log: an append-only file of 128-byte records that says which key lies where.

A record is appended only after the frame it speaks of is durable; so whatever the log says is there is whole. Records
have one size and never straddle a disk sector, so damage costs the records it hits and no others. The file is grown in
zero-filled steps: an append then changes no metadata, and a delete finds room even on a full disk. The bytes are
documented in docs/format.md, and tested against a golden file.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import xxhash

from tierkv.types.keys import Key
from tierkv_disk.directio import round_up
from tierkv_disk.failures import NO_SPACE
from tierkv_disk.files import sync_directory
from tierkv_disk.places import PAGE_BYTES, Place, Run, page_of, place_at, segment_of

LOG_NAME = "index.log"
TEMPORARY_NAME = "index.log.tmp"
MAGIC = b"tierkvdl"
VERSION = 2
SLOTTED_VERSION = 1
"""Its places are slots of one size instead of pages. Read, never written."""
RECORD_BYTES = 128
KEY_BYTES_MAX = 104
GROW_BYTES = 1 << 20
_READ_BYTES = 1 << 22
_WRITE_BYTES = 1 << 15

_CHECKED = struct.Struct("<Q120s")
"""Header and records alike: a checksum of the 120 bytes that follow it."""
_HEADER_BODY = struct.Struct("<8sIIQ16s80x")
_RECORD_BODY = struct.Struct("<BBHQI104s")
_RECORD = struct.Struct("<QBBHQI104s")


class RecordKind(IntEnum):
    """What a record says about its key."""

    PUT = 1
    DELETE = 2
    PART = 3


class Record(NamedTuple):
    """One line of the log.

    A frame in one run is a PUT with part 0. One in n runs is n - 1 PARTs, numbered from 0, then a PUT with part n - 1.
    place, frame_bytes: where this part of the frame begins, and its length. All but kind and key are zero for DELETE.
    """

    kind: int
    key: Key
    part: int = 0
    place: Place = Place(0)
    frame_bytes: int = 0


class LogIdentity(NamedTuple):
    """What a log is bound to. The fingerprint also seeds every checksum: records of another namespace never pass."""

    fingerprint: bytes

    @property
    def seed(self) -> int:
        """Seed of the record checksums."""
        return int.from_bytes(self.fingerprint[:8], "little")


@dataclass(slots=True)
class LogHealth:
    """What reading a log met.

    records: good ones.
    damaged: bad ones with good ones after them: the medium lost them, for a crash damages only the tail.
    torn_bytes: bytes after the last good record that are not zero: the append that a crash cut short.
    header_ok: the first 128 bytes are what they should be.
    slotted: the log is of version 1.
    """

    records: int = 0
    damaged: int = 0
    torn_bytes: int = 0
    header_ok: bool = True
    slotted: bool = False


def encode_header(identity: LogIdentity) -> bytes:
    """The first 128 bytes of a log."""
    return _encode_header(identity, VERSION, 0)


def _encode_header(identity: LogIdentity, version: int, slot_bytes: int) -> bytes:
    body = _HEADER_BODY.pack(MAGIC, version, RECORD_BYTES, slot_bytes, identity.fingerprint)
    return _CHECKED.pack(xxhash.xxh3_64_intdigest(body), body)


def encode_record(record: Record, seed: int) -> bytes:
    """The 128 bytes of a record."""
    kind, key, part, place, frame_bytes = record
    body = _RECORD_BODY.pack(kind, len(key), part, place, frame_bytes, key)
    return _CHECKED.pack(xxhash.xxh3_64_intdigest(body, seed), body)


def records_of(key: Key, runs: Sequence[Run], frame_bytes: int) -> Iterator[Record]:
    """What the log has to say of a frame in these runs."""
    last = len(runs) - 1
    for part, run in enumerate(runs):
        size = min(frame_bytes, run.pages * PAGE_BYTES)
        yield Record(RecordKind.PUT if part == last else RecordKind.PART, key, part, run.place, size)
        frame_bytes -= size


Row = tuple[int, Key, int, Place, int]
"""The fields of a :class:`Record`; a plain tuple is made in a third of the time."""


def read_records(fd: int, identity: LogIdentity, health: LogHealth, slot_bytes: int = 0) -> Iterator[Row]:
    """Every good record of a log, oldest first. ``health`` is complete when all were taken.

    Args:
        fd: the log.
        identity: whose log it should be.
        health: filled in.
        slot_bytes: of a namespace of format 1; the log may be of that version then.

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
    # Written for speed: there are millions.
    while data := os.pread(fd, _READ_BYTES, position):
        position += len(data)
        whole = len(data) - len(data) % RECORD_BYTES
        view = memoryview(data)[:whole]
        sums = [digest(view[start : start + 120], seed) for start in range(8, whole, RECORD_BYTES)]
        for (checksum, kind, key_bytes, part, place, size, key), found in zip(
            _RECORD.iter_unpack(view), sums, strict=True
        ):
            if checksum != found or kind not in kinds:
                bad += 1
                torn_bytes += RECORD_BYTES if checksum or kind or place or size or any(key) else 0
                continue
            if bad:
                health.damaged += bad
                bad = torn_bytes = 0
            records += 1
            if slot_pages != 1:
                place = place_at(segment_of(place), page_of(place) * slot_pages)  # noqa: PLW2901 - the same, in pages
            yield kind, key[:key_bytes], part, place, size
        # Only the last read, at the end of the file, can end off a record.
        torn_bytes += len(data) - whole if any(data[whole:]) else 0
    health.records, health.torn_bytes = records, torn_bytes


class IndexLog:
    """An open log, ready for appends. One thread at a time.

    sync: force every append to the device.
    """

    def __init__(self, fd: int, identity: LogIdentity, end: int, *, sync: bool) -> None:
        self._fd = fd
        self._identity = identity
        self._end = end
        self._size = os.fstat(fd).st_size
        self._sync = sync
        self._broken = ""

    @classmethod
    def create(cls, directory: Path, identity: LogIdentity, records: Iterable[Record], *, sync: bool) -> IndexLog:
        """Write a new log with these records and put it in the place of the old one, in one step.

        Raises:
            OSError: nothing has changed then.
        """
        temporary = directory / TEMPORARY_NAME
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            # Small writes: each gives other threads a chance at the interpreter while a long log is rewritten.
            with os.fdopen(os.dup(fd), "wb", buffering=_WRITE_BYTES) as file:
                file.write(encode_header(identity))
                for record in records:
                    file.write(encode_record(record, identity.seed))
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
            # The new file is in place, but a power cut could bring the old one back: nothing may be added to either.
            log._broken = f"the index log could not be replaced: {error}; reopen the tier"
        return log

    @classmethod
    def resume(cls, fd: int, identity: LogIdentity, health: LogHealth, *, sync: bool) -> IndexLog:
        """Go on after the last good record of a log without damage; appends overwrite a torn tail."""
        return cls(fd, identity, RECORD_BYTES * (1 + health.records), sync=sync)

    @property
    def broken(self) -> str:
        """Why the log takes no more appends; empty while it does."""
        return self._broken

    @property
    def records(self) -> int:
        """Records in the file, live and dead."""
        return self._end // RECORD_BYTES - 1

    def append(self, records: Iterable[Record]) -> None:
        """Append all or none.

        Raises:
            OSError: none was appended. If the device refused to sync, what it holds is unknown: the log takes nothing
                more until the tier is opened again.
        """
        if self._broken:
            raise OSError(errno.EIO, self._broken)
        seed = self._identity.seed
        data = b"".join(encode_record(record, seed) for record in records)
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
                self._broken = f"the index log cannot be synced since: {error}; reopen the tier"
                raise
        self._end += len(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _make_room(self, size: int) -> None:
        """Zero-fill ahead, so that half a step is left for deletes; fails only if ``size`` itself has no room."""
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
        self._broken = f"the index log cannot be written since: {error}; reopen the tier"
        if error.errno in NO_SPACE:
            os.ftruncate(self._fd, self._end)
            self._size = self._end
            self._broken = ""

    def _write(self, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self._fd, view, offset)
            view, offset = view[count:], offset + count
