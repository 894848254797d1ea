"""Writes to one tier while they fail: refused but for a trial, whether or not the tier's reads succeed.

A disk that turned read-only, or is worn out, still reads. Its reads keep the tier in service, so its writes are counted
by a breaker of their own. Used on the engine's thread alone; no method waits.
"""

from __future__ import annotations

from tierkv.dispatch.breaker import Breaker
from tierkv.logs.definitions import TIER_NOT_WRITABLE, TIER_WRITABLE
from tierkv.logs.stack_log import StackLog


class WriteGate:
    """Breaker of one tier's writes. Its trial is the next write after the cooldown.

    Args:
        tier: name of the tier.
        failures_max: failed writes in a row that close the gate.
        cooldown_s: seconds from the closing to the first trial, and between trials.
        log: receives a line when the gate closes, and when it opens.
    """

    def __init__(self, tier: str, failures_max: int, cooldown_s: float, log: StackLog) -> None:
        self._tier = tier
        self._log = log
        self._closed_s = 0.0
        self._breaker = Breaker(tier, failures_max, cooldown_s)
        self._trial: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether the last writes did not all fail."""
        return self._breaker.usable

    def may_write(self, now_s: float) -> bool:
        """Whether a write may be submitted: the gate is open, or a trial is due."""
        return self._breaker.usable or self._breaker.trial_is_due(now_s)

    def submitted(self, op_id: int, now_s: float) -> None:
        """A write was submitted. With the gate closed, it is the trial."""
        if not self._breaker.usable:
            self._trial = op_id
            self._breaker.trial_began(now_s)

    def ended(self, op_id: int, now_s: float, failure: str = "") -> bool:
        """A write ended; ``failure`` is empty if it was answered.

        Returns:
            Whether the gate was open before.
        """
        was_open = self._breaker.usable
        if op_id == self._trial:
            self._trial = None
            self._breaker.trial_ended(now_s, answered=not failure)
        elif failure:
            self._breaker.failed(now_s)
        else:
            self._breaker.succeeded(now_s)
        if was_open and not self._breaker.usable:
            self._closed_s = now_s
            self._log.report(TIER_NOT_WRITABLE, tier=self._tier, reason=failure)
        elif self._breaker.usable and not was_open:
            self._log.report(TIER_WRITABLE, tier=self._tier, seconds_out=now_s - self._closed_s)
        return was_open
