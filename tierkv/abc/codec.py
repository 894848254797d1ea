"""Codec interface: the stored form of a chunk's payload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tierkv.types.namespace import Namespace

CODEC_NOTES_BYTES = 64
"""Size in bytes of the field for a codec's notes in the header page of each frame."""


@dataclass(frozen=True, slots=True)
class CodecContext:
    """Facts about the payloads, given to the plugin's ``open``."""

    namespace: Namespace
    """Namespace of the payloads. ``namespace.dtype`` is the type of their values, in the engine's spelling.
    ``namespace.groups`` describes their pages."""


@dataclass(frozen=True, slots=True)
class CodecFrame:
    """Facts about one payload beside its bytes. Most codecs need none of them."""

    identity: bytes
    """Namespace, key, raw length, codec, number of parts, and whether the payload is approximate or its checksums are
    withheld. Equal for encode and decode of one frame, different for any other chunk. A codec that authenticates must
    bind it."""
    notes: memoryview
    """``CODEC_NOTES_BYTES`` bytes of the header that belong to the codec, such as a nonce. They are zero when
    ``encode`` is called, which may fill them. ``decode`` gets the same bytes. The header's checksum covers them."""
    raw_checksum: memoryview
    """Checksum of the payload, 16 bytes. Only codecs that *conceal* use it: it is not stored in the clear, so
    ``encode`` must store it with the hidden payload, and ``decode`` must restore it here."""


class Codec(Protocol):
    """Encoder and decoder of payloads. No I/O. Called on several framework threads at once."""

    def encode(self, raw: memoryview, out: memoryview, frame: CodecFrame) -> int | None:
        """Write the stored form of ``raw`` to the start of ``out``, which is as long as ``raw``.

        Returns:
            Number of bytes written; None if the stored form is not shorter than ``raw``. The chunk is then stored raw.
            A codec that conceals may write as many bytes as ``raw`` has. Its None means that the chunk is not stored.
        """

    def decode(self, stored: memoryview, out: memoryview, frame: CodecFrame) -> None:
        """Fill all of ``out`` from ``stored``.

        Raises:
            CorruptFrameError: ``stored`` does not decode to exactly ``len(out)`` bytes.
            UnreadableFrameError: ``stored`` may be whole, but cannot be decoded here, for example without its key.
        """
