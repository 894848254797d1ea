"""Lossless compression of bfloat16 KV payloads, by compressing the exponents.

Of a bfloat16 value's 16 bits, sign and mantissa are noise, and the 8 of the exponent carry less than 3 bits in
practice. Values are split into a plane of exponents and a plane of signs with mantissas. The exponents are compressed
with Zstandard. Its table of matches is tiny, because there are hardly any: the gain is from the entropy coder. The
other plane is stored unchanged.

Stored form: length of the compressed exponents (4 bytes, little-endian), the compressed exponents, the other plane,
and the last byte of a payload of odd length.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import zstandard

from tierkv.abc.codec import CodecFrame
from tierkv.codecs.zstd import check_zstd
from tierkv.errors import CorruptFrameError

LENGTH_BYTES = 4
VALUES_PER_STEP = 32 * 1024
"""Values converted at a time. Their buffers, a quarter of a megabyte, stay in the processor's second-level cache."""

_U8 = npt.NDArray[np.uint8]
_U16 = npt.NDArray[np.uint16]


class Bf16Codec:
    """Codec for bfloat16 payloads. May be called on any number of threads; numpy and zstd work without the GIL.

    Any payload is restored byte for byte. Payloads of other types are usually declined, and then stored raw.
    """

    def __init__(self) -> None:
        self._scratch = _Scratch()

    def encode(self, raw: memoryview, out: memoryview, frame: CodecFrame) -> int | None:  # noqa: ARG002 - interface
        """Compress a payload; None if it would not be shorter."""
        count = len(raw) // 2
        end_of_room = min(len(raw) - 1, len(out)) - count - len(raw) % 2  # upper limit for the end of the exponents
        if count == 0 or end_of_room <= LENGTH_BYTES:
            return None
        values = np.frombuffer(raw, np.uint16, count)
        exponents, others = self._scratch.planes(count)
        for start, stop in _steps(count):
            part, (first, second) = values[start:stop], self._scratch.values(stop - start)
            # Casting to bytes keeps the low half, and is many times as fast as selecting every second byte.
            np.right_shift(part, 7, out=first)
            np.copyto(exponents[start:stop], first, casting="unsafe")
            np.right_shift(part, 15, out=first)
            np.left_shift(part, 1, out=second)
            np.bitwise_or(first, second, out=first)
            np.copyto(others[start:stop], first, casting="unsafe")
        with self._scratch.compressor().stream_reader(exponents.data, size=count) as reader:
            written: int = reader.readinto(out[LENGTH_BYTES:end_of_room])
        if written >= end_of_room - LENGTH_BYTES:  # it may be truncated, and is too long in any case
            return None
        out[:LENGTH_BYTES] = written.to_bytes(LENGTH_BYTES, "little")
        end = LENGTH_BYTES + written + count
        np.copyto(np.frombuffer(out[LENGTH_BYTES + written : end], np.uint8), others)
        out[end : end + len(raw) % 2] = raw[2 * count :]
        return end + len(raw) % 2

    def decode(self, stored: memoryview, out: memoryview, frame: CodecFrame) -> None:  # noqa: ARG002 - interface
        """Restore a payload.

        Raises:
            CorruptFrameError: the stored bytes do not decode to a payload of this length.
        """
        count, odd = len(out) // 2, len(out) % 2
        length = int.from_bytes(stored[:LENGTH_BYTES], "little")
        if len(stored) != LENGTH_BYTES + length + count + odd:
            raise CorruptFrameError(f"bf16 data of {len(stored)} bytes does not hold a payload of {len(out)}")
        exponents, _ = self._scratch.planes(count)
        self._decompress(stored[LENGTH_BYTES : LENGTH_BYTES + length], exponents)
        others = np.frombuffer(stored, np.uint8, count, LENGTH_BYTES + length)
        values = np.frombuffer(out, np.uint16, count)
        for start, stop in _steps(count):
            part, (first, second) = values[start:stop], self._scratch.values(stop - start)
            np.copyto(first, exponents[start:stop])
            np.left_shift(first, 7, out=part)
            np.copyto(first, others[start:stop])
            np.left_shift(first, 15, out=second)
            np.bitwise_or(part, second, out=part)
            np.right_shift(first, 1, out=first)
            np.bitwise_or(part, first, out=part)
        out[2 * count :] = stored[len(stored) - odd :] if odd else b""

    def _decompress(self, stored: memoryview, exponents: _U8) -> None:
        try:
            check_zstd(stored, len(exponents))
            with self._scratch.decompressor().stream_reader(stored) as reader:
                filled = reader.readinto(exponents.data) if len(exponents) else 0
        except zstandard.ZstdError as error:
            raise CorruptFrameError(f"bf16 exponents do not decode: {error}") from error
        if filled != len(exponents):
            raise CorruptFrameError(f"bf16 exponents end after {filled} of {len(exponents)}")


def _steps(count: int) -> Iterator[tuple[int, int]]:
    for start in range(0, count, VALUES_PER_STEP):
        yield start, min(count, start + VALUES_PER_STEP)


class _Scratch(threading.local):
    """Contexts and buffers of one thread. Allocating them per chunk would cost more than the work."""

    def __init__(self) -> None:
        self._compressor: zstandard.ZstdCompressor | None = None
        self._decompressor: zstandard.ZstdDecompressor | None = None
        self._planes: tuple[_U8, _U8] = (np.empty(0, np.uint8), np.empty(0, np.uint8))
        self._first: _U16 = np.empty(VALUES_PER_STEP, np.uint16)
        self._second: _U16 = np.empty(VALUES_PER_STEP, np.uint16)

    def values(self, count: int) -> tuple[_U16, _U16]:
        """Return two buffers for the values of one step."""
        return self._first[:count], self._second[:count]

    def planes(self, count: int) -> tuple[_U8, _U8]:
        """Return buffers for both planes of ``count`` values."""
        if len(self._planes[0]) < count:
            self._planes = (np.empty(count, np.uint8), np.empty(count, np.uint8))
        return self._planes[0][:count], self._planes[1][:count]

    def compressor(self) -> zstandard.ZstdCompressor:
        if self._compressor is None:
            parameters = zstandard.ZstdCompressionParameters.from_level(1, hash_log=8, min_match=7)
            self._compressor = zstandard.ZstdCompressor(compression_params=parameters)
        return self._compressor

    def decompressor(self) -> zstandard.ZstdDecompressor:
        if self._decompressor is None:
            self._decompressor = zstandard.ZstdDecompressor()
        return self._decompressor
