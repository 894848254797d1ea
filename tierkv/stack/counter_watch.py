"""Log lines about counters of scheduler and manager, which log nothing themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from tierkv.logs.definitions import (
    EVENTS_DROPPED,
    HOST_FULL,
    LOOKUP_LATE,
    POLICY_FAILED,
    READ_AHEAD_STOPPED,
    REQUESTS_WAIT,
    STACK_CLOSED,
    STACK_CLOSED_WITH_LOSS,
    TIER_EVICTS,
    TIER_FAST,
    TIER_SLOW,
    WRITES_DROPPED,
    LogEvent,
)
from tierkv.logs.stack_log import StackLog
from tierkv.metrics.counters import CoreCounters
from tierkv.metrics.watched import WaitingRequests
from tierkv.scheduler.lookup.read_ahead import READS_PER_UNUSED, read_ahead_credit

INTERVAL_S = 1.0
"""Seconds between two looks at the counters."""

LONG_WAIT_S = 5.0
"""Seconds without a chunk after which requests that wait to be read are reported."""

WATCHED: dict[str, tuple[LogEvent, str]] = {
    "evictions": (TIER_EVICTS, "chunks"),
    "cascades_dropped": (WRITES_DROPPED, "chunks"),
    "demotions_dropped": (WRITES_DROPPED, "chunks"),
    "slowdowns": (TIER_SLOW, "times"),
    "recoveries": (TIER_FAST, "times"),
    "stores_refused": (HOST_FULL, "batches"),
    "policies_failed": (POLICY_FAILED, "failures"),
    "events_dropped": (EVENTS_DROPPED, "chunks"),
}
"""Field of the counters -> the event that is reported when it has grown, and the event's field for the growth."""


_watched = attrgetter(*WATCHED)


class CounterWatch:
    """Reports which counters have grown since the last look, and what a close has written and lost.

    Engine's thread. A look costs some microseconds.

    Args:
        counters: of scheduler and manager.
        log: log of the stack.
        waiting: counts the requests that wait to be read.
        busy: names the tiers that are at work.
    """

    def __init__(
        self,
        counters: CoreCounters,
        log: StackLog,
        waiting: Callable[[], WaitingRequests] = WaitingRequests,
        busy: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._counters = counters
        self._log = log
        self._waiting = waiting
        self._busy = busy
        self._seen: dict[tuple[str, str], int] = {}
        self._reads_ahead = True

    def look(self) -> None:
        """Report the growth of each watched counter, and what is still suppressed."""
        for (name, (event, unit)), value in zip(WATCHED.items(), _watched(self._counters), strict=True):
            if not value:  # most of them
                continue
            for tier, count in value.items() if isinstance(value, Mapping) else (("", value),):
                grown = count - self._seen.get((name, tier), 0)
                if grown:
                    self._seen[name, tier] = count
                    fields: dict[str, Any] = {"tier": tier} if tier else {}
                    fields[unit] = grown
                    self._log.report(event, kind=name, **fields)
        self._look_at_read_ahead()
        if (waiting := self._waiting()).age_s >= LONG_WAIT_S:
            self._log.report(REQUESTS_WAIT, **waiting._asdict())
        self._log.report_suppressed()

    def _look_at_read_ahead(self) -> None:
        """Report that reading ahead has stopped, because too many reads were for nothing."""
        before, self._reads_ahead = self._reads_ahead, read_ahead_credit(self._counters) > 0
        if before and not self._reads_ahead:
            unused = self._counters.chunks_read_in_vain
            self._log.report(READ_AHEAD_STOPPED, chunks=unused, one_in=READS_PER_UNUSED)

    def answered(self, request_id: str, expired: int) -> None:
        """Report a late lookup with its request, which a later look could not name.

        Args:
            request_id: the request that the engine asked about.
            expired: ``deadlines_expired`` before the question.
        """
        if self._counters.deadlines_expired > expired:
            self._log.report(LOOKUP_LATE, request=request_id, tiers=",".join(self._busy()))

    def written_and_lost(self) -> tuple[int, int]:
        """Chunks written to lower tiers so far, and chunks that were lost on the way."""
        counters = self._counters
        written = sum(counters.cascades.values()) + sum(counters.demotions.values())
        return written, counters.lost_below

    def closed(self, began: tuple[int, int], abandoned_calls: int, seconds: float, *, complete: bool) -> None:
        """Report the end of the stack.

        Args:
            began: :meth:`written_and_lost` when the close began.
            abandoned_calls: calls to backends that still run.
            seconds: duration of the close.
            complete: whether everything reached its tiers.
        """
        self.look()
        self._log.report_suppressed(all_kinds=True)
        written, lost = self.written_and_lost()
        event = STACK_CLOSED if complete and not abandoned_calls else STACK_CLOSED_WITH_LOSS
        self._log.report(
            event,
            written=written - began[0],
            dropped=lost - began[1],
            abandoned_calls=abandoned_calls,
            seconds=seconds,
        )
