"""Lossy: whole numbers from -127 to 127. See :mod:`tierkv.codecs.eight_bit`.

A value of a column whose largest magnitude is M comes back with an error of at most ``M / 127``.
"""

from __future__ import annotations

import numpy as np

from tierkv.abc.codec import CodecContext
from tierkv.codecs.eight_bit import F32, U8, EightBitCodec
from tierkv.errors import CorruptFrameError


def open_int8(context: CodecContext) -> EightBitCodec:
    """The codec.

    Raises:
        ConfigError: the payloads do not suit it.
    """
    return EightBitCodec(Int8Codes(), context)


class Int8Codes:
    """See :class:`tierkv.codecs.eight_bit.Codes`. Two's complement; -128 is never used."""

    name = "int8"
    bits = 7
    exponent = 6

    def quantise(self, scaled: F32, codes: U8) -> None:
        """Round."""
        np.rint(scaled, out=scaled)
        np.copyto(codes.view(np.int8), scaled, casting="unsafe")

    def values(self, codes: U8, out: F32) -> None:
        """The numbers themselves."""
        numbers = codes.view(np.int8)
        if len(numbers) and numbers.min() == np.iinfo(np.int8).min:
            raise CorruptFrameError("int8 data has the code -128, which is never written")
        np.copyto(out, numbers)
