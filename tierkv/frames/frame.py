r"""Layout of a frame: one chunk at rest, and in every slot of the host arena.

A frame is one header page of 4096 bytes, then the stored payload. All numbers are little-endian and unsigned:

====== ====== =================== ==============================================================================
offset  bytes field               meaning
====== ====== =================== ==============================================================================
     0      8 magic               ``89 54 49 45 52 4B 56 0A`` (``\x89TIERKV\n``)
     8      2 format version      1
    10      2 flags               bits 0 to 3, see below; every other bit is reserved
    12      4 header length       4096
    16     16 codec               name of the codec of the stored payload, ASCII, NUL padded; ``none`` is raw
    32     16 namespace           fingerprint of the namespace (:mod:`tierkv.types.namespace`)
    48      2 key length          1 to 256
    50    256 key                 NUL padded
   306      8 raw bytes           length of the payload before the codec
   314      8 stored bytes        length of the stored payload
   322     16 stored checksum     XXH3-128 of the stored payload, canonical (big-endian) digest
   338     16 raw checksum        XXH3-128 of the raw payload; equal to the stored checksum for ``none``
   354      8 header checksum     XXH3-64 of the bytes 0 to 353, and of the codec's notes where there are any
   362   3670 zero                reserved, all zero (behind the part table, where there is one)
  4032     64 codec's notes       such as a nonce; zero unless flag bit 3 is set
  4096      * stored payload      ``stored bytes`` long
     *      * padding             zeros, to a multiple of 4096 for ``none``, otherwise of the tier's alignment
====== ====== =================== ==============================================================================

The raw checksum is computed once, when the payload leaves the GPU, and travels through every tier and codec.

If several workers write one payload, each computes the checksum of its own part. All parts have one length. Such a
frame has flag bit 0 set and a part table at offset 362: the number of parts (2 bytes, at least 2), then one XXH3-128
digest per part, in order. Its raw checksum is the XXH3-128 of these digests, so the payload is read only once.

Flag bit 1: the raw checksum and the digests of parts are withheld, and zero here, because the payload is encrypted or
decodes to an approximation. Bit 2: the raw payload is an approximation of the one that left the GPU. Bit 3: the codec's
notes are in use.

All functions are pure and may be called on any thread; those that hash or fill a payload release the GIL meanwhile.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import xxhash

from tierkv.abc.codec import CODEC_NOTES_BYTES
from tierkv.errors import CorruptFrameError
from tierkv.types.namespace import FINGERPRINT_BYTES

HEADER_BYTES = 4096
"""Length of the header page, and offset of the payload, which is thus aligned for O_DIRECT."""

FORMAT_VERSION = 1
KEY_BYTES_MAX = 256
CODEC_BYTES_MAX = 16
CHECKSUM_BYTES = 16
NO_CODEC = "none"
"""Name of the codec that stores the raw payload. Slots of the host arena hold frames of this codec only."""

MAGIC = b"\x89TIERKV\n"
_FIXED = struct.Struct("<8sHHI16s16sH256sQQ16s16s")
_HEADER_CHECKSUM = struct.Struct("<Q")
_USED_BYTES = _FIXED.size + _HEADER_CHECKSUM.size
ZEROS = bytes(HEADER_BYTES)
_UNUSED = bytes(HEADER_BYTES - _USED_BYTES)
_RAW = NO_CODEC.encode("ascii")
_CLAIMS = struct.Struct("<Q16s")
_CLAIMS_AT = _FIXED.size - struct.calcsize("<Q16s16s")
"""Offset of the stored length. Behind it is the raw checksum, which in a raw frame equals the stored one."""
_FLAG_PARTS, _FLAG_WITHHELD, _FLAG_APPROXIMATE, _FLAG_NOTES = 1, 2, 4, 8
_FLAGS = _FLAG_PARTS | _FLAG_WITHHELD | _FLAG_APPROXIMATE | _FLAG_NOTES
_NOTES = HEADER_BYTES - CODEC_NOTES_BYTES
_PART_COUNT = struct.Struct("<H")
_PART_TABLE = _USED_BYTES + _PART_COUNT.size

PARTS_MIN = 2
PARTS_MAX = (_NOTES - _PART_TABLE) // CHECKSUM_BYTES
"""Maximum number of parts that fit the header page."""


class CutFrameError(CorruptFrameError):
    """A frame ends before its header, or before the payload that its header claims."""


class NoFrameError(CorruptFrameError):
    """The bytes do not begin as a frame does: they are of another program, or a page that a proxy sent instead."""


class OtherFrameError(CorruptFrameError):
    """A header is whole, and that of another chunk: a proxy mixed up its answers, or a file has another's name."""


