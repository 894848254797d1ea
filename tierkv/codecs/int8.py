"""Lossy codec of integers from -127 to 127.

:mod:`tierkv.codecs.eight_bit` has the stored form. A value of a column with the largest magnitude M is restored with an
error of at most ``M / 127``.
"""

from __future__ import annotations

import numpy as np

from tierkv.abc.codec import CodecContext
from tierkv.codecs.eight_bit import F32, U8, EightBitCodec
from tierkv.errors import CorruptFrameError


def open_int8(context: CodecContext) -> EightBitCodec:
    """Open the codec.

    Raises:
        ConfigError: the payloads have no type that the codec serves.
    """
    return EightBitCodec(Int8Codes(), context)


class Int8Codes:
    """:class:`~tierkv.codecs.eight_bit.Codes` in two's complement; -128 is never written."""

    name = "int8"
    bits = 7
    exponent = 6

    def quantise(self, scaled: F32, codes: U8) -> None:
        """Round each value to the nearest integer, ties to even."""
        np.rint(scaled, out=scaled)
        np.copyto(codes.view(np.int8), scaled, casting="unsafe")

    def values(self, codes: U8, out: F32) -> None:
        """Convert the integers to floats.

        Raises:
            CorruptFrameError: a code is -128.
        """
        numbers = codes.view(np.int8)
        if len(numbers) and numbers.min() == np.iinfo(np.int8).min:
            raise CorruptFrameError("int8 data has the code -128, which is never written")
        np.copyto(out, numbers)
