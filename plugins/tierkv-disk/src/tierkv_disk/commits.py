"""Appending to the index log for several callers with one forced write.

A device takes as long to make one record durable as a hundred. So a caller that finds another one waiting for the
device leaves its records, and whoever comes first after that appends all that were left, forces them once, and makes
all of them true in the order of the log.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence

from tierkv_disk.index_log import IndexLog, Record


class _Batch:
    """One caller's records, and what became of them."""

    def __init__(self, records: Sequence[Record], apply: Callable[[], None]) -> None:
        self.records = records
        self.apply = apply
        self.done = False
        self.error: OSError | None = OSError(errno.EIO, "the caller that led was interrupted")


class Commits:
    """The only writer of the log. May be called on several threads.

    Args:
        log: an open one; :attr:`log` may be replaced within :attr:`turn`.
        after: called within the turn, after records became true.
    """

    def __init__(self, log: IndexLog, after: Callable[[], None]) -> None:
        self.log = log
        self._after = after
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: list[_Batch] = []

    def commit(self, records: Sequence[Record], apply: Callable[[], None]) -> None:
        """Make records durable, then true.

        Args:
            records: all or none are appended.
            apply: makes them true; called on any of the threads that commit, one at a time, in the order of the log.

        Raises:
            OSError: they are not durable, and not true.
        """
        batch = _Batch(records, apply)
        with self._lock:
            self._waiting.append(batch)
        with self._turn:
            if not batch.done:
                self._lead()
        if batch.error is not None:
            raise OSError(batch.error.errno, batch.error.strerror) from batch.error

    def close(self) -> None:
        """Close the log."""
        self.log.close()

    def _lead(self) -> None:
        with self._lock:
            batches, self._waiting = self._waiting, []
        try:
            self.log.append(record for batch in batches for record in batch.records)
        except OSError as error:
            for batch in batches:
                batch.done, batch.error = True, error
            return
        for batch in batches:
            batch.apply()
            batch.done, batch.error = True, None
        self._after()
