"""Capabilities of a backend: a flat record. Tests and the dispatcher read this record, never a backend's name."""

from __future__ import annotations

from dataclasses import dataclass

KEYS_PER_READ_MIN = 4
"""Fewest keys per read operation. Smaller operations cost the engine's thread more than they gain."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Properties that a backend declares about itself."""

    durable: bool = False
    """Writes that were acknowledged survive kill -9 and a reopen."""
    shared: bool = False
    """Other processes may add or remove chunks while the stack runs."""
    authoritative_index: bool = False
    """The entries of ``scan`` at open, plus the operations of this process, are the complete contents. The framework
    then knows without a probe whether a chunk is stored. Needs ``scan``; excludes ``shared``."""
    scan: bool = False
    """Implements :class:`~tierkv.abc.backend.SupportsScan`."""
    keeps_ranks: bool = False
    """The entries of ``scan`` have the ranks that ``write`` was given, also after a reopen. Needs ``scan``."""
    read_only: bool = False
    """``write`` and ``delete`` always fail."""
    reads_end_with_call: bool = False
    """No buffer changes after the ``read_into`` call that got it, whatever fails: reads are blocking system calls or
    copies, and no other thread fills buffers. Frames are then read into the host tier without a copy."""
    bounded: bool = True
    """The stored bytes stay within ``BackendContext.capacity_bytes`` as long as the framework evicts. False where
    something else limits the storage, such as the settings of a bucket."""
    alignment: int = 1
    """Buffers given to ``write`` and ``read_into`` start at a multiple of this number of bytes, and their length is a
    multiple of it. 1: no requirement; 4096 suits O_DIRECT. A power of two."""
    preferred_batch: int = 8
    """Largest number of keys per call."""
    preferred_write_bytes: int | None = None
    """Preferred bytes of frames per ``write`` call; None: those of ``preferred_batch`` keys. A longer frame is written
    alone."""
    preferred_read_bytes: int | None = None
    """Preferred bytes of frames per ``read_into`` call; None: those of ``preferred_batch`` keys. A longer frame is read
    alone. A frame is checked when the call that read it returns. So where calls are cheap, few bytes keep it in the
    processor's cache for the check."""
    spare_share: float = 0.0
    """Share of the capacity that eviction keeps free where four frames or more share a ``read_into`` call, up to a
    quarter. A backend that places the frames of a batch side by side finds long free runs in it."""
    preferred_concurrency: int = 2
    """Largest number of concurrent calls."""

    @property
    def spare_frame_bytes_max(self) -> int:
        """Length in bytes of the longest frame for which :attr:`spare_share` is kept free."""
        return 0 if self.preferred_read_bytes is None else self.preferred_read_bytes // KEYS_PER_READ_MIN

    def keys_per_write(self, frame_bytes: int) -> int:
        """Number of keys per ``write`` call, for frames of ``frame_bytes`` bytes."""
        return _keys_per_call(self.preferred_write_bytes, frame_bytes, self.preferred_batch)

    def keys_per_read_call(self, frame_bytes: int) -> int:
        """Number of keys per ``read_into`` call, for frames of ``frame_bytes`` bytes."""
        return _keys_per_call(self.preferred_read_bytes, frame_bytes, self.preferred_batch)

    def keys_per_read(self, frame_bytes: int, waiting: int | None = None) -> int:
        """Number of keys per read operation, for frames of ``frame_bytes`` bytes.

        Small where the backend prefers small reads, so that its threads share the work of a load evenly. Few frames
        are shared so that each thread has two turns. A thread that begins late then has one.

        Args:
            frame_bytes: length of the longest frame.
            waiting: number of frames to read; None: many.
        """
        keys = self.keys_per_read_call(frame_bytes)
        if waiting is not None and self.preferred_read_bytes is not None:
            keys = min(keys, -(-waiting // (2 * self.preferred_concurrency)))
        return min(self.preferred_batch, max(keys, KEYS_PER_READ_MIN))


def _keys_per_call(wished_bytes: int | None, frame_bytes: int, keys_max: int) -> int:
    return keys_max if wished_bytes is None else max(1, min(keys_max, wished_bytes // max(1, frame_bytes)))
