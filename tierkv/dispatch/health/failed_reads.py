"""Reads of one tier that failed in a row, whether or not its other operations succeed.

An access list that refuses reads, a bucket that may only be written, or unreadable files: probes and writes succeed, so
each hit would be announced, would fail, and its request would wait for nothing. Reads are therefore counted on their
own. An outage that they cause ends when a read is answered. Used on the engine's thread alone; no method waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tierkv.types.keys import Key
from tierkv.types.tier_ops import Outcome, OutcomeKind

TRIED_MAX = 2
"""Chunks of each kind that a trial reads: those of failed reads, and those that were read or written. It has the
deadline of one read, and its buffers are mapped for it alone."""
TRIALS_MAX = 12
"""Trials that read nothing. The next one probes, and requests read again: they may want chunks that can be read."""

_FAILURES = {OutcomeKind.FAILED, OutcomeKind.TIMED_OUT}


class FailedReads:
    """Counts failed reads, and knows chunks that show whether the tier can be read again.

    Args:
        failures_max: failed reads in a row after which the tier counts as unreadable.
    """

    def __init__(self, failures_max: int) -> None:
        self._failures_max = failures_max
        self._failed: deque[Key] = deque(maxlen=failures_max)
        self._known: deque[Key] = deque(maxlen=TRIED_MAX)
        self._trials = 0  # in a row
        self.timeout_s = 0.0
        """Seconds that the latest failed read was given, and that a read in a trial gets."""

    @property
    def are_too_many(self) -> bool:
        """Whether the tier counts as unreadable."""
        return len(self._failed) == self._failures_max

    def failed(self, key: Key, timeout_s: float) -> None:
        """A read failed. key: one of its chunks; timeout_s: seconds that it was given."""
        self._failed.append(key)
        self.timeout_s = timeout_s

    def answered(self, key: Key) -> None:
        """A read was answered."""
        self._known.append(key)
        self._failed.clear()
        self._trials = 0

    def written(self, key: Key) -> None:
        """A chunk was written."""
        self._known.append(key)

    def trial_keys(self) -> tuple[Key, ...]:
        """Chunks to read in a trial: those of failed reads, and the ones that were last read or written. None: probe.

        Of both kinds, so that a few chunks that can never be read again do not keep the tier out of service. If no
        others are known, as in a new process, one failed read of a request is risked from time to time.
        """
        self._trials = (self._trials + 1) % (TRIALS_MAX + 1)
        return tuple(dict.fromkeys([*list(self._failed)[-TRIED_MAX:], *self._known])) if self._trials else ()

    def trial_ended(self, outcomes: Sequence[Outcome]) -> bool:
        """Return whether the reads of a trial show that the tier can be read, and count anew then.

        Absent chunks show nothing while others fail.
        """
        kinds = {outcome.kind for outcome in outcomes}
        is_answered = not kinds & _FAILURES or bool(kinds - _FAILURES - {OutcomeKind.ABSENT})
        if is_answered:
            self._failed.clear()
            self._trials = 0
        return is_answered
