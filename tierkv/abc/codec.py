"""The codec interface: how a chunk's payload is written at rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tierkv.types.namespace import Namespace

CODEC_NOTES_BYTES = 64
"""Room for a codec's own notes in the header page of each of its frames."""


@dataclass(frozen=True, slots=True)
class CodecContext:
    """What the framework tells a codec when it opens it.

    namespace: whose payloads these are. ``namespace.dtype`` is the type of their values, as the engine calls it;
        ``namespace.groups`` tells of their pages.
    """

    namespace: Namespace


@dataclass(frozen=True, slots=True)
class CodecFrame:
    """What is known of a payload beside its bytes. Most codecs need none of it.

    identity: stands for namespace, key, raw length and codec: equal for encode and decode of one chunk, different for
        any other chunk. A codec that authenticates binds it.
    notes: ``CODEC_NOTES_BYTES`` of the frame's header that are the codec's own, such as a nonce. Zero when encode is
        called, which may write them; decode finds them again. They are covered by the header's checksum.
    raw_checksum: 16 bytes that came with the payload. Of interest only to a codec that ``conceals``: it lies nowhere in
        the clear, so encode must hide it with the payload, and decode must put it back here.
    """

    identity: bytes
    notes: memoryview
    raw_checksum: memoryview


class Codec(Protocol):
    """Turns a payload into stored bytes and back. No I/O. Called on several framework threads at once."""

    def encode(self, raw: memoryview, out: memoryview, frame: CodecFrame) -> int | None:
        """Write the stored form of ``raw`` to the start of ``out`` (as long as ``raw``).

        Returns:
            Bytes written; or None if the stored form would not be shorter: the chunk is then stored raw. A codec that
            conceals may write as many bytes as ``raw`` has, and its None means that the chunk is not stored.
        """

    def decode(self, stored: memoryview, out: memoryview, frame: CodecFrame) -> None:
        """Fill all of ``out`` from ``stored``.

        Raises:
            CorruptFrameError: ``stored`` does not decode to exactly ``len(out)`` bytes.
            UnreadableFrameError: it may well, but not here: a key is not known, for instance.
        """
