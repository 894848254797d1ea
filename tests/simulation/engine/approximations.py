"""Approximations: which other bytes a lossy codec may make of the right ones.

A chunk that a lossy tier returns is rounded. One chunk, and the GPU, may then hold rounded and computed blocks. A lossy
codec rounds each value by itself and rounds no value twice. So every value is either the right one, or what the codec
makes of the right chunk; nothing else is near enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from simulation.checks.failure import Violation, demand
from tierkv.abc.codec import CODEC_NOTES_BYTES, Codec, CodecContext, CodecFrame
from tierkv.frames.frame import CHECKSUM_BYTES
from tierkv.plugins.loading import load_plugins
from tierkv.types.namespace import Namespace

NEAR = "a lossy codec keeps within its error"

VALUE_BYTES = 2

_ERRORS = {"fp8": (1 / 16, 2.0**-16), "int8": (0.0, 1 / 127)}
"""Largest error, as documented: a share of the value, or a share of its column's largest magnitude."""

_RANGES = {"float16": (b"\xff\x8f", b"\x00\x30"), "bfloat16": (b"\xff\x81", b"\x00\x3e")}
"""Bits that stay, and bits that are set, so that random values have magnitudes from 1/8 to 4."""

_WILD_BELOW = 4
"""Tokens whose digest ends with a smaller byte keep all bits: huge, tiny, infinite or no number."""

Values = npt.NDArray[np.uint16]


class Approximations(Protocol):
    """Rules of one run."""

    def plausible(self, digest: bytes) -> bytes:
        """Digest as values that a model might compute."""

    def learn(self, payload: bytes) -> bytes:
        """Form of a right payload after the lossy codec."""

    def agree(self, found: bytes, right: bytes, near: bytes) -> bool:
        """Whether each value is the right one or the near one."""

    def decoded(self, stored: bytes, length: int) -> bytes:
        """Payload that a stored form of the lossy codec decodes to."""


class NoApproximations:
    """Rules of a run whose codecs are all exact."""

    def plausible(self, digest: bytes) -> bytes:
        """Digest itself."""
        return digest

    def learn(self, payload: bytes) -> bytes:
        """Payload itself."""
        return payload

    def agree(self, found: bytes, right: bytes, near: bytes) -> bool:
        """Whether the bytes are the right ones."""
        return found == right

    def decoded(self, stored: bytes, length: int) -> bytes:
        """Raise: no tier of this run may hold such a form.

        Raises:
            Violation: always.
        """
        raise Violation(NEAR, "a lossy form is stored where no codec is lossy")


class LossyCodec:
    """Rules of a run with a lossy codec.

    Args:
        name: name of the codec.
        namespace: namespace of the stack, with the type of the values.
    """

    def __init__(self, name: str, namespace: Namespace) -> None:
        plugin = load_plugins([], entry_points=lambda **_: ()).codecs[name].plugin
        self._codec: Codec = plugin.open(CodecContext(namespace), plugin.options())
        self._dtype = namespace.dtype
        self._errors = _ERRORS[name]

    def plausible(self, digest: bytes) -> bytes:
        """Digest as values of the same magnitude, with a few that are far from them."""
        if digest[-1] < _WILD_BELOW:
            return digest
        count = len(digest) // VALUE_BYTES
        keep, add = (int.from_bytes(mask * count, "big") for mask in _RANGES[self._dtype])
        return (int.from_bytes(digest, "big") & keep | add).to_bytes(len(digest), "big")

    def learn(self, payload: bytes) -> bytes:
        """Encode and decode a payload: the codec keeps within its error, and a second time changes nothing.

        Raises:
            Violation: it does not.
        """
        near = self._rounded(payload)
        if near == payload:
            return payload
        demand(all(self._within_error(payload, near)), NEAR, f"{payload.hex()} became {near.hex()}")
        again = self._rounded(near)
        demand(again == near, NEAR, f"{near.hex()} became {again.hex()} the second time")
        return near

    def agree(self, found: bytes, right: bytes, near: bytes) -> bool:
        """Whether each value is the right one or the near one."""
        values = _values(found)
        return bool(np.all((values == _values(right)) | (values == _values(near))))

    def decoded(self, stored: bytes, length: int) -> bytes:
        """Payload that a stored form of the lossy codec decodes to."""
        out = bytearray(length)
        self._codec.decode(memoryview(stored), memoryview(out), _frame())
        return bytes(out)

    def _rounded(self, payload: bytes) -> bytes:
        """Payload after the codec, which may decline it."""
        out = bytearray(len(payload))
        length = self._codec.encode(memoryview(payload), memoryview(out), _frame())
        return self.decoded(bytes(out[:length]), len(payload)) if length else payload

    def _within_error(self, payload: bytes, near: bytes) -> Iterator[bool]:
        """Yield for each column of a short payload, whose values share a scale, whether all are near the right ones."""
        right, found = (_floats(data, self._dtype) for data in (payload, near))
        of_value, of_column = self._errors
        columns = -(-len(right) // 32)
        for column in range(columns):
            values, restored = right[column::columns], found[column::columns]
            largest = np.abs(values).max()
            bound = np.maximum(np.abs(values) * of_value, largest * of_column)
            yield bool(np.all(np.abs(values - restored) <= bound))


def _values(data: bytes) -> Values:
    return np.frombuffer(data, np.uint16)


def _floats(data: bytes, dtype: str) -> npt.NDArray[np.float64]:
    if dtype == "float16":
        return np.frombuffer(data, np.float16).astype(np.float64)
    return (_values(data).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _frame() -> CodecFrame:
    return CodecFrame(b"", memoryview(bytearray(CODEC_NOTES_BYTES)), memoryview(bytearray(CHECKSUM_BYTES)))
