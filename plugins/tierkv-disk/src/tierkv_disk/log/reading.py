"""Reading of the index log at open: all good records in order, and what is damaged. Written for speed."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from tierkv.types.keys import Key
from tierkv_disk.extents import EXTENT, EXTENT_FIELDS, PAGE_BYTES, Extent, read_extent
from tierkv_disk.log.index_log import (
    KEY_BYTES_MAX,
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
_BODY = struct.Struct("<8x120s")
_ZEROS = bytes(1 << 16)
_KEY_AT = 24
_FIELDS = {
    "checksum": ("<u8", 0),
    "kind": ("u1", 8),
    "key_bytes": ("u1", 9),
    "part": ("<u2", 10),
    "address": ("<u8", 12),
    "frame_bytes": ("<u4", 20),
    "rank": ("<u8", RECORD_BYTES - 8),
}
"""Type and place of each field of a record, but for the key."""
_RECORD = np.dtype(
    {
        "names": list(_FIELDS),
        "formats": [kind for kind, _ in _FIELDS.values()],
        "offsets": [place for _, place in _FIELDS.values()],
        "itemsize": RECORD_BYTES,
    }
)


class Records(NamedTuple):
    """Adjacent good records, by column."""

    kinds: npt.NDArray[np.uint8]
    keys: Sequence[Key]
    parts: npt.NDArray[np.uint16]
    extents: Sequence[Extent]

    def stretches(self) -> Iterator[tuple[int, int, bool]]:
        """Cut the records where such of frames in one run begin or end. Yields begin, end, and whether they are such.

        Nearly all records are such, and there are millions.
        """
        is_whole = (self.kinds == PUT_KIND) & (self.parts == 0)
        edges = [0, *(np.flatnonzero(is_whole[1:] != is_whole[:-1]) + 1).tolist(), len(is_whole)]
        return zip(edges, edges[1:], is_whole[edges[:-1]].tolist(), strict=False)

    def rows(self, begin: int = 0, end: int | None = None) -> Iterator[Row]:
        """Iterate over some of the records, one by one."""
        kinds, parts = self.kinds[begin:end].tolist(), self.parts[begin:end].tolist()
        for kind, key, part, extent in zip(kinds, self.keys[begin:end], parts, self.extents[begin:end], strict=True):
            address, frame_bytes, rank = read_extent(extent)
            yield kind, key, part, address, frame_bytes, rank


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
        yield from batch.rows()


def read_batches(fd: int, identity: LogIdentity, health: LogHealth, slot_bytes: int = 0) -> Iterator[Records]:
    """Every good record of a log, oldest first, in batches. ``health`` is complete at the end of the iteration.

    Args:
        fd: descriptor of the log.
        identity: expected namespace.
        health: filled in.
        slot_bytes: slot size of a namespace of format 1, whose log may be of version 1; otherwise 0.

    Raises:
        OSError: the file cannot be read.
    """
    seed, digest = identity.seed, xxhash.xxh3_64_intdigest
    header = os.pread(fd, RECORD_BYTES, 0)
    old_header = bool(slot_bytes) and header == encode_header_of(identity, SLOTTED_VERSION, slot_bytes)
    health.header_ok = old_header or header == encode_header(identity)
    health.slotted = old_header or (bool(slot_bytes) and not health.header_ok)
    slot_pages = slot_bytes // PAGE_BYTES if health.slotted else 1
    bad = 0
    position = RECORD_BYTES
    while data := os.pread(fd, _READ_BYTES, position):
        position += len(data)
        if data == bytes(len(data)):
            data_at = _next_data(fd, position)
            bad += (data_at - position + len(data)) // RECORD_BYTES
            position = data_at
            continue
        end = len(data) - len(data) % RECORD_BYTES
        # A log ends with thousands of records of zeros, which need no look at each.
        whole = min(end, round_up(used_bytes(data), RECORD_BYTES))
        sums = [digest(body, seed) for (body,) in _BODY.iter_unpack(memoryview(data)[:whole])]
        raw = np.frombuffer(data, _RECORD, len(sums))
        is_good = (raw["checksum"] == np.array(sums, np.uint64)) & np.isin(raw["kind"], list(RecordKind))
        good = np.flatnonzero(is_good)
        tail = whole  # begin of the bad records at the end
        if len(good):
            tail = RECORD_BYTES * (int(good[-1]) + 1)
            health.damaged += bad + tail // RECORD_BYTES - len(good)
            bad = health.torn_bytes = 0
            health.records += len(good)
            yield _records_in(data, raw, good, slot_pages)
        torn = np.frombuffer(data, np.uint8)[tail:whole].reshape(-1, RECORD_BYTES).any(axis=1)
        # Only the last read, at the end of the file, can end within a record.
        health.torn_bytes += RECORD_BYTES * int(torn.sum()) + (len(data) - end if any(data[end:]) else 0)
        bad += (end - tail) // RECORD_BYTES


def _records_in(data: bytes, raw: npt.NDArray[np.void], good: npt.NDArray[np.intp], slot_pages: int) -> Records:
    """The good ones of some records. Slices of a buffer take a third of the time of a tuple per record.

    slot_pages: pages per unit of their addresses.
    """
    if len(good) < len(raw):
        raw = raw[good]
        data = b"".join([data[start : start + RECORD_BYTES] for start in (good * RECORD_BYTES).tolist()])
    extents = np.empty(len(raw), EXTENT)
    for name in EXTENT_FIELDS:
        extents[name] = raw[name]
    if slot_pages != 1:
        extents["address"] = raw["address"] >> 32 << 32 | (raw["address"] & 0xFFFF_FFFF) * slot_pages
    lengths = np.minimum(raw["key_bytes"], KEY_BYTES_MAX)
    extents["rank"][lengths > RANKED_KEY_BYTES_MAX] = 0  # the end of the key is there
    if (lengths == lengths[0]).all() and lengths[0]:
        keys = np.ndarray((len(raw),), f"V{lengths[0]}", data, _KEY_AT, (RECORD_BYTES,)).tolist()
    else:
        starts = range(_KEY_AT, len(data), RECORD_BYTES)
        keys = [data[start : start + length] for start, length in zip(starts, lengths.tolist(), strict=False)]
    return Records(raw["kind"], keys, raw["part"], extents.view(f"V{EXTENT.itemsize}").tolist())


def _next_data(fd: int, position: int) -> int:
    """Offset of the next record that is not in a hole: a file may end in a hole of any size, which would take hours."""
    try:
        found = os.lseek(fd, position, os.SEEK_DATA)
    except OSError:  # nothing but a hole up to the end, or a file system that does not know
        found = max(position, os.fstat(fd).st_size)
    return found - found % RECORD_BYTES
