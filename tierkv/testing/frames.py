"""Bytes for tests: page-aligned buffers, and frames whose every byte follows from (key, version, length)."""

from __future__ import annotations

import hashlib
import mmap

import numpy as np

from tierkv.types.keys import Key

PAGE_BYTES = 4096
VERSION_BYTES = 8


class Frame(bytes):
    """Bytes of a frame that a failed comparison shows in a few characters.

    pytest explains unequal lists by a text diff of their elements, in full where it runs in CI: with thousands of bytes
    in each element that takes minutes.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """Length, version and digest."""
        digest = hashlib.blake2b(self, digest_size=6).hexdigest()
        return f"<frame of {len(self)} bytes, version {frame_version(self)}, digest {digest}>"


def aligned_buffer(size: int) -> memoryview:
    """Writable memory of ``size`` bytes that starts on a page boundary, as a slot of the host arena does."""
    pages = max(1, -(-size // PAGE_BYTES))
    return memoryview(mmap.mmap(-1, pages * PAGE_BYTES))[:size]


def aligned_buffers(count: int, size: int) -> list[memoryview]:
    """Writable memory in ``count`` pieces of ``size`` bytes, each of which starts on a page boundary."""
    stride = max(1, -(-size // PAGE_BYTES)) * PAGE_BYTES
    memory = aligned_buffer(count * stride)
    return [memory[start : start + size] for start in range(0, count * stride, stride)]


def aligned_copy(data: bytes) -> memoryview:
    """``data`` in page-aligned memory of exactly its length."""
    buffer = aligned_buffer(len(data))
    buffer[:] = data
    return buffer


def make_frame(key: bytes, version: int, size: int) -> bytes:
    """The one frame for this key, version and size.

    Starts with the version, so that a test can tell which write it sees; all other bytes depend on all three values, so
    that a byte of another key, version or length is noticed.
    """
    seed = hashlib.blake2b(key + version.to_bytes(VERSION_BYTES, "big") + size.to_bytes(8, "big"), digest_size=8)
    body = np.random.default_rng(int.from_bytes(seed.digest(), "big")).bytes(size)
    return Frame((version.to_bytes(VERSION_BYTES, "little") + body)[:size])


def frame_version(frame: bytes) -> int:
    """The version that a frame of at least eight bytes claims to be."""
    return int.from_bytes(frame[:VERSION_BYTES], "little")


def make_key(number: int, size: int = 36) -> Key:
    """The ``number``-th key: as long as a chunk hash of 32 bytes with its group."""
    return Key(hashlib.blake2b(number.to_bytes(8, "big"), digest_size=min(size, 64)).digest())
