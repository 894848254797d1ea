"""Reading of the index log at open: all good records in order, and what is damaged. Written for speed."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import xxhash

from tierkv.types.keys import Key
from tierkv_disk.extents import PAGE_BYTES, PageAddress, address_at, page_of, segment_of
from tierkv_disk.log.index_log import (
    PUT_KIND,
    RANKED_KEY_BYTES_MAX,
    RECORD_BYTES,
    SLOTTED_VERSION,
    LogHealth,
    LogIdentity,
    RecordKind,
    Row,
    encode_header,
    encode_header_of,
)
from tierkv_disk.segments.direct_io import round_up

_READ_BYTES = 1 << 22
_RECORD = struct.Struct("<QBBHQI96sQ")
_BODY = struct.Struct("<8x120s")
_ZEROS = bytes(1 << 16)
_KEY_LENGTH_AT, _KEY_AT = 9, 24
"""Places of the length of the key, and of the key, in a record."""


class Puts(NamedTuple):
    """Adjacent records of frames in one run, by column. Nearly all records are such, and there are millions."""

    keys: Sequence[Key]
    addresses: Sequence[PageAddress]
    frame_bytes: Sequence[int]
    ranks: Sequence[int]

    def rows(self) -> Iterator[Row]:
        """Iterate over the records, one by one."""
        return zip(repeat(PUT_KIND), self.keys, repeat(0), self.addresses, self.frame_bytes, self.ranks)


def used_bytes(data: bytes | bytearray) -> int:
    """Length of data without the zeros at its end. Blocks of zeros are compared at once: megabytes take no time."""
    end = len(data)
    while data.endswith(_ZEROS, 0, end):
        end -= len(_ZEROS)
    start = max(0, end - len(_ZEROS))
    return start + len(data[start:end].rstrip(b"\0")) if end else 0


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
    old_header = bool(slot_bytes) and header == encode_header_of(identity, SLOTTED_VERSION, slot_bytes)
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
        end = len(data) - len(data) % RECORD_BYTES
        # A log ends with thousands of records of zeros, which need no look at each.
        whole = min(end, round_up(used_bytes(data), RECORD_BYTES))
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
        torn_bytes += len(data) - end if any(data[end:]) else 0
        bad += (end - whole) // RECORD_BYTES
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
    if kinds.count(PUT_KIND | key_bytes << 8) < len(sums) or any(parts) or longs[:: RECORD_BYTES // 8].tolist() != sums:
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
