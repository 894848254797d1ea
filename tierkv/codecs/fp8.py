"""Lossy codec of eight-bit floating point, e4m3: sign, 4 bits of exponent, 3 of mantissa.

:mod:`tierkv.codecs.eight_bit` has the stored form. A value x of a column with the largest magnitude M is restored with
an error of at most ``max(|x| / 16, M / 2**16)``.
"""

from __future__ import annotations

import threading

import numpy as np

from tierkv.abc.codec import CodecContext
from tierkv.codecs.eight_bit import F32, TILE, U8, U16, EightBitCodec
from tierkv.errors import CorruptFrameError

CODE_MAX = 0x77
"""Code of 240, the upper bound of a scaled magnitude. Codes above it are never written."""

_SIGN = 0x80
_NOT_FINITE = 0x7F80


def open_fp8(context: CodecContext) -> EightBitCodec:
    """Open the codec.

    Raises:
        ConfigError: the payloads have no type that the codec serves.
    """
    return EightBitCodec(Fp8Codes(), context)


class Fp8Codes:
    """:class:`~tierkv.codecs.eight_bit.Codes` of e4m3."""

    name = "fp8"
    bits = 4
    exponent = 7

    def __init__(self) -> None:
        self._values = np.concatenate([_magnitudes(), -_magnitudes()])
        self._codes = _codes_by_upper_half()
        self._scratch = _Scratch()

    def quantise(self, scaled: F32, codes: U8) -> None:
        """Look up each value by its upper 16 bits. The last of these is set if any lower bit is."""
        bits, (upper, lower) = scaled.view(np.uint32), self._scratch.halves(len(scaled))
        np.copyto(lower, bits, casting="unsafe")
        np.right_shift(bits, 16, out=bits)
        np.copyto(upper, bits, casting="unsafe")
        np.not_equal(lower, 0, out=lower, casting="unsafe")
        np.bitwise_or(upper, lower, out=upper)  # ties stay ties, and no other value becomes one
        np.take(self._codes, upper, out=codes, mode="wrap")

    def values(self, codes: U8, out: F32) -> None:
        """Look up the value of each code.

        Raises:
            CorruptFrameError: a code is above ``CODE_MAX``.
        """
        if len(codes) and (codes & 0x7F).max() > CODE_MAX:
            raise CorruptFrameError(f"fp8 data has a code above {CODE_MAX:#x}, which is never written")
        np.take(self._values, codes, out=out, mode="wrap")


def _magnitudes() -> F32:
    """Return the values of the codes 0 to 127, in the order of the codes."""
    code = np.arange(_SIGN)
    exponent, mantissa = code >> 3, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    return np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal).astype(np.float32)


def _codes_by_upper_half() -> U8:
    """Return the nearest code, ties to even, of each 32-bit value, indexed by its upper 16 bits."""
    magnitude = (np.arange(_NOT_FINITE, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
    known = _magnitudes()[: CODE_MAX + 1].astype(np.float64)
    middles = (known[:-1] + known[1:]) / 2
    below = np.searchsorted(middles, magnitude, side="left")  # a tie gets the lower code here
    tie = np.isin(magnitude, middles)
    codes = np.full(2**15, CODE_MAX, np.uint8)
    codes[:_NOT_FINITE] = np.minimum(below + (tie & (below % 2 == 1)), CODE_MAX)
    return np.concatenate([codes, codes | _SIGN])


class _Scratch(threading.local):
    """Buffers of one thread for a tile's upper and lower halves."""

    def __init__(self) -> None:
        self._upper: U16 = np.empty(TILE, np.uint16)
        self._lower: U16 = np.empty(TILE, np.uint16)

    def halves(self, count: int) -> tuple[U16, U16]:
        return self._upper[:count], self._lower[:count]
