"""Access to stored bytes past the store under test, as a failing disk or a foreign program has it.

The author of a backend writes four short methods (:class:`RawAccess`); every damage that the kit does is derived from
them.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, cast

from tierkv.abc import AsyncBackend, Backend, ReadRequest, WriteRequest
from tierkv.testing.faults import AsyncFaultyBackend, FaultyBackend
from tierkv.testing.frames import aligned_buffer, aligned_copy
from tierkv.types.keys import Key

CALL_TIMEOUT_S = 120.0


class Frames(Protocol):
    """Stored frames of one namespace, as bytes."""

    def read(self, key: Key) -> bytes:
        """Read the bytes at rest of a stored frame.

        Raises:
            KeyError: there are none.
        """

    def write(self, key: Key, data: bytes) -> None:
        """Replace the stored bytes by ``data``, which is at most as long.

        Shorter data cut the entry off. Where the length is kept elsewhere and cannot change, zeros follow.
        """

    def remove(self, key: Key) -> None:
        """Remove the frame's object, file or row; zero the bytes where a store has none of these."""


class RawAccess(Frames, Protocol):
    """Stored frames of one namespace, as bytes at rest. Never through the store's own code."""

    def count(self) -> int:
        """Number of stored frames."""


Damage = Callable[[Frames, Key], None]


def flip(position: Callable[[int], int], bits: int = 0x01) -> Damage:
    """Invert ``bits`` of the byte at ``position(length)``."""

    def damage(raw: Frames, key: Key) -> None:
        data = bytearray(raw.read(key))
        data[position(len(data))] ^= bits
        raw.write(key, bytes(data))

    return damage


FLIPS: dict[str, Damage] = {
    "magic": flip(lambda _: 0),
    "codec": flip(lambda _: 17),
    "namespace": flip(lambda _: 33),
    "key": flip(lambda _: 51),
    "length": flip(lambda _: 308),
    "checksum": flip(lambda _: 323),
    "payload": flip(lambda length: (4096 + length) // 2),
    "last byte": flip(lambda length: length - 1, 0x80),
}
"""One bit in each part of a frame (docs/reference, frame format)."""


def truncate(raw: Frames, key: Key) -> None:
    """Keep the first half."""
    data = raw.read(key)
    raw.write(key, data[: len(data) // 2])


def empty(raw: Frames, key: Key) -> None:
    """Keep the entry without bytes."""
    raw.write(key, b"")


def fill_with_rubbish(raw: Frames, key: Key) -> None:
    """Replace the bytes by others of the same length."""
    raw.write(key, bytes(byte ^ 0xA5 for byte in raw.read(key)))


def remove(raw: Frames, key: Key) -> None:
    """Remove the frame."""
    raw.remove(key)


def swap(raw: Frames, one: Key, other: Key) -> None:
    """Exchange two entries: each is intact, and each is under the wrong key."""
    data = raw.read(one)
    raw.write(one, raw.read(other))
    raw.write(other, data)


class VerbAccess:
    """Raw access through the backend's own verbs, past the framework; usable while a stack is open.

    Args:
        faulty: the wrapper in the stack; its rules do not apply here.
        frame_bytes_max: longest frame.
    """

    def __init__(self, faulty: FaultyBackend | AsyncFaultyBackend, frame_bytes_max: int) -> None:
        self._faulty = faulty
        self._frame_bytes_max = frame_bytes_max

    def read(self, key: Key) -> bytes:
        """Read a frame; raises KeyError if it is absent or unreadable."""
        buffer = aligned_buffer(self._frame_bytes_max)
        (result,) = self._call(self._faulty.inner.read_into, [ReadRequest(key, buffer)])
        if not isinstance(result, int):
            raise KeyError(key.hex(), result)
        return bytes(buffer[:result])

    def write(self, key: Key, data: bytes) -> None:
        """Delete, then write: a backend may skip a frame whose header says that it is stored."""
        self.remove(key)
        (result,) = self._call(self._faulty.inner.write, [WriteRequest(key, aligned_copy(data).toreadonly())])
        assert result is None, f"the backend refused a frame: {result!r}"

    def remove(self, key: Key) -> None:
        """Delete a frame."""
        assert list(self._call(self._faulty.inner.delete, [key])) == [None]

    def has(self, keys: Sequence[Key]) -> list[bool]:
        """Whether the backend has each key."""
        return list(self._call(self._faulty.inner.contains, keys))

    def _call(self, verb: Callable[[Any], Any], batch: Sequence[Any]) -> Sequence[Any]:
        if isinstance(self._faulty, FaultyBackend):
            return cast("Sequence[Any]", verb(batch))
        assert self._faulty.loop is not None, "nothing was asked of the backend yet, so its loop is not known"
        coroutine = cast("Coroutine[Any, Any, Sequence[Any]]", verb(batch))
        return asyncio.run_coroutine_threadsafe(coroutine, self._faulty.loop).result(CALL_TIMEOUT_S)


def wrap(backend: Backend | AsyncBackend) -> FaultyBackend | AsyncFaultyBackend:
    """Wrap a backend for fault injection, blocking or async as it is."""
    if inspect.iscoroutinefunction(backend.contains):
        return AsyncFaultyBackend(cast("AsyncBackend", backend))
    return FaultyBackend(cast("Backend", backend))
