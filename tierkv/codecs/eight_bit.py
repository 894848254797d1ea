"""Lossy coding of 16- or 32-bit values as 8-bit codes, with a scale for every 32 values of a channel.

:class:`EightBitCodec` does tiles, scales and types of values. It holds a :class:`Codes`, which maps scaled values to
codes and back: :mod:`tierkv.codecs.fp8` and :mod:`tierkv.codecs.int8` each have one.

A payload's values are taken in *tiles* of 32 rows and 1024 columns, row by row. The last tile has only the columns that
its values need. The values of one column share a scale. If 1024 is a multiple or a divisor of the channels of a token,
a column holds values of one or few channels. Values of one channel are similar in magnitude, while channels differ
widely.

A scale is a power of two, so scaling does not round, and decoded values encode to the same bytes again. It is the
exponent of the column's largest magnitude, after that was rounded to the significant bits of a code.

Stored form: the scales, tile by tile, one byte each; the codes, in the order of the values; then the bytes of the
payload behind the last whole value, if any. A scale byte is the exponent in the encoding of IEEE 754 binary32, 18 to
254. Magnitudes below 2**-109 have the scale of 2**-109.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tierkv.abc.codec import CodecContext, CodecFrame
from tierkv.errors import ConfigError, CorruptFrameError

ROWS = 32
COLUMNS = 1024
TILE = ROWS * COLUMNS
"""Values converted at a time. Their buffers stay in the processor's second-level cache."""

SCALE_MIN, SCALE_MAX = 18, 254
_MANTISSA_BITS = 23
_HALF_BIAS = np.float32(2.0**112)
"""Ratio between the exponent biases of float32 and float16."""

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]


class Codes(Protocol):
    """One kind of eight-bit code. May be used on several threads."""

    name: str
    """Name of the codec."""
    bits: int
    """Significant bits of a code."""
    exponent: int
    """Exponent of a column's largest magnitude after scaling."""

    def quantise(self, scaled: F32, codes: U8) -> None:
        """Write the nearest code of each value, ties to even. May overwrite ``scaled``."""

    def values(self, codes: U8, out: F32) -> None:
        """Write the scaled value of each code.

        Raises:
            CorruptFrameError: :meth:`quantise` never returns one of the codes.
        """


@dataclass(frozen=True, slots=True)
class _Dtype:
    """Type of values."""

    name: str
    item_bytes: int
    """Bytes of one value."""
    scale_max: int = SCALE_MAX
    """Largest exponent of a finite value, in the encoding of IEEE 754 binary32."""


_DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16"), _Dtype("bfloat16", 2)),
    **dict.fromkeys(("float16", "fp16", "half"), _Dtype("float16", 2, 127 + 15)),
    **dict.fromkeys(("float32", "fp32", "float"), _Dtype("float32", 4)),
}


class EightBitCodec:
    """Codec over one kind of codes. May be called on any number of threads; numpy works without the GIL.

    Declines payloads that would not shrink, and payloads with NaN, an infinity, or a magnitude that rounds to one.

    Args:
        codes: maps scaled values to codes and back.
        context: describes the payloads.

    Raises:
        ConfigError: the payloads hold values of a type that cannot be served.
    """

    def __init__(self, codes: Codes, context: CodecContext) -> None:
        self._codes = codes
        self._dtype = _dtype_of(codes.name, context)
        self._scratch = _Scratch()

    def encode(self, raw: memoryview, out: memoryview, frame: CodecFrame) -> int | None:  # noqa: ARG002 - interface
        """Quantise a payload; None if it is declined."""
        count, rest = divmod(len(raw), self._dtype.item_bytes)
        scales_bytes = _scales_of(count)
        written = scales_bytes + count + rest
        if not count or written >= len(raw) or written > len(out):
            return None
        target = np.frombuffer(out, np.uint8, written)
        scales, codes = target[:scales_bytes], target[scales_bytes : scales_bytes + count]
        for start, stop, at, columns in _tiles(count):
            tile = self._scratch.tile(columns)
            flat = tile.reshape(-1)
            self._load(raw, start, stop, flat[: stop - start])
            flat[stop - start :] = 0
            scale = _scales(tile, self._codes.bits, self._scratch.signs(ROWS * columns))
            if scale.max() > self._dtype.scale_max:
                return None
            scales[at : at + columns] = scale
            tile *= _power_of_two(np.uint32(2 * 127 + self._codes.exponent) - scale)
            self._codes.quantise(flat[: stop - start], codes[start:stop])
        target[scales_bytes + count :] = np.frombuffer(raw, np.uint8, rest, count * self._dtype.item_bytes)
        return written

    def decode(self, stored: memoryview, out: memoryview, frame: CodecFrame) -> None:  # noqa: ARG002 - interface
        """Restore an approximation of a payload.

        Raises:
            CorruptFrameError: the stored bytes do not decode to a payload of this length.
        """
        count, rest = divmod(len(out), self._dtype.item_bytes)
        scales_bytes = _scales_of(count)
        if len(stored) != scales_bytes + count + rest:
            raise CorruptFrameError(f"{self._codes.name} data of {len(stored)} bytes does not hold {len(out)}")
        source = np.frombuffer(stored, np.uint8)
        scales, codes = source[:scales_bytes], source[scales_bytes : scales_bytes + count]
        if count and not SCALE_MIN <= scales.min() <= scales.max() <= self._dtype.scale_max:
            raise CorruptFrameError(f"{self._codes.name} data has a scale outside {SCALE_MIN} to {SCALE_MAX}")
        for start, stop, at, columns in _tiles(count):
            tile = self._scratch.tile(columns)
            flat = tile.reshape(-1)
            self._codes.values(codes[start:stop], flat[: stop - start])
            flat[stop - start :] = 0
            tile *= _power_of_two(scales[at : at + columns].astype(np.uint32) - np.uint32(self._codes.exponent))
            self._save(flat[: stop - start], out, start, stop)
        out[count * self._dtype.item_bytes :] = stored[len(stored) - rest :] if rest else b""

    def _load(self, raw: memoryview, start: int, stop: int, out: F32) -> None:
        """Read values of the payload as float32."""
        count, offset = stop - start, start * self._dtype.item_bytes
        if self._dtype.name == "bfloat16":
            bits = out.view(np.uint32)
            np.copyto(bits, np.frombuffer(raw, np.uint16, count, offset))
            np.left_shift(bits, 16, out=bits)
        elif self._dtype.name == "float16":
            _load_halves(np.frombuffer(raw, np.uint16, count, offset), out, self._scratch.signs(count))
        else:
            np.copyto(out, np.frombuffer(raw, self._dtype.name, count, offset))

    def _save(self, values: F32, out: memoryview, start: int, stop: int) -> None:
        """Write float32 values to the payload. Bfloat16 represents every value of a code, so it does not round."""
        count, offset = stop - start, start * self._dtype.item_bytes
        if self._dtype.name == "bfloat16":
            bits = values.view(np.uint32)
            np.right_shift(bits, 16, out=bits)
            np.copyto(np.frombuffer(out, np.uint16, count, offset), bits, casting="unsafe")
        elif self._dtype.name == "float16":
            _save_halves(values, np.frombuffer(out, np.uint16, count, offset), self._scratch.signs(count))
        else:
            np.copyto(np.frombuffer(out, self._dtype.name, count, offset), values)


