"""Zstandard for payloads at rest.

Level 1 unless the user says otherwise: on KV bytes higher levels cost time and gain nothing. Contexts of the library
are not thread-safe and expensive to make, so each thread has its own. Both ways stream straight into the caller's
buffer: nothing of a chunk's size is allocated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import zstandard

from tierkv.abc.codec import CodecFrame
from tierkv.errors import CorruptFrameError

LEVEL_MAX = 22
WINDOW_BYTES_MIN = 1024
"""The smallest that the format can say. A window is never more than twice as large as what it is for."""


@dataclass(frozen=True, slots=True)
class ZstdOptions:
    """level: 1 is fastest, 22 is smallest. What was written with one level is read with any."""

    level: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.level <= LEVEL_MAX:
            raise ValueError(f"level = {self.level} is not one of 1 to {LEVEL_MAX}")


def make_compressor(level: int = 1) -> zstandard.ZstdCompressor:
    """A compression context as tierkv wants it; the length in the zstd frame lets decode check it first."""
    return zstandard.ZstdCompressor(level=level, write_content_size=True)


def check_zstd(stored: memoryview, raw_bytes: int) -> None:
    """Believe a zstd frame's own numbers only where they fit: the library would take memory for any of them.

    Raises:
        CorruptFrameError: it does not hold ``raw_bytes``, or wants a larger window than any of ours.
        zstandard.ZstdError: it is none.
    """
    told = zstandard.get_frame_parameters(stored)
    if told.content_size != raw_bytes:
        raise CorruptFrameError(f"zstd data of {told.content_size} bytes was expected to have {raw_bytes}")
    if told.window_size > max(2 * raw_bytes, WINDOW_BYTES_MIN):
        raise CorruptFrameError(f"zstd data of {raw_bytes} bytes wants a window of {told.window_size}")


class ZstdCodec:
    """Payloads as one zstd frame. May be called on any number of threads; the work is done without the GIL.

    Args:
        options: how hard to try.
        compressor: makes a compression context; called once per thread that encodes.
        decompressor: makes a decompression context; called once per thread that decodes.
    """

    def __init__(
        self,
        options: ZstdOptions | None = None,
        compressor: Callable[[], zstandard.ZstdCompressor] | None = None,
        decompressor: Callable[[], zstandard.ZstdDecompressor] = zstandard.ZstdDecompressor,
    ) -> None:
        self._compressor = compressor or partial(make_compressor, (options or ZstdOptions()).level)
        self._decompressor = decompressor
        self._contexts = _Contexts()

    def encode(self, raw: memoryview, out: memoryview, frame: CodecFrame) -> int | None:  # noqa: ARG002 - interface
        """See :meth:`tierkv.abc.Codec.encode`."""
        if not raw or not out:  # the library's reader never returns from an empty payload
            return None
        context = self._contexts.compressor
        if context is None:
            context = self._contexts.compressor = self._compressor()
        with context.stream_reader(raw, size=len(raw)) as reader:
            written: int = reader.readinto(out)
        # A full buffer may have cut the zstd frame off; at that length it is of no use anyway.
        return written if 0 < written < min(len(raw), len(out)) else None

    def decode(self, stored: memoryview, out: memoryview, frame: CodecFrame) -> None:  # noqa: ARG002 - interface
        """See :meth:`tierkv.abc.Codec.decode`."""
        context = self._contexts.decompressor
        if context is None:
            context = self._contexts.decompressor = self._decompressor()
        try:
            check_zstd(stored, len(out))
            with context.stream_reader(stored) as reader:
                filled = reader.readinto(out)
        except zstandard.ZstdError as error:
            raise CorruptFrameError(f"zstd data does not decode: {error}") from error
        if filled != len(out):
            raise CorruptFrameError(f"zstd data ends after {filled} of {len(out)} bytes")


class _Contexts(threading.local):
    """This thread's contexts; made when first needed."""

    compressor: zstandard.ZstdCompressor | None = None
    decompressor: zstandard.ZstdDecompressor | None = None
