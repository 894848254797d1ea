"""Rewriting of an index log that failed: what the table knows, in a new file, tried with growing pauses.

After a failed write or a failed force, the content of a log on the device is unknown. Nothing is appended to such a
log. The table in memory holds only records that were forced before, so a new log made from it is whole.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from tierkv.abc.logs import plugin_logger
from tierkv_disk.log.index_log import IndexLog

PAUSE_FIRST_S = 0.1
PAUSE_MAX_S = 2.0
"""Bounds of the pause between two attempts, in seconds. Writes are refused meanwhile, at no cost."""
logger = plugin_logger("tierkv_disk")


class LogRewriter:
    """Attempts to replace a failed log. One thread at a time.

    Args:
        create: writes a new log from the table; raises OSError.
        name: tier and directory, for the log lines.
        clock: monotonic time in seconds.
    """

    def __init__(self, create: Callable[[], IndexLog], name: str, clock: Callable[[], float]) -> None:
        self._create = create
        self._name = name
        self._clock = clock
        self._pause_s = 0.0
        self._again_s = 0.0
        self._broken = ""

    def rewrite(self, broken: str) -> IndexLog:
        """Write a new log in place of one that failed.

        Args:
            broken: the failure of the present log.

        Raises:
            OSError: the pause is not over, or the attempt failed; the present log remains, unused.
        """
        if self._clock() < self._again_s:
            raise OSError(errno.EIO, broken)
        self._broken = self._broken or broken
        if self._pause_s == PAUSE_FIRST_S:  # the first attempt failed
            logger.warning("%s: %s; it cannot be rewritten, and is tried again", self._name, broken)
        self._pause_s = min(PAUSE_MAX_S, 2 * self._pause_s or PAUSE_FIRST_S)
        # Also after a success: a log that fails at once again is not rewritten at every write.
        self._again_s = self._clock() + self._pause_s
        log = self._create()
        if log.broken:
            log.close()
            raise OSError(errno.EIO, log.broken)
        return log

    def appended(self) -> None:
        """Note that the log took records: the next failure is a new one."""
        if self._pause_s:
            logger.warning("%s: %s; it was rewritten, and takes records again", self._name, self._broken)
            self._pause_s, self._broken = 0.0, ""
