"""Conversion between a slot of the host arena and a frame at rest: checks, codecs, padding. No I/O.

A slot always holds a raw frame (codec ``none``). A frame in the backend may be encoded. A codec needs a second buffer,
since source and target of its work must not overlap: :class:`StagingBuffers` keeps buffers of a slot's length for
that. A write encodes from the slot into a staging buffer, which the backend then reads. A read copies the encoded frame
to a staging buffer and decodes from it into the slot.
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
    CODEC_BYTES_MAX,
    HEADER_BYTES,
    NO_CODEC,
    FrameHeader,
    checksum,
    expect_field,
    frame_bytes,
    pack_header,
    pad,
)
from tierkv.frames.sealer import FrameSealer
from tierkv.types.geometry import Geometry
from tierkv.types.keys import split_key

_FACTS = struct.Struct("<HHHQ")
_WITHHELD, _APPROXIMATE = 2, 4
"""Marks of a frame that a codec may bind, as in the flags of its header."""
_NO_NOTES = bytes(CODEC_NOTES_BYTES)
_NO_DIGEST = bytes(CHECKSUM_BYTES)


class ClearFrameError(CorruptFrameError):
    """A frame in the clear in a tier whose codec conceals: a user who may write to the storage can have forged it."""


class NotForThisTierError(BackendError):
    """An approximate chunk, read from a lossy tier, cannot be written to a tier that keeps exact chunks only."""


@dataclass(frozen=True, slots=True)
class FrameRules:
    """Properties of the codec that a tier writes with, and of the chunks that the tier accepts."""

    lossy: bool = False
    """Whether the codec decodes to approximations."""
    conceals: bool = False
    """Whether no payload, nor a checksum of it, may be at rest in the clear."""
    accepts_lossy: bool = False
    """Whether the tier may hold approximations."""
    accepts_clear: bool = False
    """Whether a tier whose codec conceals reads frames of other codecs. A user who may write there can forge them."""


EXACT_AND_CLEAR = FrameRules()


class Framer:
    """Decodes and encodes the frames of one tier. May be used on several threads.

    Args:
        codec_name: codec of the frames that are encoded here.
        codecs: every codec by name, since a tier may hold frames of an earlier configuration.
        sealer: seals and checks frames of the stack's namespace.
        alignment: the length of an encoded frame is a multiple of it, in bytes.
        slot_bytes: length of the arena's slots.
        rules: properties of the codec and of the tier.
        geometry: payload bytes of each group's chunks, and number of parts. None: not checked.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - together they define the form of a tier's frames
        self,
        codec_name: str,
        codecs: Mapping[str, Codec],
        sealer: FrameSealer,
        alignment: int,
        slot_bytes: int,
        rules: FrameRules = EXACT_AND_CLEAR,
        geometry: Geometry | None = None,
    ) -> None:
        self._rules = rules
        self._geometry = geometry
        self._codec_name = codec_name
        self._codecs = codecs
        self._sealer = sealer
        self._alignment = alignment
        self._staging = StagingBuffers(slot_bytes)

    def decode_frame(self, slot: memoryview, length: int, key: bytes) -> bool:
        """Check the frame of ``length`` bytes that a backend put into ``slot``, and decode it in place to a raw frame.

        Returns:
            Whether the frame was in the clear although the tier's codec conceals.

        Raises:
            ClearFrameError: it was, and the tier does not accept that.
            CorruptFrameError: it is not a complete, undamaged frame of this key and namespace.
            UnreadableFrameError: the frame is intact, but this tier cannot or must not decode it.
            Exception: any error of a foreign codec.
        """
        header = self._sealer.check_frame(slot if length == len(slot) else slot[:length], key)
        is_clear = self._rules.conceals and header.codec != self._codec_name
        if is_clear and not self._rules.accepts_clear:
            raise ClearFrameError(
                f"frame of codec {header.codec!r} is in the clear, and the tier's codec is {self._codec_name!r}: it is "
                "deleted, and the chunk is computed again; accept_clear = true would read such frames"
            )
        whole = pad(HEADER_BYTES + header.stored_bytes, HEADER_BYTES)
        if length > whole:
            raise CorruptFrameError(f"the backend returned {length} bytes for a frame of {whole}")
        if frame_bytes(header.raw_bytes) > len(slot):
            raise CorruptFrameError(f"a payload of {header.raw_bytes} bytes does not fit a slot of {len(slot)}")
        if self._geometry is not None:
            _check_shape(header, self._geometry)
        if header.approximate and not self._rules.accepts_lossy:
            raise UnreadableFrameError(
                f"frame of codec {header.codec!r} holds an approximation; this tier gives exact chunks only, "
                "lossy = true would change that"
            )
        if header.codec == NO_CODEC:
            if length < whole:  # a backend with a smaller alignment may leave out the last padding: clear the old bytes
                slot[length:whole] = bytes(whole - length)
        else:
            self._decode_payload(slot, header)
        return is_clear

    def encode_frame(self, slot: memoryview, key: bytes) -> tuple[memoryview, memoryview | None]:
        """Encode the chunk in ``slot`` as a frame at rest.

        Returns:
            The frame, and the staging buffer that contains it. The buffer is None if the frame is a view of the slot.
            Pass the buffer to :meth:`release_staging` when the frame is no longer used.

        Raises:
            CorruptFrameError: the slot does not hold this key.
            NotForThisTierError: it holds an approximation, and this tier keeps exact chunks.
            Exception: any error of a foreign codec.
        """
        # A lossy codec's frame keeps no checksum of the original payload, so damage must be found before encoding.
        header = self._sealer.check_slot(slot, key, payload=self._rules.lossy)
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
        """Return a staging buffer for reuse."""
        self._staging.release(staging)

    def _encode_payload(self, codec: Codec, slot: memoryview, header: FrameHeader, staging: memoryview) -> int:
        """Write the encoded frame to ``staging``. Returns its length; 0 if it would not be shorter at rest."""
        raw_bytes, rules = header.raw_bytes, self._rules
        raw = slot[HEADER_BYTES : HEADER_BYTES + raw_bytes].toreadonly()
        notes = bytearray(CODEC_NOTES_BYTES)
        at_rest = header._replace(
            codec=self._codec_name,
            withheld=rules.conceals or rules.lossy,
            approximate=header.approximate or rules.lossy,
        )
        frame = CodecFrame(_identity(at_rest), memoryview(notes), memoryview(header.raw_checksum))
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
        if at_rest.withheld:
            no_parts = (_NO_DIGEST,) * len(header.part_checksums)
            at_rest = at_rest._replace(raw_checksum=_NO_DIGEST, part_checksums=no_parts)
        stored_checksum = checksum(staging[HEADER_BYTES:end])
        written = bytes(notes) if notes != _NO_NOTES else b""
        pack_header(
            at_rest._replace(stored_bytes=stored_bytes, stored_checksum=stored_checksum, notes=written), staging
        )
        return length

    def _decode_payload(self, slot: memoryview, header: FrameHeader) -> None:
        codec = self._codecs.get(header.codec)
        if codec is None:
            raise UnreadableFrameError(
                f"frame was written with codec {header.codec!r}; known here: {', '.join(sorted(self._codecs))}"
            )
        origin = bytearray(header.raw_checksum)  # a codec that concealed the raw checksum writes it here
        notes = memoryview(header.notes or _NO_NOTES)
        frame = CodecFrame(_identity(header), notes, memoryview(origin))
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
        """Return the checksums of the decoded payload, compared with the recorded ones where there are any."""
        try:
            if not header.withheld:
                self._sealer.check_raw(slot, header)
                return header.raw_checksum, header.part_checksums
            found, parts = self._sealer.payload_checksums(slot, header)
        except CorruptFrameError as error:
            raise CorruptFrameError(
                f"codec {header.codec!r} did not give back the payload that was stored: {error}"
            ) from error
        is_unknown = header.approximate and origin == _NO_DIGEST  # a lossy codec keeps no checksum
        if found != origin and self._sealer.verify and not is_unknown:
            raise CorruptFrameError(f"codec {header.codec!r} did not give back the payload that was stored")
        return found, parts


