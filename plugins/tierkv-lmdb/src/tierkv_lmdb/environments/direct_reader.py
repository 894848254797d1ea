"""Reads of a data file past the page cache, through an aligned buffer of each thread.

A value begins behind the header of its first page, so neither the file's offset nor the caller's buffer suits O_DIRECT:
whole pages are read into a buffer of this module, and copied from there. That costs less than the page cache does, and
the checksum that follows finds the bytes in the processor's cache.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from pathlib import Path

ALIGNMENT = 4096
HUGE_PAGE_BYTES = 2 << 20


class DirectReader:
    """Reader of whole pages of one file. May be used on any threads.

    Args:
        data: the file.

    Attributes:
        is_usable: whether the file system takes such reads; False from the first one that it refuses.
    """

    def __init__(self, data: Path) -> None:
        self._local = threading.local()
        try:
            self._fd = os.open(data, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:  # the file is there: another descriptor of it is open
            self._fd = -1
        self.is_usable = self._fd >= 0

    def read(self, start: int, length: int) -> memoryview | None:
        """Read ``length`` bytes at ``start``.

        Returns:
            The bytes, less only if the file ends early, in the buffer of this thread: they last until its next read.
            None: the file cannot be read so.

        Raises:
            OSError: the disk cannot read it.
        """
        if not self.is_usable or start % ALIGNMENT:
            return None
        padded = -(-length // ALIGNMENT) * ALIGNMENT
        bounce = memoryview(self._bounce(padded))
        try:
            count = os.preadv(self._fd, [bounce[:padded]], start)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.is_usable = False
            return None
        return bounce[: min(count, length)]

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)

    def _bounce(self, length: int) -> mmap.mmap:
        bounce: mmap.mmap | None = getattr(self._local, "bounce", None)
        if bounce is None or len(bounce) < length:
            length = -(-length // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES  # the kernel aligns whole huge pages
            bounce = self._local.bounce = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError, AttributeError):
                bounce.madvise(mmap.MADV_HUGEPAGE)
        return bounce
