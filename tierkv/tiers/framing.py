"""Between a slot of the host arena and a frame at rest: checks, codecs, padding. No I/O.

A slot always holds a raw frame (codec ``none``). What lies in the backend may be encoded.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tierkv.abc.codec import Codec
from tierkv.codecs.frame import (
    HEADER_BYTES,
    NO_CODEC,
    FrameHeader,
    FrameSealer,
    checksum,
    frame_bytes,
    pack_header,
    pad,
)
from tierkv.errors import CorruptFrameError
from tierkv.tiers.staging import Staging


class UnknownCodecError(CorruptFrameError):
    """A frame is whole, but nobody here knows its codec. It is not damaged: who wrote it can read it."""


class Framer:
    """Opens and makes frames of one tier. May be used on several threads.

    Args:
        codec_name: codec of the frames that are made here.
        codecs: every codec by name, since a tier may hold frames of an earlier configuration.
        sealer: seals and checks.
        alignment: frames made here have a length that is a multiple of it.
        slot_bytes: length of the arena's slots.
    """

    def __init__(
        self, codec_name: str, codecs: Mapping[str, Codec], sealer: FrameSealer, alignment: int, slot_bytes: int
    ) -> None:
        self._codec_name = codec_name
        self._codecs = codecs
        self._sealer = sealer
        self._alignment = alignment
        self._staging = Staging(slot_bytes)

    def accept(self, slot: memoryview, length: int, key: bytes) -> None:
        """Check the frame of ``length`` bytes that a backend put into ``slot``, and turn it into a raw one.

        Raises:
            CorruptFrameError: it is not a whole, undamaged frame of this key and namespace.
            Exception: whatever a foreign codec raises.
        """
        header = self._sealer.examine(slot[:length], key)
        whole = pad(HEADER_BYTES + header.stored_bytes, HEADER_BYTES)
        if length > whole:
            raise CorruptFrameError(f"{length} bytes came back for a frame of {whole}")
        if frame_bytes(header.raw_bytes) > len(slot):
            raise CorruptFrameError(f"a payload of {header.raw_bytes} bytes does not fit a slot of {len(slot)}")
        if header.codec == NO_CODEC:
            # A backend with a smaller alignment may leave the last page's padding to us; old bytes must not stay there.
            slot[length:whole] = bytes(max(0, whole - length))
        else:
            self._decode(slot, header)

    def frame_of(self, slot: memoryview, key: bytes) -> tuple[memoryview, memoryview | None]:
        """The frame to store for the chunk in ``slot``, and the staging buffer it lies in, if any.

        Give the buffer back with :meth:`give_back` once the frame is not used any more.

        Raises:
            CorruptFrameError: the slot does not hold this key; nothing foreign is ever written.
            Exception: whatever a foreign codec raises.
        """
        header = self._sealer.check(slot, key, payload=False)
        raw_frame = slot[: frame_bytes(header.raw_bytes)]
        codec = None if self._codec_name == NO_CODEC else self._codecs[self._codec_name]
        if codec is None:
            return raw_frame, None
        staging = self._staging.take()
        length = 0
        try:
            length = self._encode(codec, slot, header, staging)
        finally:
            if not length:
                self.give_back(staging)
        return (staging[:length], staging) if length else (raw_frame, None)

    def give_back(self, staging: memoryview) -> None:
        """Return a staging buffer."""
        self._staging.give_back(staging)

    def _encode(self, codec: Codec, slot: memoryview, header: FrameHeader, staging: memoryview) -> int:
        """Make the encoded frame in ``staging``. Returns its length, or 0 where it would not be shorter at rest."""
        raw_bytes = header.raw_bytes
        raw = slot[HEADER_BYTES : HEADER_BYTES + raw_bytes].toreadonly()
        stored_bytes = codec.encode(raw, staging[HEADER_BYTES : HEADER_BYTES + raw_bytes])
        if stored_bytes is None:
            return 0
        if type(stored_bytes) is not int or not 0 < stored_bytes < raw_bytes:
            raise ValueError(f"codec {self._codec_name!r} encoded {raw_bytes} bytes to {stored_bytes!r}")
        end = HEADER_BYTES + stored_bytes
        length = pad(end, self._alignment)
        if length >= frame_bytes(raw_bytes):
            return 0
        staging[end:length] = bytes(length - end)
        stored_checksum = checksum(staging[HEADER_BYTES:end])
        pack_header(
            FrameHeader(
                self._codec_name,
                header.namespace,
                header.key,
                raw_bytes,
                stored_bytes,
                stored_checksum,
                header.raw_checksum,
                header.part_checksums,
            ),
            staging,
        )
        return length

    def _decode(self, slot: memoryview, header: FrameHeader) -> None:
        codec = self._codecs.get(header.codec)
        if codec is None:
            raise UnknownCodecError(
                f"frame was written with codec {header.codec!r}; known here: {', '.join(sorted(self._codecs))}"
            )
        stored_end, raw_end = HEADER_BYTES + header.stored_bytes, HEADER_BYTES + header.raw_bytes
        staging = self._staging.take()
        try:
            # numpy copies without the GIL; assigning a memoryview slice would hold it.
            np.copyto(np.frombuffer(staging[:stored_end], np.uint8), np.frombuffer(slot[:stored_end], np.uint8))
            codec.decode(staging[HEADER_BYTES:stored_end].toreadonly(), slot[HEADER_BYTES:raw_end])
        finally:
            self.give_back(staging)
        try:
            self._sealer.check_raw(slot, header)
        except CorruptFrameError as error:
            raise CorruptFrameError(
                f"codec {header.codec!r} did not give back the payload that was stored: {error}"
            ) from error
        self._sealer.seal_as(slot, header.key, header.raw_bytes, header.raw_checksum, header.part_checksums)
