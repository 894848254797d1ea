"""The codec interface: how a chunk's payload is written at rest."""

from __future__ import annotations

from typing import Protocol


class Codec(Protocol):
    """Turns a payload into stored bytes and back. Pure: no I/O. Called on several framework threads at once."""

    def encode(self, raw: memoryview, out: memoryview) -> int | None:
        """Write the stored form of ``raw`` to the start of ``out`` (as long as ``raw``).

        Returns:
            Bytes written; or None if the stored form would not be shorter: the chunk is then stored raw.
        """

    def decode(self, stored: memoryview, out: memoryview) -> None:
        """Fill all of ``out`` from ``stored``.

        Raises:
            CorruptFrameError: ``stored`` does not decode to exactly ``len(out)`` bytes.
        """
