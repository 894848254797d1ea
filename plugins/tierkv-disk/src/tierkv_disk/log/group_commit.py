"""Appending to the index log for several callers with one forced write.

A device needs as long to make one record durable as a hundred. While one caller forces the log, other callers queue
their records. The next caller appends all queued records, forces them once, and applies them in log order.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Sequence

from tierkv_disk.log.index_log import IndexLog, Row
from tierkv_disk.log.rewriting import LogRewriter


class _PendingCommit:
    """Records of one caller, and the outcome of their append."""

    def __init__(self, records: Sequence[Row], apply: Callable[[], None]) -> None:
        self.records = records
        self.apply = apply
        self.done = False
        self.error: OSError | None = OSError(errno.EIO, "the caller that led was interrupted")


class GroupCommit:
    """The only writer of the log. May be called on several threads.

    Args:
        log: an open log.
        rewriter: replaces the log after it failed.
        after_apply: called after records were applied, before the next append begins; may call :meth:`replace_log`.
    """

    def __init__(self, log: IndexLog, rewriter: LogRewriter, after_apply: Callable[[], None]) -> None:
        self._log = log
        self._rewriter = rewriter
        self._after_apply = after_apply
        self._append_lock = threading.Lock()
        self._lock = threading.Lock()
        self._pending: list[_PendingCommit] = []

    @property
    def records(self) -> int:
        """Number of records in the log file, live and dead."""
        return self._log.records

    @property
    def log_bytes(self) -> int:
        """Length of the log file."""
        return self._log.size_bytes

    def mend(self) -> None:
        """Replace the log if it failed. Call it before the effort of a write; :meth:`commit` does the same.

        Raises:
            OSError: the log takes no records at present.
        """
        if self._log.broken:
            with self._append_lock:
                self._rewrite_failed()

    def commit(self, records: Sequence[Row], apply: Callable[[], None]) -> None:
        """Append records durably, then apply them.

        Args:
            records: all or none are appended.
            apply: called after the append on any committing thread, one at a time, in log order.

        Raises:
            OSError: the records are neither durable nor applied.
        """
        pending = _PendingCommit(records, apply)
        with self._lock:
            self._pending.append(pending)
        with self._append_lock:
            if not pending.done:
                self._append_pending()
        if pending.error is not None:
            raise OSError(pending.error.errno, pending.error.strerror) from pending.error

    def replace_log(self, log: IndexLog) -> None:
        """Close the log and continue with ``log``. Only under the append lock, thus from within ``after_apply``."""
        with contextlib.suppress(OSError):  # a failing device may report its error once more
            self._log.close()
        self._log = log

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def _append_pending(self) -> None:
        with self._lock:
            batch, self._pending = self._pending, []
        try:
            self._rewrite_failed()
            self._log.append(record for pending in batch for record in pending.records)
        except OSError as error:
            for pending in batch:
                pending.done, pending.error = True, error
            return
        for pending in batch:
            pending.apply()
            pending.done, pending.error = True, None
        self._rewriter.appended()
        self._after_apply()

    def _rewrite_failed(self) -> None:
        """Replace the log if it failed. Call it under the append lock, under which alone the table changes."""
        if self._log.broken:
            self.replace_log(self._rewriter.rewrite(self._log.broken))