class FrameHeader(NamedTuple):
    """Fields of a header page that differ from frame to frame. Checksums are XXH3-128 digests.

    A named tuple, because one is made per chunk and transfer: a frozen dataclass takes three times as long to make.
    """

    codec: str
    namespace: bytes
    key: bytes
    raw_bytes: int
    stored_bytes: int
    stored_checksum: bytes
    raw_checksum: bytes
    part_checksums: tuple[bytes, ...] = ()
    """One per part; empty if the payload was checksummed as a whole."""
    withheld: bool = False
    """Whether raw_checksum and part_checksums are zeros. Never for codec ``none``."""
    approximate: bool = False
    """Whether the raw payload is an approximation of the one that left the GPU."""
    notes: bytes = b""
    """Notes of the codec; empty or ``CODEC_NOTES_BYTES`` long."""


def checksum(buffer: bytes | memoryview) -> bytes:
    """Return the XXH3-128 of a buffer, as sixteen bytes. It detects damage, not forgery."""
    return xxhash.xxh3_128_digest(buffer)


def checksum_of_pieces(pieces: Iterable[Any]) -> bytes:
    """Return the checksum of a buffer whose pieces come one after the other."""
    rest = iter(pieces)
    first, second = next(rest, b""), next(rest, None)
    if second is None:
        return xxhash.xxh3_128_digest(first)
    hasher = xxhash.xxh3_128(first)
    hasher.update(second)
    for piece in rest:
        hasher.update(piece)
    return hasher.digest()


def checksum_of_parts(part_checksums: Sequence[bytes]) -> bytes:
    """Return the raw checksum of a payload of several parts."""
    return checksum(b"".join(part_checksums))


