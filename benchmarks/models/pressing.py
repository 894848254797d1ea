"""Codec with its buffers, for many payloads in turn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.models.kv_pages import Array
from tierkv.abc import CODEC_NOTES_BYTES, Codec, CodecFrame


@dataclass(frozen=True, slots=True)
class Stored:
    """Stored form of a payload. raw_bytes: length of the payload."""

    data: memoryview
    frame: CodecFrame
    raw_bytes: int


class Press:
    """Encodes and decodes payloads, each as the frame of a chunk of its own. For one thread."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._frame = _new_frame()
        self._out = self._back = memoryview(b"")

    def encode(self, payload: Array) -> int | None:
        """Stored form of a payload, overwritten by the next call; None: the codec declines."""
        self._make_room(payload.nbytes)
        return self._codec.encode(payload.data.cast("B"), self._out[: payload.nbytes], self._frame)

    def stored(self, payload: Array) -> Stored | None:
        """Stored form of a payload, in memory of its own; None: the codec declines."""
        frame, out = _new_frame(), memoryview(bytearray(payload.nbytes))
        written = self._codec.encode(payload.data.cast("B"), out, frame)
        return None if written is None else Stored(out[:written], frame, payload.nbytes)

    def decode(self, stored: Stored) -> memoryview:
        """Decoded payload, until the next call."""
        self._make_room(stored.raw_bytes)
        back = self._back[: stored.raw_bytes]
        self._codec.decode(stored.data, back, stored.frame)
        return back

    def restored(self, payload: Array) -> tuple[int, Array]:
        """Number of bytes that a tier would store, and the payload that it would read."""
        stored = self.stored(payload)
        if stored is None:
            return payload.nbytes, payload
        return len(stored.data), np.frombuffer(self.decode(stored), np.uint16).copy()

    def _make_room(self, length: int) -> None:
        if len(self._out) < length:
            self._out, self._back = memoryview(bytearray(length)), memoryview(bytearray(length))


def _new_frame() -> CodecFrame:
    return CodecFrame(b"benchmark", memoryview(bytearray(CODEC_NOTES_BYTES)), memoryview(bytearray(16)))
