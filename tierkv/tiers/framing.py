"""Between a slot of the host arena and a frame at rest: checks, codecs, padding. No I/O.

A slot always holds a raw frame (codec ``none``). What lies in the backend may be encoded.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tierkv.abc.codec import CODEC_NOTES_BYTES, Codec, CodecFrame
from tierkv.errors import BackendError, CorruptFrameError, UnreadableFrameError
from tierkv.frames.frame import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    NO_CODEC,
    FrameHeader,
    FrameSealer,
    checksum,
    frame_bytes,
    pack_header,
    pad,
)

_LENGTHS = struct.Struct("<HQ")
_NO_NOTES = bytes(CODEC_NOTES_BYTES)
_NO_DIGEST = bytes(CHECKSUM_BYTES)


class NotForThisTierError(BackendError):
    """A chunk that came back from a lossy tier was to go to one that keeps exact chunks only."""


@dataclass(frozen=True, slots=True)
class FrameRules:
    """What the codec that a tier writes with does to payloads, and what the tier takes.

    lossy: the codec gives back approximations.
    conceals: nothing of a payload may lie at rest in the clear.
    accepts_lossy: the tier may hold approximations.
    """

    lossy: bool = False
    conceals: bool = False
    accepts_lossy: bool = False


EXACT_AND_CLEAR = FrameRules()


class Framer:
    """Opens and makes frames of one tier. May be used on several threads.

    Args:
        codec_name: codec of the frames that are made here.
        codecs: every codec by name, since a tier may hold frames of an earlier configuration.
        sealer: seals and checks.
        alignment: frames made here have a length that is a multiple of it.
        slot_bytes: length of the arena's slots.
        rules: of the codec that is written with.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - all that tells how frames of a tier look
        self,
        codec_name: str,
        codecs: Mapping[str, Codec],
        sealer: FrameSealer,
        alignment: int,
        slot_bytes: int,
        rules: FrameRules = EXACT_AND_CLEAR,
    ) -> None:
        self._rules = rules
        self._codec_name = codec_name
        self._codecs = codecs
        self._sealer = sealer
        self._alignment = alignment
        self._staging = StagingBuffers(slot_bytes)

    def decode_frame(self, slot: memoryview, length: int, key: bytes) -> None:
        """Check the frame of ``length`` bytes that a backend put into ``slot``, and turn it into a raw one.

        Raises:
            CorruptFrameError: it is not a whole, undamaged frame of this key and namespace.
            UnreadableFrameError: it is, but this tier cannot or must not read it.
            Exception: whatever a foreign codec raises.
        """
        header = self._sealer.examine(slot[:length], key)
        whole = pad(HEADER_BYTES + header.stored_bytes, HEADER_BYTES)
        if length > whole:
            raise CorruptFrameError(f"{length} bytes came back for a frame of {whole}")
        if frame_bytes(header.raw_bytes) > len(slot):
            raise CorruptFrameError(f"a payload of {header.raw_bytes} bytes does not fit a slot of {len(slot)}")
        if header.approximate and not self._rules.accepts_lossy:
            raise UnreadableFrameError(
                f"frame of codec {header.codec!r} holds an approximation; this tier gives exact chunks only, "
                "lossy = true would change that"
            )
        if header.codec == NO_CODEC:
            # A backend with a smaller alignment may leave the last page's padding to us; old bytes must not stay there.
            slot[length:whole] = bytes(max(0, whole - length))
        else:
            self._decode_payload(slot, header)

    def encode_frame(self, slot: memoryview, key: bytes) -> tuple[memoryview, memoryview | None]:
        """The frame to store for the chunk in ``slot``, and the staging buffer it lies in, if any.

        Give the buffer back with :meth:`release_staging` once the frame is not used any more.

        Raises:
            CorruptFrameError: the slot does not hold this key; nothing foreign is ever written.
            NotForThisTierError: it holds an approximation, and this tier keeps exact chunks.
            Exception: whatever a foreign codec raises.
        """
        # A lossy codec's frame says nothing of its payload's origin: damage must be found before, or never.
        header = self._sealer.check(slot, key, payload=self._rules.lossy)
        if header.approximate and not self._rules.accepts_lossy:
            raise NotForThisTierError("the chunk came from a lossy tier; this one keeps exact chunks only")
        raw_frame = slot[: frame_bytes(header.raw_bytes)]
        codec = None if self._codec_name == NO_CODEC else self._codecs[self._codec_name]
        if codec is None:
            return raw_frame, None
        staging = self._staging.take()
        length = 0
        try:
            length = self._encode_payload(codec, slot, header, staging)
        finally:
            if not length:
                self.release_staging(staging)
        return (staging[:length], staging) if length else (raw_frame, None)

    def release_staging(self, staging: memoryview) -> None:
        """Return a staging buffer."""
        self._staging.release(staging)

    def _encode_payload(self, codec: Codec, slot: memoryview, header: FrameHeader, staging: memoryview) -> int:
        """Make the encoded frame in ``staging``. Returns its length, or 0 where it would not be shorter at rest."""
        raw_bytes, rules = header.raw_bytes, self._rules
        raw = slot[HEADER_BYTES : HEADER_BYTES + raw_bytes].toreadonly()
        notes = bytearray(CODEC_NOTES_BYTES)
        frame = CodecFrame(_identity(self._codec_name, header), memoryview(notes), memoryview(header.raw_checksum))
        stored_bytes = codec.encode(raw, staging[HEADER_BYTES : HEADER_BYTES + raw_bytes], frame)
        if stored_bytes is None and not rules.conceals:
            return 0
        if type(stored_bytes) is not int or not 0 < stored_bytes < raw_bytes + rules.conceals:
            raise ValueError(f"codec {self._codec_name!r} encoded {raw_bytes} bytes to {stored_bytes!r}")
        end = HEADER_BYTES + stored_bytes
        length = pad(end, self._alignment)
        if length >= frame_bytes(raw_bytes) and not rules.conceals:
            return 0
        staging[end:length] = bytes(length - end)
        withheld = rules.conceals or rules.lossy
        pack_header(
            FrameHeader(
                self._codec_name,
                header.namespace,
                header.key,
                raw_bytes,
                stored_bytes,
                checksum(staging[HEADER_BYTES:end]),
                _NO_DIGEST if withheld else header.raw_checksum,
                (_NO_DIGEST,) * len(header.part_checksums) if withheld else header.part_checksums,
                withheld,
                header.approximate or rules.lossy,
                bytes(notes) if notes != _NO_NOTES else b"",
            ),
            staging,
        )
        return length

    def _decode_payload(self, slot: memoryview, header: FrameHeader) -> None:
        codec = self._codecs.get(header.codec)
        if codec is None:
            raise UnreadableFrameError(
                f"frame was written with codec {header.codec!r}; known here: {', '.join(sorted(self._codecs))}"
            )
        origin = bytearray(header.raw_checksum)  # a codec that hid it puts it here
        notes = memoryview(header.notes or _NO_NOTES)
        frame = CodecFrame(_identity(header.codec, header), notes, memoryview(origin))
        stored_end, raw_end = HEADER_BYTES + header.stored_bytes, HEADER_BYTES + header.raw_bytes
        staging = self._staging.take()
        try:
            # numpy copies without the GIL; assigning a memoryview slice would hold it.
            np.copyto(np.frombuffer(staging[:stored_end], np.uint8), np.frombuffer(slot[:stored_end], np.uint8))
            codec.decode(staging[HEADER_BYTES:stored_end].toreadonly(), slot[HEADER_BYTES:raw_end], frame)
        finally:
            self.release_staging(staging)
        raw_checksum, parts = self._checksums(slot, header, bytes(origin))
        self._sealer.seal_as(slot, header.key, header.raw_bytes, raw_checksum, parts, approximate=header.approximate)

    def _checksums(self, slot: memoryview, header: FrameHeader, origin: bytes) -> tuple[bytes, tuple[bytes, ...]]:
        """Those of the payload that was decoded, compared with what is known of its origin."""
        try:
            if not header.withheld:
                self._sealer.check_raw(slot, header)
                return header.raw_checksum, header.part_checksums
            found, parts = self._sealer.digests(slot, header)
        except CorruptFrameError as error:
            raise CorruptFrameError(
                f"codec {header.codec!r} did not give back the payload that was stored: {error}"
            ) from error
        nobody_knows = header.approximate and origin == _NO_DIGEST  # a lossy codec keeps no checksum
        if found != origin and self._sealer.verify and not nobody_knows:
            raise CorruptFrameError(f"codec {header.codec!r} did not give back the payload that was stored")
        return found, parts


def _identity(codec: str, header: FrameHeader) -> bytes:
    """What a codec may bind to a payload: of fixed lengths, or with their lengths, so that no two look alike."""
    lengths = _LENGTHS.pack(len(header.key), header.raw_bytes)
    return b"".join((b"tierkv frame 1", codec.encode("ascii").ljust(16, b"\0"), header.namespace, lengths, header.key))


class StagingBuffers:
    """A free list of page-aligned buffers.

    Copying into fresh memory runs at a tenth of the speed of copying into memory that was used before, so buffers are
    kept. There are never more of them than calls and keys per call that are under way at once, which the dispatcher
    bounds. May be used on several threads: ``list.append`` and ``list.pop`` are atomic.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """A writable buffer; its content is undefined."""
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(mmap.mmap(-1, self._buffer_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def release(self, buffer: memoryview) -> None:
        """Return a buffer that :meth:`take` gave."""
        self._free.append(buffer)
