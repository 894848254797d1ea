"""Forced writes of one file, shared by the threads that wait for one, and whose failure none of them can miss.

The kernel reports a failed ``fdatasync`` once per open file: the next call succeeds, although the bytes are lost. Calls
on one file therefore take turns, and each failure is counted before the next call begins.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class SharedSync:
    """Turns of ``fdatasync`` on one file. May be called on several threads.

    Args:
        failed: called for each failed sync, before the next one begins.
    """

    def __init__(self, failed: Callable[[], None]) -> None:
        self._failed = failed
        self._turn = threading.Lock()
        self._begun = 0
        self._succeeded = 0

    def sync(self, fd: int) -> None:
        """Force all bytes that were written before this call. A sync that another thread began since then counts.

        Raises:
            OSError: the sync failed.
        """
        begun_before = self._begun
        with self._turn:
            if self._succeeded > begun_before:
                return
            self._begun += 1
            try:
                os.fdatasync(fd)
            except OSError:
                self._failed()
                raise
            self._succeeded = self._begun
