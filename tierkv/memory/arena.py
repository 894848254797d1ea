"""The host tier's memory: one mapping, cut into slots that have the shape of a frame.

Private and anonymous unless other processes need it (:mod:`tierkv.memory.shared`), because only such memory gets
transparent huge pages everywhere. Every slot starts on a 4096-byte boundary and has a length that is a multiple of it,
so that O_DIRECT can use it in place.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tierkv.errors import ConfigError
from tierkv.frames.frame import HEADER_BYTES, frame_bytes

Bytes = npt.NDArray[np.uint8]


def private_memory(length: int) -> mmap.mmap:
    """Memory of this process alone."""
    return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class HostArena:
    """Memory for the slots of the host tier.

    Views may be taken on any thread. Whose turn it is to write a slot is the manager's business (leases).

    Args:
        capacity_bytes: memory to take; what does not fill a whole slot is left over.
        payload_bytes_max: the longest payload of any chunk.
        memory: maps that many bytes.

    Attributes:
        num_slots: how many slots there are.
        slot_bytes: length of each: header page, payload, padding.

    Raises:
        ConfigError: the capacity does not hold one slot, or the system does not give that much memory.
    """

    def __init__(
        self, capacity_bytes: int, payload_bytes_max: int, memory: Callable[[int], mmap.mmap] = private_memory
    ) -> None:
        if payload_bytes_max <= 0:
            raise ConfigError(f"a chunk must have at least one byte, not {payload_bytes_max}")
        self.slot_bytes = frame_bytes(payload_bytes_max)
        self.num_slots = capacity_bytes // self.slot_bytes
        if self.num_slots < 1:
            raise ConfigError(
                f"the host tier's capacity of {capacity_bytes} bytes holds no chunk: one takes {self.slot_bytes} bytes "
                "(header page included); raise the capacity or make chunks smaller"
            )
        try:
            self._mmap = memory(self.num_slots * self.slot_bytes)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"the system does not give the host tier {capacity_bytes} bytes of memory ({error}); lower its capacity"
            ) from error
        # Best effort: a kernel without huge pages is slower, nothing else.
        with contextlib.suppress(OSError, AttributeError):
            self._mmap.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._mmap)
        self._pins = 0
        self._pin_lock = threading.Lock()  # workers of one process may register on threads of their own
        self._bytes: Bytes | None = np.frombuffer(self._mmap, dtype=np.uint8)

    def slot(self, index: int) -> memoryview:
        """The whole slot, writable."""
        start = self._start(index)
        return self._view[start : start + self.slot_bytes]

    def payload(self, index: int) -> Bytes:
        """The slot without its header page, as a writable array of one dimension. Keeps the memory alive."""
        start = self._start(index)
        if self._bytes is None:
            raise ValueError("the arena is closed")
        return self._bytes[start + HEADER_BYTES : start + self.slot_bytes]

    def pin(self, register: Callable[[int, int], bool]) -> bool:
        """Let a GPU's runtime pin the memory: once, however many workers of this process ask.

        Args:
            register: pins that many bytes at an address, and says whether it could.

        Returns:
            Whether it is pinned. If so, :meth:`unpin` it before :meth:`close`.

        Raises:
            ValueError: the arena is closed.
        """
        if self._bytes is None:
            raise ValueError("the arena is closed")
        with self._pin_lock:
            if not self._pins and not register(self._bytes.ctypes.data, len(self._bytes)):
                return False
            self._pins += 1
            return True

    def unpin(self, unregister: Callable[[int], None]) -> None:
        """One of those who pinned it is done; the last one unpins."""
        with self._pin_lock:
            self._pins -= 1
            if not self._pins and self._bytes is not None:
                unregister(self._bytes.ctypes.data)

    def close(self) -> None:
        """Give the memory back. Views that are still in use keep it, until the last of them is gone. Idempotent."""
        self._bytes = None
        self._view.release()
        # BufferError: somebody, perhaps a hung thread, still has a view. Unmapping under it would be a segfault.
        with contextlib.suppress(BufferError):
            self._mmap.close()

    def _start(self, index: int) -> int:
        if not 0 <= index < self.num_slots:
            raise IndexError(f"slot {index} is outside 0..{self.num_slots - 1}")
        return index * self.slot_bytes
