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

import numpy as np

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

    def read(self, start: int, header_bytes: int, target: memoryview) -> tuple[bytes, int] | None:
        """Read a header at ``start`` and fill ``target`` with the bytes behind it.

        Returns:
            The header, and the number of bytes read of both, less only if the file ends early. None: the file cannot
            be read so, and nothing has changed.

        Raises:
            OSError: the disk cannot read it.
        """
        length = header_bytes + len(target)
        padded = -(-length // ALIGNMENT) * ALIGNMENT
        if not self.is_usable or start % ALIGNMENT:
            return None
        bounce = self._bounce(padded)
        with memoryview(bounce)[:padded] as view:
            try:
                count = min(length, os.preadv(self._fd, [view], start))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.is_usable = False
                return None
        if count == length:
            source = np.frombuffer(bounce, np.uint8, len(target), header_bytes)
            np.copyto(np.frombuffer(target, np.uint8), source)  # releases the GIL
        return bounce[:header_bytes], count

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
