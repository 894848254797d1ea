"""The codec that stores payloads as they are."""

from __future__ import annotations

from tierkv.abc.codec import CodecFrame
from tierkv.errors import CorruptFrameError


class NoneCodec:
    """Declines to encode, so that the framework stores the payload raw and reads it in place, without this codec."""

    def encode(self, raw: memoryview, out: memoryview, frame: CodecFrame) -> int | None:  # noqa: ARG002 - interface
        """Nothing is gained: store it raw."""
        return None

    def decode(self, stored: memoryview, out: memoryview, frame: CodecFrame) -> None:  # noqa: ARG002 - interface
        """Copy.

        Raises:
            CorruptFrameError: the lengths differ.
        """
        if len(stored) != len(out):
            raise CorruptFrameError(f"a raw payload of {len(stored)} bytes cannot fill {len(out)}")
        out[:] = stored
