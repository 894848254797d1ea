"""Warnings in the log that load costs hits: a lookup was late, or reading ahead has stopped."""

from __future__ import annotations

import logging
import math

from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.lookup.read_ahead import READS_PER_UNUSED, read_ahead_credit

WARNING_INTERVAL_S = 60.0
"""Seconds between two warnings of one kind."""

_log = logging.getLogger(__name__)


class LoadWarnings:
    """Logs the first warning of each kind in a minute, and the number of those between.

    Args:
        counters: show what has happened.
    """

    def __init__(self, counters: CoreCounters) -> None:
        self._counters = counters
        self._in_vain = 0
        self._has_stopped = False
        self._warned_s: dict[str, float] = {}
        self._dropped: dict[str, int] = {}

    def answered(self, request_id: str, expired: int, now_s: float) -> None:
        """Look at the counters after a question.

        Args:
            request_id: the request that the engine asked about.
            expired: ``deadlines_expired`` before the question.
            now_s: time in seconds on the stack's clock.
        """
        counters = self._counters
        if counters.deadlines_expired > expired:
            self._warn(
                "late",
                f"the lookup of request {request_id!r} was late: a tier has delivered nothing for lookup.deadline_s, "
                "so the answer is the part that was ready",
                now_s,
            )
        if counters.chunks_read_in_vain != self._in_vain:
            self._in_vain = counters.chunks_read_in_vain
            stopped = read_ahead_credit(counters) <= 0
            if stopped and not self._has_stopped:
                self._warn(
                    "stopped",
                    f"reading ahead has stopped: {self._in_vain} chunks were read for nothing, more than one in "
                    f"{READS_PER_UNUSED}; it goes on when enough other chunks were read",
                    now_s,
                )
            self._has_stopped = stopped

    def _warn(self, kind: str, message: str, now_s: float) -> None:
        """Log a message, unless one of its kind was logged less than a minute before."""
        if now_s - self._warned_s.get(kind, -math.inf) < WARNING_INTERVAL_S:
            self._dropped[kind] = self._dropped.get(kind, 0) + 1
            return
        self._warned_s[kind] = now_s
        _log.warning("%s (%s more since the previous one)", message, self._dropped.pop(kind, 0))
