"""Dispatcher whose I/O threads are always busy, with copies that release the interpreter's lock."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.core.rig import GEOMETRY
from tierkv.abc import Capabilities, ReadRequest, ReadResult, WriteRequest, WriteResult
from tierkv.dispatch import Dispatcher, TierLimits
from tierkv.errors import BackendUnavailableError
from tierkv.frames.frame import HEADER_BYTES
from tierkv.frames.sealer import FrameSealer
from tierkv.memory.arena import HostArena
from tierkv.tiers.tier import Tier
from tierkv.types.keys import Key
from tierkv.types.namespace import FINGERPRINT_BYTES

IO_THREADS = max(2, min(4, (os.cpu_count() or 1) - 1))
"""Number of threads: at least two, and more where there are cores; a thread that waits for a core measures nothing."""
COPY_BYTES = 2 << 20
CAPABILITIES = Capabilities(authoritative_index=True, scan=True, preferred_batch=8, preferred_concurrency=IO_THREADS)


class CopyingBackend:
    """Backend that takes as long as copying the bytes of a frame, and stores none: a disk with memory bandwidth.

    What is measured beside it is the engine's thread; a real disk would leave that thread more of the machine.
    """

    def __init__(self, copy_bytes: int) -> None:
        self._copy_bytes = copy_bytes
        self._local = threading.local()

    def contains(self, keys: Sequence[Key]) -> Sequence[bool]:
        """Report every key as absent."""
        return [False] * len(keys)

    def read_into(self, requests: Sequence[ReadRequest]) -> Sequence[ReadResult]:
        """Copy for the time of a read; report a miss."""
        self._copy(len(requests))
        return [None] * len(requests)

    def write(self, requests: Sequence[WriteRequest]) -> Sequence[WriteResult]:
        """Copy for the time of a write."""
        self._copy(len(requests))
        return [None] * len(requests)

    def delete(self, keys: Sequence[Key]) -> Sequence[WriteResult]:
        """Do nothing."""
        return [None] * len(keys)

    def close(self) -> None:
        """Do nothing."""

    def _copy(self, times: int) -> None:
        buffers = getattr(self._local, "buffers", None)
        if buffers is None:
            buffers = self._local.buffers = np.ones((2, self._copy_bytes), np.uint8)
        for _ in range(times):
            np.copyto(buffers[0], buffers[1])


class BusyTier:
    """Arena, tier and dispatcher of the small chunks of :mod:`benchmarks.core.rig`, over a copying backend."""

    def __init__(self, slots: int, copy_bytes: int = COPY_BYTES) -> None:
        # Untouched pages of the arena cost nothing: a million slots are address space, not memory.
        self.arena = HostArena(slots * (HEADER_BYTES + GEOMETRY.payload_bytes_max), GEOMETRY.payload_bytes_max)
        self.sealer = FrameSealer(bytes(FINGERPRINT_BYTES))
        tier = Tier("copying", CopyingBackend(copy_bytes), CAPABILITIES, "none", {}, self.sealer, self.arena)
        self.dispatcher = Dispatcher([tier], [TierLimits()], time.monotonic)

    def close(self) -> None:
        """End the threads.

        Raises:
            BackendUnavailableError: one of them hangs.
        """
        if self.dispatcher.close(10.0):
            raise BackendUnavailableError("a copying thread hangs")
        self.arena.close()
