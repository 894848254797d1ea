"""Unsealed slots: a marker that a slot holds no frame yet, and room for the checksums of the workers' parts.

Only for slots in host memory that the processes of one stack share, and whose workers have no other channel for their
checksums. A frame at rest never has this form, because sealing overwrites all of it. The first sixteen bytes are zeros
until the header is written. Then follows one checksum per worker, of its part of the payload.
"""

from __future__ import annotations

from tierkv.frames.frame import CHECKSUM_BYTES, MAGIC

_NO_CHECKSUM = bytes(CHECKSUM_BYTES)


def mark_unsealed(slot: memoryview, parts: int) -> None:
    """Clear the header's magic, and the checksums of ``parts`` workers, that the slot may hold."""
    length = CHECKSUM_BYTES * (1 + (parts if parts > 1 else 0))
    slot[:length] = bytes(length)


def is_sealed(slot: memoryview) -> bool:
    """Whether a header was written since :func:`mark_unsealed`."""
    return bytes(slot[: len(MAGIC)]) == MAGIC


def put_part_checksum(slot: memoryview, part: int, digest: bytes) -> None:
    """Store the checksum of one worker's part, which is in place."""
    start = CHECKSUM_BYTES * (1 + part)
    slot[start : start + CHECKSUM_BYTES] = digest


def part_checksums(slot: memoryview, parts: int) -> list[bytes] | None:
    """Return the checksums of all parts; None if one is missing."""
    table = bytes(slot[CHECKSUM_BYTES : CHECKSUM_BYTES * (1 + parts)])
    digests = [table[start : start + CHECKSUM_BYTES] for start in range(0, len(table), CHECKSUM_BYTES)]
    return None if _NO_CHECKSUM in digests else digests
