"""Log lines that load costs hits: a lookup was late, or reading ahead has stopped."""

from __future__ import annotations

from tierkv.logs.definitions import LOOKUP_LATE, READ_AHEAD_STOPPED
from tierkv.logs.stack_log import StackLog
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.lookup.read_ahead import READS_PER_UNUSED, read_ahead_credit


class LoadWarnings:
    """Reports late lookups, and the ends of reading ahead, from the counters that a question has changed.

    Args:
        counters: show what has happened.
        log: log of the stack.
    """

    def __init__(self, counters: CoreCounters, log: StackLog) -> None:
        self._counters = counters
        self._log = log
        self._unused = 0
        self._has_stopped = False

    def answered(self, request_id: str, expired: int) -> None:
        """Look at the counters after a question.

        Args:
            request_id: the request that the engine asked about.
            expired: ``deadlines_expired`` before the question.
        """
        counters = self._counters
        if counters.deadlines_expired > expired:
            self._log.report(LOOKUP_LATE, request=request_id)
        if counters.chunks_read_in_vain != self._unused:
            self._unused = counters.chunks_read_in_vain
            stopped = read_ahead_credit(counters) <= 0
            if stopped and not self._has_stopped:
                self._log.report(READ_AHEAD_STOPPED, chunks=self._unused, one_in=READS_PER_UNUSED)
            self._has_stopped = stopped
