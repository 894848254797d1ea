"""Zstandard for payloads at rest.

Level 1: on KV bytes higher levels cost time and gain nothing. Contexts of the library are not thread-safe and
expensive to make, so each thread has its own. Both ways stream straight into the caller's buffer: nothing of a chunk's
size is allocated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import zstandard

from tierkv.errors import CorruptFrameError

LEVEL = 1


def make_compressor() -> zstandard.ZstdCompressor:
    """A compression context as tierkv wants it; the length in the zstd frame lets decode check it first."""
    return zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)


class ZstdCodec:
    """Payloads as one zstd frame. May be called on any number of threads; the work is done without the GIL.

    Args:
        compressor: makes a compression context; called once per thread that encodes.
        decompressor: makes a decompression context; called once per thread that decodes.
    """

    def __init__(
        self,
        compressor: Callable[[], zstandard.ZstdCompressor] = make_compressor,
        decompressor: Callable[[], zstandard.ZstdDecompressor] = zstandard.ZstdDecompressor,
    ) -> None:
        self._compressor = compressor
        self._decompressor = decompressor
        self._contexts = _Contexts()

    def encode(self, raw: memoryview, out: memoryview) -> int | None:
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

    def decode(self, stored: memoryview, out: memoryview) -> None:
        """See :meth:`tierkv.abc.Codec.decode`."""
        context = self._contexts.decompressor
        if context is None:
            context = self._contexts.decompressor = self._decompressor()
        try:
            told = zstandard.frame_content_size(stored)
            if told != len(out):
                raise CorruptFrameError(f"zstd data of {told} bytes was expected to have {len(out)}")
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
