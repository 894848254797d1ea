"""Sealing and checking of frames in one namespace.

Sealing writes a header over a payload that is in place; checking verifies a frame before its payload is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tierkv.errors import CorruptFrameError
from tierkv.frames.frame import (
    HEADER_BYTES,
    KEY_BYTES_MAX,
    NO_CODEC,
    ZEROS,
    CutFrameError,
    FrameHeader,
    OtherFrameError,
    checksum,
    checksum_of_parts,
    claims_of,
    expect_field,
    frame_bytes,
    pack_header,
    parse_header,
    raw_page,
)
from tierkv.types.namespace import FINGERPRINT_BYTES


class FrameSealer:
    """Seals and checks frames of one namespace. Stateless after construction: any number of threads may share it.

    Args:
        namespace: fingerprint, sixteen bytes.
        verify: False skips the comparison of checksums, and nothing else. It exists for the test that shows that
            unchecked corruption changes tokens.

    Raises:
        ValueError: the fingerprint has another length.
    """

    def __init__(self, namespace: bytes, *, verify: bool = True) -> None:
        if len(namespace) != FINGERPRINT_BYTES:
            raise ValueError(f"a namespace fingerprint has {FINGERPRINT_BYTES} bytes, got {len(namespace)}")
        self.namespace = namespace
        self.verify = verify

    def seal(self, slot: memoryview, key: bytes, raw_bytes: int) -> None:
        """Seal a slot whose payload is in place: write the header before it and zeros behind it.

        Args:
            slot: writable, at least ``frame_bytes(raw_bytes)`` long; the payload starts at ``HEADER_BYTES``.
            key: the chunk's key.
            raw_bytes: length of the payload.

        Raises:
            ValueError: the payload does not fit the slot, or the key does not fit a header.
        """
        self._require_room(slot, raw_bytes)
        self.seal_as(slot, key, raw_bytes, checksum(slot[HEADER_BYTES : HEADER_BYTES + raw_bytes]))

    def seal_parts(self, slot: memoryview, key: bytes, raw_bytes: int, part_checksums: Sequence[bytes]) -> None:
        """Seal a slot from the checksums of its parts, which the workers computed. Reads no payload.

        Raises:
            ValueError: fewer than two parts, too many parts, parts of different lengths; or as in :meth:`seal`.
        """
        if raw_bytes % max(1, len(part_checksums)):
            raise ValueError(f"a payload of {raw_bytes} bytes has no {len(part_checksums)} parts of one length")
        self.seal_as(slot, key, raw_bytes, checksum_of_parts(part_checksums), tuple(part_checksums))

    def seal_as(  # noqa: PLR0913 - the fields of a header
        self,
        slot: memoryview,
        key: bytes,
        raw_bytes: int,
        raw_checksum: bytes,
        part_checksums: tuple[bytes, ...] = (),
        *,
        approximate: bool = False,
    ) -> None:
        """Seal a slot with checksums that were computed at the origin of the payload.

        Raises:
            ValueError: as in :meth:`seal`.
        """
        end = self._require_room(slot, raw_bytes)
        payload_end = HEADER_BYTES + raw_bytes
        if end > payload_end:
            slot[payload_end:end] = ZEROS[: end - payload_end]
        if not part_checksums and not approximate:
            slot[:HEADER_BYTES] = raw_page(self.namespace, key, raw_bytes, raw_checksum)
            return
        pack_header(
            FrameHeader(
                NO_CODEC, self.namespace, key, raw_bytes, raw_bytes, raw_checksum, raw_checksum, part_checksums,
                approximate=approximate,
            ),
            slot,
        )  # fmt: skip

    @staticmethod
    def payload_checksums(slot: memoryview, header: FrameHeader) -> tuple[bytes, tuple[bytes, ...]]:
        """Compute the raw checksum of the payload in a slot, and the checksums of its parts.

        Args:
            slot: holds the raw payload.
            header: gives its length and the number of its parts.

        Raises:
            CorruptFrameError: the payload cannot be cut into parts of one length.
        """
        payload = slot[HEADER_BYTES : HEADER_BYTES + header.raw_bytes]
        if not header.part_checksums:
            return checksum(payload), ()
        size = _part_bytes(header)
        parts = tuple(checksum(payload[start : start + size]) for start in range(0, header.raw_bytes, size))
        return checksum_of_parts(parts), parts

    def check_slot(self, slot: memoryview, key: bytes, *, payload: bool = True) -> FrameHeader:
        """Check that a slot holds the raw frame of ``key``. ``payload=False`` skips the payload's checksum.

        Raises:
            CorruptFrameError: it does not; the message names the difference.
        """
        header = self.check_frame(slot, key, payload=payload)
        if header.codec != NO_CODEC:
            expect_field("codec", header.codec, NO_CODEC)
        if frame_bytes(header.raw_bytes) > len(slot):
            raise CorruptFrameError(f"frame of {frame_bytes(header.raw_bytes)} bytes is cut off at {len(slot)}")
        return header

    def check_frame(self, frame: memoryview, key: bytes, *, payload: bool = True) -> FrameHeader:
        """Check a frame of any codec; its padding may be missing. ``payload=False`` skips the payload's checksum.

        Raises:
            CorruptFrameError: it is not the frame of ``key`` in this namespace, or is damaged.
        """
        return self._raw_header(frame, key, payload=payload) or self._check_by_field(frame, key, payload=payload)

    def _check_by_field(self, frame: memoryview, key: bytes, *, payload: bool) -> FrameHeader:
        header = parse_header(frame, verify=self.verify)
        if header.namespace != self.namespace:
            expect_field("namespace", header.namespace, self.namespace)
        if header.key != key:
            raise OtherFrameError(f"frame field 'key' is {header.key.hex()}, expected {key.hex()}")
        end = HEADER_BYTES + header.stored_bytes
        if end > len(frame):
            raise CutFrameError(f"frame of {end} bytes is cut off at {len(frame)}")
        is_raw = header.codec == NO_CODEC
        if is_raw and header.stored_bytes != header.raw_bytes:
            expect_field("stored bytes", header.stored_bytes, header.raw_bytes)
        if self.verify:
            if is_raw and header.stored_checksum != header.raw_checksum:
                expect_field("stored checksum", header.stored_checksum, header.raw_checksum)
            if payload and is_raw and header.part_checksums:
                self.check_parts(frame, header)
            elif payload:
                found = checksum(frame[HEADER_BYTES:end])
                if found != header.stored_checksum:
                    expect_field("stored checksum", header.stored_checksum, found)
        return header

    def _raw_header(self, frame: memoryview, key: bytes, *, payload: bool) -> FrameHeader | None:
        """Return the header of an undamaged raw frame without parts; None where a check by field has to decide."""
        page = bytes(frame[:HEADER_BYTES])
        if len(page) < HEADER_BYTES or not (self.verify and 1 <= len(key) <= KEY_BYTES_MAX):
            return None
        raw_bytes, digest = claims_of(page)
        end = HEADER_BYTES + raw_bytes
        if end > len(frame) or page != raw_page(self.namespace, key, raw_bytes, digest):
            return None
        if payload and checksum(frame[HEADER_BYTES:end]) != digest:
            return None
        return FrameHeader(NO_CODEC, self.namespace, key, raw_bytes, raw_bytes, digest, digest)

    def check_raw(self, slot: memoryview, header: FrameHeader) -> None:
        """Check that the payload in a slot has the raw checksum of ``header``.

        Raises:
            CorruptFrameError: it has another one.
        """
        if header.part_checksums:
            self.check_parts(slot, header)
        elif self.verify:
            raw = slot[HEADER_BYTES : HEADER_BYTES + header.raw_bytes]
            expect_field("raw checksum", checksum(raw), header.raw_checksum)

    def check_parts(self, slot: memoryview, header: FrameHeader, parts: Iterable[int] | None = None) -> None:
        """Check the checksums of parts of a raw payload. parts: their numbers; None: all.

        Raises:
            CorruptFrameError: one is damaged, or the payload cannot be cut into parts of one length.
        """
        part_bytes = _part_bytes(header)
        for part in range(len(header.part_checksums)) if parts is None else parts:
            start = HEADER_BYTES + part * part_bytes
            if self.verify:
                expect_field(
                    f"checksum of part {part}",
                    checksum(slot[start : start + part_bytes]),
                    header.part_checksums[part],
                )

    @staticmethod
    def _require_room(slot: memoryview, raw_bytes: int) -> int:
        end = frame_bytes(raw_bytes)
        if raw_bytes < 0 or end > len(slot):
            raise ValueError(f"a payload of {raw_bytes} bytes does not fit a slot of {len(slot)} bytes")
        return end


def _part_bytes(header: FrameHeader) -> int:
    part_bytes, rest = divmod(header.raw_bytes, len(header.part_checksums))
    if rest or not part_bytes:
        raise CorruptFrameError(
            f"a payload of {header.raw_bytes} bytes has no {len(header.part_checksums)} parts of one length"
        )
    return part_bytes