def _load_halves(halves: U16, out: F32, signs: U32) -> None:
    """Convert float16 to float32, several times as fast as numpy's cast. NaN and infinities become 2**16 or more."""
    bits = out.view(np.uint32)
    np.copyto(bits, halves)
    np.right_shift(bits, 15, out=signs)
    np.left_shift(signs, 31, out=signs)
    np.bitwise_and(bits, 0x7FFF, out=bits)
    np.left_shift(bits, 13, out=bits)
    np.multiply(out, _HALF_BIAS, out=out)  # also correct for an exponent of 0, which is a denormal of float32
    np.bitwise_or(bits, signs, out=bits)


def _save_halves(values: F32, out: U16, signs: U32) -> None:
    """Convert float32 to float16. Values in float16's denormal range are rounded to the nearest."""
    bits = values.view(np.uint32)
    np.right_shift(bits, 31, out=signs)
    np.left_shift(signs, 15, out=signs)
    np.bitwise_and(bits, 0x7FFF_FFFF, out=bits)
    np.divide(values, _HALF_BIAS, out=values)
    np.add(bits, 1 << 12, out=bits)
    np.right_shift(bits, 13, out=bits)
    np.bitwise_or(bits, signs, out=bits)
    np.copyto(out, bits, casting="unsafe")


def _dtype_of(codec: str, context: CodecContext) -> _Dtype:
    named = context.namespace.dtype
    dtype = _DTYPES.get(named.lower().removeprefix("torch."))
    if dtype is None:
        raise ConfigError(
            f"codec {codec!r} cannot serve KV values of type {named!r}: it serves bfloat16, float16 and float32; "
            "choose another codec for this tier"
        )
    for index, (_, page_bytes, kind, _) in enumerate(context.namespace.groups):
        if kind == "ssm":
            raise ConfigError(
                f"codec {codec!r} cannot serve KV cache group {index}: states of SSM layers need not be {named}, and "
                "their errors accumulate; choose a lossless codec for this tier"
            )
        if any(size % dtype.item_bytes for size in page_bytes):
            raise ConfigError(
                f"codec {codec!r} cannot serve KV cache group {index}: pages of {page_bytes} bytes do not hold whole "
                f"values of type {named!r}; choose a lossless codec for this tier"
            )
    return dtype


def _tiles(count: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield first value, end, number of the first scale, and columns of each tile."""
    for start in range(0, count, TILE):
        stop = min(count, start + TILE)
        yield start, stop, start // ROWS, -(-(stop - start) // ROWS)


def _scales_of(count: int) -> int:
    """Return the number of scales of a payload with ``count`` values."""
    return -(-count // ROWS)


def _scales(tile: F32, bits: int, room: U32) -> U32:
    """Return each column's exponent of its largest magnitude, after rounding that to ``bits`` significant bits."""
    magnitudes = np.bitwise_and(tile.view(np.uint32), 0x7FFF_FFFF, out=room.reshape(tile.shape))
    largest: U32 = magnitudes.max(axis=0)
    rounded = (largest + np.uint32(1 << (_MANTISSA_BITS - bits))) >> np.uint32(_MANTISSA_BITS)
    scales: U32 = np.maximum(rounded, np.uint32(SCALE_MIN))
    return scales


def _power_of_two(exponents: U32) -> F32:
    """Return powers of two, whose exponents are given in the encoding of IEEE 754 binary32."""
    powers: F32 = (exponents << np.uint32(_MANTISSA_BITS)).view(np.float32)
    return powers


class _Scratch(threading.local):
    """Buffers of one thread for one tile. Allocating them per chunk would cost more than the work."""

    def __init__(self) -> None:
        self._values: F32 = np.empty(TILE, np.float32)
        self._signs: U32 = np.empty(TILE, np.uint32)

    def signs(self, count: int) -> U32:
        """Return a buffer for the signs of ``count`` values."""
        return self._signs[:count]

    def tile(self, columns: int) -> F32:
        """Return a buffer for a tile of ``columns`` columns."""
        return self._values[: ROWS * columns].reshape(ROWS, columns)
