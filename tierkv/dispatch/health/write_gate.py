"""Writes to one tier while they fail: refused but for a trial, whether or not the tier's reads succeed.

A disk that turned read-only, or is worn out, still reads. Its reads keep the tier in service, so its writes are counted
by a breaker of their own. A storage without room answers: its writes go on, since the tier evicts to make room. If none
finds room for a while, the tier is not writable either, and says so. Where deletions fail, as on a storage that
copies what it changes and is full, the tier waits for its evictions, and no write is submitted. Used on the engine's
thread alone; no method waits.
"""

from __future__ import annotations

from tierkv.dispatch.health.breaker import Breaker
from tierkv.logs.definitions import TIER_NOT_WRITABLE, TIER_WRITABLE
from tierkv.logs.stack_log import StackLog

NO_ROOM_S = 1.0
"""Seconds for which no write finds room in a tier that is not writable. A full tier that evicts has room sooner."""


class WriteGate:
    """Breaker of one tier's writes. Its trial is the next write after the cooldown.

    Args:
        tier: name of the tier.
        failures_max: failed writes in a row that close the gate.
        cooldown_s: as of :class:`.Breaker`, from the closing to a trial.
        log: receives a line when the tier is no longer writable, and when it is again.
    """

    def __init__(self, tier: str, failures_max: int, cooldown_s: float, log: StackLog) -> None:
        self._tier = tier
        self._log = log
        self._closed_s = 0.0
        self._breaker = Breaker(tier, failures_max, cooldown_s)
        self._trial: int | None = None
        self._no_room_s: float | None = None
        self._undeleted_s: float | None = None
        self._has_room = True

    @property
    def is_open(self) -> bool:
        """Whether the tier is writable: the last writes did not all fail, nor did writes or evictions lack room."""
        return self._breaker.usable and self._has_room

    def may_write(self, now_s: float) -> bool:
        """Whether a write may be submitted: the gate is open, or a trial is due."""
        return self._breaker.usable or self._breaker.trial_is_due(now_s)

    def submitted(self, op_id: int, now_s: float) -> None:
        """A write was submitted. With the gate closed, it is the trial."""
        if not self._breaker.usable:
            self._trial = op_id
            self._breaker.trial_began(now_s)

    def ended(self, op_id: int, now_s: float, failure: str = "") -> bool:
        """A write ended; ``failure`` is empty if it stored something.

        Returns:
            Whether writes were accepted before.
        """
        was_open, was_usable = self.is_open, self._breaker.usable
        if not failure:
            self._no_room_s, self._undeleted_s, self._has_room = None, None, True
        self._count(op_id, now_s, failure)
        self._report(now_s, failure, was_open=was_open)
        return was_usable

    def failed_in_part(self, op_id: int, now_s: float) -> None:
        """A write failed at a part of the storage that cannot be reached. It counts only as a trial, which failed."""
        if op_id == self._trial:
            self._count(op_id, now_s, "a part cannot be reached")

    def found_no_room(self, op_id: int, now_s: float, reason: str) -> None:
        """A write was answered, and the storage had no room for any of its chunks."""
        was_open = self.is_open
        if self._no_room_s is None:
            self._no_room_s = now_s
        self._has_room = self._has_room and now_s - self._no_room_s < NO_ROOM_S
        self._count(op_id, now_s, "")
        self._report(now_s, reason, was_open=was_open)

    def deletion_ended(self, now_s: float, failure: str | None) -> None:
        """A deletion ended. failure: why none of its chunks was deleted; None: some were.

        A full tier that cannot evict has no room, and no write is submitted that would show it.
        """
        was_open = self.is_open
        if failure is None:
            self._undeleted_s = None
            return
        if self._undeleted_s is None:
            self._undeleted_s = now_s
        self._has_room = self._has_room and now_s - self._undeleted_s < NO_ROOM_S
        self._report(now_s, failure, was_open=was_open)

    def _count(self, op_id: int, now_s: float, failure: str) -> None:
        if op_id == self._trial:
            self._trial = None
            self._breaker.trial_ended(now_s, answered=not failure)
        elif failure:
            self._breaker.failed(now_s)
        else:
            self._breaker.succeeded()

    def _report(self, now_s: float, reason: str, *, was_open: bool) -> None:
        if was_open and not self.is_open:
            self._closed_s = now_s
            self._log.report(TIER_NOT_WRITABLE, tier=self._tier, reason=reason)
        elif self.is_open and not was_open:
            self._log.report(TIER_WRITABLE, tier=self._tier, seconds_out=now_s - self._closed_s)
