"""Slots between being granted and being sealed: what says that they are no frames yet, and what workers leave there.

Only for slots in host memory that one stack's processes share, and whose workers have no other way to report: a frame
at rest never looks like this, because sealing overwrites all of it. The first sixteen bytes are zeros until a seal
writes the header; behind them stands a checksum per worker, of its part of the payload.
"""

from __future__ import annotations

from tierkv.frames.frame import CHECKSUM_BYTES, MAGIC

_NOTHING = bytes(CHECKSUM_BYTES)


def mark_unsealed(slot: memoryview, parts: int) -> None:
    """Make sure that nothing in the slot passes for a frame, or for the report of one of ``parts`` workers."""
    length = CHECKSUM_BYTES * (1 + (parts if parts > 1 else 0))
    slot[:length] = bytes(length)


def is_sealed(slot: memoryview) -> bool:
    """Whether a seal has been written since the slot was opened."""
    return bytes(slot[: len(MAGIC)]) == MAGIC


def put_part_checksum(slot: memoryview, part: int, digest: bytes) -> None:
    """A worker's part is in place, and this is its checksum."""
    start = CHECKSUM_BYTES * (1 + part)
    slot[start : start + CHECKSUM_BYTES] = digest


def part_checksums(slot: memoryview, parts: int) -> list[bytes] | None:
    """The checksums that all workers have left; None if one has not."""
    table = bytes(slot[CHECKSUM_BYTES : CHECKSUM_BYTES * (1 + parts)])
    digests = [table[start : start + CHECKSUM_BYTES] for start in range(0, len(table), CHECKSUM_BYTES)]
    return None if _NOTHING in digests else digests
