"""Log lines of one tier about failed operations and about its service. Used on the engine's thread alone."""

from __future__ import annotations

from tierkv.dispatch.stats import Tally
from tierkv.logs.definitions import (
    DEADLINE_MISSED,
    FRAME_DAMAGED,
    FRAME_IN_CLEAR,
    FRAME_UNREADABLE,
    OPERATION_FAILED,
    QUEUE_FULL,
    TIER_FULL,
    TIER_IN_SERVICE,
    TIER_NOT_CLOSED,
    TIER_OUT_OF_SERVICE,
    LogEvent,
)
from tierkv.logs.stack_log import StackLog
from tierkv.types.tier_ops import OutcomeKind, TierOp, Verb

EVENT_OF: dict[OutcomeKind, LogEvent] = {
    OutcomeKind.CORRUPT: FRAME_DAMAGED,
    OutcomeKind.UNREADABLE: FRAME_UNREADABLE,
    OutcomeKind.FAILED: OPERATION_FAILED,
    OutcomeKind.NO_SPACE: TIER_FULL,
    OutcomeKind.TIMED_OUT: DEADLINE_MISSED,
}
"""Event that each fault is logged as."""


class FailureLog:
    """Reports what operations of one tier ended with, and when the tier goes out of service and returns.

    Args:
        tier: name of the tier.
        log: writes the lines.
    """

    def __init__(self, tier: str, log: StackLog) -> None:
        self._tier = tier
        self._log = log
        self._left_s: float | None = None

    def ended(self, verb: Verb, tally: Tally) -> None:
        """Report the faults of an operation that has ended."""
        for kind, (count, reason) in tally.faults.items():
            self._report(EVENT_OF[kind], verb, count, reason=reason or None)
        if tally.clear:
            self._report(FRAME_IN_CLEAR, verb, tally.clear, reason=tally.clear_reason or "accepted (accept_clear)")

    def missed(self, op: TierOp, deadline_s: float) -> None:
        """Report an operation that did not end within its ``deadline_s`` seconds."""
        self._report(DEADLINE_MISSED, op.verb, len(op.keys), deadline_s=deadline_s)

    def queue_is_full(self, op: TierOp) -> None:
        """Report an operation that was refused because too many wait."""
        self._report(QUEUE_FULL, op.verb, len(op.keys))

    def service_changed(self, reason: str, now_s: float, *, usable: bool) -> None:
        """Report that the tier has left service, or is in service again."""
        if usable:
            seconds_out = None if self._left_s is None else now_s - self._left_s
            self._log.report(TIER_IN_SERVICE, tier=self._tier, reason=reason, seconds_out=seconds_out)
        else:
            self._left_s = now_s
            self._log.report(TIER_OUT_OF_SERVICE, tier=self._tier, reason=reason)

    def not_closed(self, error: str) -> None:
        """Report an error of the backend's close."""
        self._log.report(TIER_NOT_CLOSED, tier=self._tier, reason=error)

    def _report(self, event: LogEvent, verb: Verb, chunks: int, **fields: object) -> None:
        self._log.report(event, kind=verb.value, tier=self._tier, verb=verb.value, chunks=chunks, **fields)
