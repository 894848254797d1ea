"""Arena of the host tier: one mapping, cut into slots that have the form of a frame.

The memory is private and anonymous unless other processes need it (:mod:`tierkv.memory.shared`): only such memory gets
transparent huge pages everywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tierkv.errors import ConfigError
from tierkv.frames.frame import HEADER_BYTES, frame_bytes

Bytes = npt.NDArray[np.uint8]

_MADV_POPULATE_WRITE = 23
"""Since Linux 5.14; the module mmap has no name for it."""
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def private_memory(length: int) -> mmap.mmap:
    """Map private, anonymous memory."""
    return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class HostArena:
    """Memory for the slots of the host tier. Views may be taken on any thread.

    Args:
        capacity_bytes: upper bound of the memory; a remainder that does not fill a slot is not mapped.
        payload_bytes_max: length of the longest payload of any chunk.
        memory: maps a given number of bytes.

    Attributes:
        num_slots: number of slots.
        slot_bytes: length of a slot: header page, payload, padding.

    Raises:
        ConfigError: the capacity does not hold one slot, or the system does not provide that much memory.
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
                f"host.capacity = {capacity_bytes} bytes holds no chunk: one takes {self.slot_bytes} bytes "
                "(header page included); raise the capacity or make chunks smaller"
            )
        try:
            self._mmap = memory(self.num_slots * self.slot_bytes)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"host.capacity = {capacity_bytes} bytes: the system does not give that much memory ({error}); lower it"
            ) from error
        # Best effort: without huge pages copies are slower.
        with contextlib.suppress(OSError, AttributeError):
            self._mmap.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._mmap)
        self._pins = 0
        self._pin_lock = threading.Lock()  # workers of one process may register on threads of their own
        self._bytes: Bytes | None = np.frombuffer(self._mmap, dtype=np.uint8)

    def slot(self, index: int) -> memoryview:
        """Return a writable view of the whole slot.

        Raises:
            IndexError: there is no such slot.
            ValueError: the arena is closed.
        """
        start = index * self.slot_bytes if 0 <= index < self.num_slots else self._start(index)
        return self._view[start : start + self.slot_bytes]

    def payload(self, index: int) -> Bytes:
        """Return the slot without its header page, as a writable array of one dimension. It keeps the memory mapped.

        Raises:
            IndexError: there is no such slot.
            ValueError: the arena is closed.
        """
        start = self._start(index)
        if self._bytes is None:
            raise ValueError("the arena is closed")
        return self._bytes[start + HEADER_BYTES : start + self.slot_bytes]

    def payloads(self, first: int, count: int) -> Bytes:
        """Return ``count`` slots from ``first`` on without their header pages, one a row, as :meth:`payload` does.

        Raises:
            IndexError: there is no such slot.
            ValueError: the arena is closed.
        """
        start, end = self._start(first), self._start(first + count - 1) + self.slot_bytes
        if self._bytes is None:
            raise ValueError("the arena is closed")
        return self._bytes[start:end].reshape(count, self.slot_bytes)[:, HEADER_BYTES:]

    def payload_addresses(self, slots: Sequence[int]) -> npt.NDArray[np.uint64]:
        """Return the address of the payload of each slot, for a copy engine. The caller keeps a :meth:`payload` of one.

        Raises:
            IndexError: there is no such slot.
            ValueError: the arena is closed.
        """
        for slot in (min(slots), max(slots)) if slots else ():
            self._start(slot)
        if self._bytes is None:
            raise ValueError("the arena is closed")
        begin = self._bytes.ctypes.data + HEADER_BYTES
        return np.asarray(slots, np.uint64) * np.uint64(self.slot_bytes) + np.uint64(begin)

    def populate(self, start: int, length: int) -> None:
        """Provide pages for ``length`` bytes from ``start``, in multiples of a page. The content does not change.

        Releases the GIL meanwhile. The memory stays mapped until the call returns, also if the arena is closed.

        Raises:
            OSError: the kernel has no such call, or no memory.
            ValueError: the arena is closed.
        """
        memory = self._bytes
        if memory is None:
            raise ValueError("the arena is closed")
        # Not mmap.madvise, which holds the GIL.
        part = memory[start : start + length]
        if _madvise(part.ctypes.data, len(part), _MADV_POPULATE_WRITE):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def pin(self, register: Callable[[int, int], bool]) -> bool:
        """Pin the memory through a GPU's runtime. It is pinned once, however many workers of this process call this.

        Args:
            register: pins a number of bytes at an address; returns whether it succeeded.

        Returns:
            Whether the memory is pinned. If so, call :meth:`unpin` before :meth:`close`.

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
        """Undo one :meth:`pin`. The last call unpins the memory."""
        with self._pin_lock:
            self._pins -= 1
            if not self._pins and self._bytes is not None:
                unregister(self._bytes.ctypes.data)

    def close(self) -> None:
        """Unmap the memory, once the last view of it is released. Idempotent."""
        self._bytes = None
        self._view.release()
        # BufferError: a view exists, perhaps in a hung thread. Unmapping under it would cause a segmentation fault.
        with contextlib.suppress(BufferError):
            self._mmap.close()

    def _start(self, index: int) -> int:
        if not 0 <= index < self.num_slots:
            raise IndexError(f"slot {index} is outside 0..{self.num_slots - 1}")
        return index * self.slot_bytes
