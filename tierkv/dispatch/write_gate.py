"""Writes to one tier while they fail: refused but for a trial, whether or not the tier's reads succeed.

A disk that turned read-only, or is worn out, still reads. Its reads keep the tier in service, so its writes are counted
by a breaker of their own. Used on the engine's thread alone; no method waits.
"""

from __future__ import annotations

import logging

from tierkv.dispatch.breaker import Breaker

_log = logging.getLogger(__name__)


class WriteGate:
    """Breaker of one tier's writes. Its trial is the next write after the cooldown.

    Args:
        tier: name of the tier.
        failures_max: failed writes in a row that close the gate.
        cooldown_s: seconds from the closing to the first trial, and between trials.
    """

    def __init__(self, tier: str, failures_max: int, cooldown_s: float) -> None:
        self._tier = tier
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
        """A write ended; ``failure`` is empty if it was answered. Logs once when the gate closes and when it opens.

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
            _log.warning("tier %s cannot be written at present: %s", self._tier, failure)
        elif self._breaker.usable and not was_open:
            _log.warning("tier %s can be written again", self._tier)
        return was_open


def log_service(tier: str, reason: str, *, usable: bool) -> None:
    """Log that a tier has left service, or is in service again."""
    _log.warning("tier %s is %s: %s", tier, "in service again" if usable else "out of service", reason)
