"""Lossy codecs: values of 16 or 32 bits as codes of 8, with a scale for every 32 values that share a channel.

A payload's values are taken in *tiles* of 32 rows and 1024 columns, row by row; the last tile has as many columns as
its values need. The values of one column have one scale. Where 1024 is a multiple of the channels of a token, or
divides them, a column holds values of one or few channels: these are of one size, while channels differ widely.

A scale is a power of two, so scaling rounds nothing, and what was decoded encodes to the same bytes again. It is the
exponent of the column's largest magnitude, after that was rounded to as many bits as a code can hold.

Stored form: the scales, tile by tile, one byte each; the codes, in the order of the values; where the payload does not
end with a value, the bytes behind the last one. A scale byte is the exponent as IEEE 754 writes it for 32 bits, 18 to
254; magnitudes below 2**-109 have the scale of 2**-109.
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
"""Values turned at once: what they need stays in the processor's second-level cache."""

SCALE_MIN, SCALE_MAX = 18, 254
_MANTISSA_BITS = 23
_HALF_BIAS = np.float32(2.0**112)
"""What lies between the exponents of float16 and float32."""

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]


class Codes(Protocol):
    """One kind of eight-bit code.

    name: of the codec.
    bits: significant bits of a code.
    exponent: of the largest magnitude of a column, once it is scaled.
    """

    name: str
    bits: int
    exponent: int

    def quantise(self, scaled: F32, codes: U8) -> None:
        """The nearest code of each value, ties to even. May use ``scaled`` up."""

    def values(self, codes: U8, out: F32) -> None:
        """What the codes stand for, still scaled.

        Raises:
            CorruptFrameError: one is not a code that :meth:`quantise` gives.
        """


@dataclass(frozen=True, slots=True)
class _Dtype:
    """One type of values: bytes of one, and the largest exponent whose powers of two it has, as IEEE 754 writes it."""

    name: str
    item_bytes: int
    scale_max: int = SCALE_MAX


_DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16"), _Dtype("bfloat16", 2)),
    **dict.fromkeys(("float16", "fp16", "half"), _Dtype("float16", 2, 127 + 15)),
    **dict.fromkeys(("float32", "fp32", "float"), _Dtype("float32", 4)),
}


class EightBitCodec:
    """See the module's docstring. May be called on any number of threads; numpy works without the GIL.

    Declines what would not shrink, and what holds NaN, an infinity, or a magnitude that rounds to one.

    Args:
        codes: fp8 or int8.
        context: whose payloads these are.

    Raises:
        ConfigError: their values are of no type that can be served, or there are others among them.
    """

    def __init__(self, codes: Codes, context: CodecContext) -> None:
        self._codes = codes
        self._dtype = _dtype_of(codes.name, context)
        self._scratch = _Scratch()

    def encode(self, raw: memoryview, out: memoryview, frame: CodecFrame) -> int | None:  # noqa: ARG002 - interface
        """See :meth:`tierkv.abc.Codec.encode`."""
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
        """See :meth:`tierkv.abc.Codec.decode`."""
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
        """Values of the payload, as floats."""
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
        """The other way round. Bfloat16 holds every value that there is, so nothing is rounded."""
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
    """Float16 as float32, several times as fast as numpy's own cast. NaN and infinities become 2**16 or more."""
    bits = out.view(np.uint32)
    np.copyto(bits, halves)
    np.right_shift(bits, 15, out=signs)
    np.left_shift(signs, 31, out=signs)
    np.bitwise_and(bits, 0x7FFF, out=bits)
    np.left_shift(bits, 13, out=bits)
    np.multiply(out, _HALF_BIAS, out=out)  # an exponent of 0 is right as well: it is one of float32's denormals
    np.bitwise_or(bits, signs, out=bits)


def _save_halves(values: F32, out: U16, signs: U32) -> None:
    """The other way round. What is left of a code in float16's denormals is rounded to the nearest."""
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
            f"codec {codec!r} cannot serve KV values of type {named!r}: it knows bfloat16, float16 and float32; "
            "choose another codec for this tier"
        )
    for index, (_, page_bytes, kind, _) in enumerate(context.namespace.groups):
        if kind == "ssm":
            raise ConfigError(
                f"codec {codec!r} cannot serve KV cache group {index}: states of SSM layers need not be {named}, and "
                "errors in them add up; choose a lossless codec for this tier"
            )
        if any(size % dtype.item_bytes for size in page_bytes):
            raise ConfigError(
                f"codec {codec!r} cannot serve KV cache group {index}: pages of {page_bytes} bytes do not hold whole "
                f"values of type {named!r}; choose a lossless codec for this tier"
            )
    return dtype


def _tiles(count: int) -> Iterator[tuple[int, int, int, int]]:
    """First value and end of each tile, number of its first scale, its columns."""
    for start in range(0, count, TILE):
        stop = min(count, start + TILE)
        yield start, stop, start // ROWS, -(-(stop - start) // ROWS)


def _scales_of(count: int) -> int:
    """How many scales a payload has."""
    return -(-count // ROWS)


def _scales(tile: F32, bits: int, room: U32) -> U32:
    """Of each column, the exponent of its largest magnitude, rounded to that many significant bits."""
    magnitudes = np.bitwise_and(tile.view(np.uint32), 0x7FFF_FFFF, out=room.reshape(tile.shape))
    largest: U32 = magnitudes.max(axis=0)
    rounded = (largest + np.uint32(1 << (_MANTISSA_BITS - bits))) >> np.uint32(_MANTISSA_BITS)
    scales: U32 = np.maximum(rounded, np.uint32(SCALE_MIN))
    return scales


def _power_of_two(exponents: U32) -> F32:
    """Two to the power of these, which are written as IEEE 754 does."""
    powers: F32 = (exponents << np.uint32(_MANTISSA_BITS)).view(np.float32)
    return powers


class _Scratch(threading.local):
    """This thread's room for one tile; allocating it per chunk would cost more than the work."""

    def __init__(self) -> None:
        self._values: F32 = np.empty(TILE, np.float32)
        self._signs: U32 = np.empty(TILE, np.uint32)

    def signs(self, count: int) -> U32:
        """Room for the signs of so many values."""
        return self._signs[:count]

    def tile(self, columns: int) -> F32:
        """Room for a tile of so many columns."""
        return self._values[: ROWS * columns].reshape(ROWS, columns)
