"""Codec that stores payloads unchanged."""

from __future__ import annotations

from tierkv.abc.codec import CodecFrame
from tierkv.errors import CorruptFrameError


class NoneCodec:
    """Codec that always declines, so that the framework stores the payload raw and reads it in place."""

    def encode(self, raw: memoryview, out: memoryview, frame: CodecFrame) -> int | None:  # noqa: ARG002 - interface
        """Decline."""
        return None

    def decode(self, stored: memoryview, out: memoryview, frame: CodecFrame) -> None:  # noqa: ARG002 - interface
        """Copy the payload.

        Raises:
            CorruptFrameError: the lengths differ.
        """
        if len(stored) != len(out):
            raise CorruptFrameError(f"a raw payload of {len(stored)} bytes cannot fill {len(out)}")
        out[:] = stored