def _check_shape(header: FrameHeader, geometry: Geometry) -> None:
    """Compare payload and parts with those of the key's group. A worker would refuse another chunk at every load.

    Raises:
        CorruptFrameError: they differ, or there is no such group.
    """
    try:
        _, group = split_key(header.key)
        sizes = geometry.groups[group]
    except (ValueError, IndexError):
        raise CorruptFrameError(f"key {header.key.hex()} names none of the {len(geometry.groups)} groups") from None
    expect_field("raw bytes", header.raw_bytes, sizes.payload_bytes)
    expect_field("part count", len(header.part_checksums), sizes.parts if sizes.parts > 1 else 0)


def _identity(header: FrameHeader) -> bytes:
    """Identity that a codec may bind to a payload. Fields have fixed lengths or a length prefix: no two are equal."""
    codec = header.codec.encode("ascii").ljust(CODEC_BYTES_MAX, b"\0")
    marks = _WITHHELD * header.withheld | _APPROXIMATE * header.approximate
    facts = _FACTS.pack(marks, len(header.part_checksums), len(header.key), header.raw_bytes)
    return b"".join((b"tierkv frame 2", codec, header.namespace, facts, header.key))


class StagingBuffers:
    """Free list of page-aligned buffers of one length.

    Buffers are kept: copying into fresh memory runs at a tenth of the speed of copying into memory that was used
    before. Their number is bounded by the concurrent calls of the tier times the keys per call, which the dispatcher
    bounds. May be used on several threads: ``list.append`` and ``list.pop`` are atomic.

    Args:
        buffer_bytes: length of each buffer.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """Return a writable buffer with undefined content."""
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(mmap.mmap(-1, self._buffer_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def release(self, buffer: memoryview) -> None:
        """Return a buffer that was taken with :meth:`take`."""
        self._free.append(buffer)
