"""Buffers of a tier's own for reads, where a backend may write to a buffer after its call has returned.

A slot holds another chunk as soon as a read has ended. A late write would change that chunk, perhaps between its check
and its copy to the GPU. So such a backend never gets a slot: the frame is copied from the buffer to the slot, and
verified there.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref

import numpy as np

from tierkv.memory.arena import Bytes


class ReadBuffer:
    """Buffer of one read.

    Attributes:
        view: writable, page-aligned, with undefined content.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        array: Bytes = np.frombuffer(memory, np.uint8)
        self.view = array.data
        self._array = weakref.ref(array)  # every view of the buffer keeps the array alive, and nothing else does

    def copy_to(self, slot: memoryview, length: int) -> None:
        """Copy the first ``length`` bytes. Releases the GIL meanwhile."""
        np.copyto(np.frombuffer(slot[:length], np.uint8), np.frombuffer(self.view[:length], np.uint8))

    def reclaim(self) -> mmap.mmap | None:
        """Release the view. Returns the memory; None if another view of it exists."""
        with contextlib.suppress(BufferError):
            self.view.release()
        return self._memory if self._array() is None else None


class ReadBuffers:
    """Free list of buffers of one length. A buffer of which the backend keeps a view is never used again.

    Their number is bounded by the concurrent calls of the tier times the keys per call. May be used on several threads:
    ``list.append`` and ``list.pop`` are atomic.

    Args:
        buffer_bytes: length of each buffer.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._free: list[mmap.mmap] = []

    def take(self) -> ReadBuffer:
        """Return a buffer for one read."""
        try:
            return ReadBuffer(self._free.pop())
        except IndexError:
            return ReadBuffer(mmap.mmap(-1, self._buffer_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def release(self, buffer: ReadBuffer) -> bool:
        """Take a buffer back. Returns whether it is free; if not, the backend keeps a view of it."""
        memory = buffer.reclaim()
        if memory is not None:
            self._free.append(memory)
        return memory is not None
