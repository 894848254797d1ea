"""Zstandard for payloads at rest.

The default is level 1: on KV bytes, higher levels cost time and gain nothing. The library's contexts are not
thread-safe and are expensive to make, so each thread has its own. Both directions stream into the caller's buffer; no
memory of a chunk's size is allocated.
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
"""Smallest window that the format can express. A window is at most twice as large as its content."""


@dataclass(frozen=True, slots=True)
class ZstdOptions:
    """Options of the codec. Data written with one level is readable with any.

    Raises:
        ValueError: the level is out of range.
    """

    level: int = 1
    """1 is fastest, 22 is smallest."""

    def __post_init__(self) -> None:
        if not 1 <= self.level <= LEVEL_MAX:
            raise ValueError(f"level = {self.level} is not one of 1 to {LEVEL_MAX}")


def make_compressor(level: int = 1) -> zstandard.ZstdCompressor:
    """Return a compression context that writes the content size, which lets ``decode`` check it first."""
    return zstandard.ZstdCompressor(level=level, write_content_size=True)


def check_zstd(stored: memoryview, raw_bytes: int) -> None:
    """Check the sizes that a zstd frame declares, because the library would allocate memory for any value.

    Raises:
        CorruptFrameError: the content is not ``raw_bytes`` long, or the window is larger than ``make_compressor`` uses.
        zstandard.ZstdError: it is not a zstd frame.
    """
    declared = zstandard.get_frame_parameters(stored)
    if declared.content_size != raw_bytes:
        raise CorruptFrameError(f"zstd data of {declared.content_size} bytes was expected to have {raw_bytes}")
    if declared.window_size > max(2 * raw_bytes, WINDOW_BYTES_MIN):
        raise CorruptFrameError(f"zstd data of {raw_bytes} bytes declares a window of {declared.window_size}")


class ZstdCodec:
    """Codec that stores a payload as one zstd frame. May be called on any number of threads; it works without the GIL.

    Args:
        options: compression level.
        compressor: makes a compression context; called once per thread that encodes.
    """

    def __init__(
        self,
        options: ZstdOptions | None = None,
        compressor: Callable[[], zstandard.ZstdCompressor] | None = None,
    ) -> None:
        self._compressor = compressor or partial(make_compressor, (options or ZstdOptions()).level)
        self._contexts = _Contexts()

    def encode(self, raw: memoryview, out: memoryview, frame: CodecFrame) -> int | None:  # noqa: ARG002 - interface
        """Compress a payload; None if it would not be shorter."""
        if not raw or not out:  # the library's reader never returns from an empty payload
            return None
        context = self._contexts.compressor
        if context is None:
            context = self._contexts.compressor = self._compressor()
        with context.stream_reader(raw, size=len(raw)) as reader:
            written: int = reader.readinto(out)
        # A full buffer may hold a truncated zstd frame. At that length it would not be used anyway.
        return written if 0 < written < min(len(raw), len(out)) else None

    def decode(self, stored: memoryview, out: memoryview, frame: CodecFrame) -> None:  # noqa: ARG002 - interface
        """Restore a payload.

        Raises:
            CorruptFrameError: the stored bytes do not decode to a payload of this length.
        """
        context = self._contexts.decompressor
        if context is None:
            context = self._contexts.decompressor = zstandard.ZstdDecompressor()
        try:
            check_zstd(stored, len(out))
            with context.stream_reader(stored) as reader:
                filled = reader.readinto(out)
        except zstandard.ZstdError as error:
            raise CorruptFrameError(f"zstd data does not decode: {error}") from error
        if filled != len(out):
            raise CorruptFrameError(f"zstd data ends after {filled} of {len(out)} bytes")


class _Contexts(threading.local):
    """Contexts of one thread, made on first use."""

    compressor: zstandard.ZstdCompressor | None = None
    decompressor: zstandard.ZstdDecompressor | None = None