def pad(length: int, alignment: int) -> int:
    """Round ``length`` up to a multiple of ``alignment``, in bytes."""
    return -(-length // alignment) * alignment


def frame_bytes(raw_bytes: int) -> int:
    """Return the length of a frame that stores ``raw_bytes`` of payload without a codec, padding included."""
    return HEADER_BYTES + pad(raw_bytes, HEADER_BYTES)


def pack_header(header: FrameHeader, out: memoryview) -> None:
    """Write the header page to the first 4096 bytes of ``out``.

    Raises:
        ValueError: a field has an invalid length, or ``out`` is shorter than a page.
    """
    codec = header.codec.encode("ascii")
    if not 1 <= len(codec) <= CODEC_BYTES_MAX:
        raise ValueError(f"codec name {header.codec!r} must have 1 to {CODEC_BYTES_MAX} ASCII characters")
    if not 1 <= len(header.key) <= KEY_BYTES_MAX:
        raise ValueError(f"a key has 1 to {KEY_BYTES_MAX} bytes, this one has {len(header.key)}: {header.key.hex()}")
    digests = (header.namespace, header.stored_checksum, header.raw_checksum)
    if not len(header.namespace) == len(header.stored_checksum) == len(header.raw_checksum) == FINGERPRINT_BYTES:
        raise ValueError(f"namespace and checksums have {FINGERPRINT_BYTES} bytes each, got {digests}")
    if len(header.notes) not in {0, CODEC_NOTES_BYTES}:
        raise ValueError(f"a codec's notes have {CODEC_NOTES_BYTES} bytes, got {len(header.notes)}")
    parts = _pack_parts(header.part_checksums) if header.part_checksums else b""
    if len(out) < HEADER_BYTES:
        raise ValueError(f"a header needs {HEADER_BYTES} bytes, the buffer has {len(out)}")
    fixed = _FIXED.pack(
        MAGIC,
        FORMAT_VERSION,
        _FLAG_PARTS * bool(parts)
        | _FLAG_WITHHELD * header.withheld
        | _FLAG_APPROXIMATE * header.approximate
        | _FLAG_NOTES * bool(header.notes),
        HEADER_BYTES,
        codec,
        header.namespace,
        len(header.key),
        header.key,
        header.raw_bytes,
        header.stored_bytes,
        header.stored_checksum,
        header.raw_checksum,
    )
    out[: len(fixed)] = fixed
    _HEADER_CHECKSUM.pack_into(out, len(fixed), xxhash.xxh3_64_intdigest(fixed + header.notes))
    end = _USED_BYTES + len(parts)
    if parts:
        out[_USED_BYTES:end] = parts
    out[end:HEADER_BYTES] = ZEROS[end:]
    if header.notes:
        out[_NOTES:HEADER_BYTES] = header.notes


def raw_page(namespace: bytes, key: bytes, raw_bytes: int, raw_checksum: bytes) -> bytes:
    """Return the header page of a raw frame without parts, as :func:`pack_header` writes it.

    Nothing else determines such a page, so one comparison checks a page. Nearly all frames are such; this takes a third
    of the time of packing, or parsing, field by field.

    Raises:
        ValueError: key or checksum have an invalid length.
    """
    if not 1 <= len(key) <= KEY_BYTES_MAX:
        raise ValueError(f"a key has 1 to {KEY_BYTES_MAX} bytes, this one has {len(key)}: {key.hex()}")
    if len(raw_checksum) != CHECKSUM_BYTES:
        raise ValueError(f"a checksum has {CHECKSUM_BYTES} bytes, got {raw_checksum!r}")
    fixed = _FIXED.pack(
        MAGIC, FORMAT_VERSION, 0, HEADER_BYTES, _RAW, namespace, len(key), key,
        raw_bytes, raw_bytes, raw_checksum, raw_checksum,
    )  # fmt: skip
    return fixed + _HEADER_CHECKSUM.pack(xxhash.xxh3_64_intdigest(fixed)) + _UNUSED


def claims_of(page: bytes) -> tuple[int, bytes]:
    """Length and checksum of the stored payload, as a page claims without any check."""
    stored_bytes, digest = _CLAIMS.unpack_from(page, _CLAIMS_AT)
    return stored_bytes, digest


def _pack_parts(part_checksums: Sequence[bytes]) -> bytes:
    """Return the bytes of the part table."""
    if not PARTS_MIN <= len(part_checksums) <= PARTS_MAX:
        raise ValueError(f"a frame has {PARTS_MIN} to {PARTS_MAX} parts, or none, got {len(part_checksums)}")
    if any(len(digest) != CHECKSUM_BYTES for digest in part_checksums):
        raise ValueError(f"checksums of parts have {CHECKSUM_BYTES} bytes each, got {part_checksums!r}")
    return _PART_COUNT.pack(len(part_checksums)) + b"".join(part_checksums)


def parse_header(page: memoryview, *, verify: bool = True) -> FrameHeader:
    """Read a header page. ``verify=False`` skips the header checksum, nothing else.

    Raises:
        CorruptFrameError: :func:`pack_header` did not write this page; the message names the first bad field.
    """
    if len(page) < HEADER_BYTES:
        raise CutFrameError(f"frame is cut off: {len(page)} bytes, the header alone has {HEADER_BYTES}")
    fixed = bytes(page[: _FIXED.size])
    magic, version, flags, length, codec, namespace, key_bytes, key, raw, stored, stored_sum, raw_sum = _FIXED.unpack(
        fixed
    )
    # Every chunk that a tier moves passes here: no call per field of a header that is as it should be.
    if magic != MAGIC or version != FORMAT_VERSION or flags & ~_FLAGS or length != HEADER_BYTES:
        _expect_magic(magic)
        expect_field("format version", version, FORMAT_VERSION)
        expect_field("flags", flags, flags & _FLAGS)
        expect_field("header length", length, HEADER_BYTES)
    notes = bytes(page[_NOTES:HEADER_BYTES]) if flags & _FLAG_NOTES else b""
    if verify:
        (header_sum,) = _HEADER_CHECKSUM.unpack_from(page, _FIXED.size)
        found_sum = xxhash.xxh3_64_intdigest(fixed + notes if notes else fixed)
        if header_sum != found_sum:
            expect_field("header checksum", header_sum, found_sum)
    if not 1 <= key_bytes <= KEY_BYTES_MAX:
        raise CorruptFrameError(f"frame field 'key length' is {key_bytes}, allowed are 1 to {KEY_BYTES_MAX}")
    name = _codec_name(codec)
    key_end, key = key[key_bytes:], key[:key_bytes]
    # bytes() first: comparing a memoryview goes item by item and is thirty times slower than copy and compare.
    if not flags and bytes(page[_USED_BYTES:HEADER_BYTES]) == _UNUSED and key_end == ZEROS[: len(key_end)]:
        return FrameHeader(name, namespace, key, raw, stored, stored_sum, raw_sum)
    parts = _parse_parts(page) if flags & _FLAG_PARTS else ()
    withheld = bool(flags & _FLAG_WITHHELD)
    if parts and verify and not withheld:
        expect_field("raw checksum", raw_sum, checksum_of_parts(parts))
    used = _PART_TABLE + CHECKSUM_BYTES * len(parts) if parts else _USED_BYTES
    rest = bytes(page[used : _NOTES if notes else HEADER_BYTES])
    secrets = b"".join((raw_sum, *parts)) if withheld else b""
    for field, zeros in (("key", key_end), ("zero", rest), ("raw checksum", secrets)):
        if zeros != ZEROS[: len(zeros)]:
            raise CorruptFrameError(f"frame field {field!r} is not zero to its end")
    expect_field("flags", flags, flags & ~_FLAG_WITHHELD if name == NO_CODEC else flags)
    return FrameHeader(
        name, namespace, key, raw, stored, stored_sum, raw_sum, parts, withheld, bool(flags & _FLAG_APPROXIMATE), notes
    )


def _parse_parts(page: memoryview) -> tuple[bytes, ...]:
    """Return the digests of the part table. The raw checksum covers them, and the header checksum covers that."""
    (count,) = _PART_COUNT.unpack_from(page, _USED_BYTES)
    if not PARTS_MIN <= count <= PARTS_MAX:
        raise CorruptFrameError(f"frame field 'part count' is {count}, allowed are {PARTS_MIN} to {PARTS_MAX}")
    table = bytes(page[_PART_TABLE : _PART_TABLE + CHECKSUM_BYTES * count])
    return tuple(table[start : start + CHECKSUM_BYTES] for start in range(0, len(table), CHECKSUM_BYTES))


@lru_cache(maxsize=64)
def _codec_name(field: bytes) -> str:
    name = field.rstrip(b"\0")
    if not name or not name.isascii() or not name.decode("ascii").isprintable():
        raise CorruptFrameError(f"frame field 'codec' is {field!r}, not a printable ASCII name")
    return name.decode("ascii")


def _expect_magic(found: bytes) -> None:
    if found != MAGIC:
        raise NoFrameError(f"frame field 'magic' is {_show(found)}, expected {_show(MAGIC)}")


def expect_field(field: str, found: object, expected: object) -> None:
    """Compare a field of a frame with its expected value.

    Raises:
        CorruptFrameError: they differ; the message names the field.
    """
    if found != expected:
        raise CorruptFrameError(f"frame field {field!r} is {_show(found)}, expected {_show(expected)}")


def _show(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)
