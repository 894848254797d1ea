"""Fault schedule of a tier: spells of faults between spells of health, drawn from one seed."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Sequence
from enum import Enum
from random import Random

from tierkv.errors import BackendError, BackendUnavailableError, OutOfSpaceError


class Fault(Enum):
    """Kind of fault. Each may last for many operations."""

    NONE = "none"
    SLOW = "slow"
    """Everything takes longer, often longer than its deadline."""
    DEGRADED = "degraded"
    """Everything takes much longer, and ends before its deadline."""
    HUNG = "hung"
    """No call ends before the spell does."""
    STUCK = "stuck"
    """Calls that begin now end at the end of the run, or never."""
    RAISING = "raising"
    """Every call raises without effect."""
    LOST_REPLIES = "lost replies"
    """Calls take effect in part, then raise."""
    PARTIAL = "partial"
    """Some keys of a batch fail."""
    FULL = "full"
    """Writes fail for lack of space."""
    BABBLING = "babbling"
    """Results break the contract: too few, too many, of other types."""
    FALSE_PRESENCE = "false presence"
    """Presence is reported wrongly, in both directions."""
    BAD_READS = "bad reads"
    """Reads return other bytes: flipped bits, another chunk's frame, half a frame."""
    FORGETFUL = "forgetful"
    """Writes are acknowledged and not stored, or only half of them."""
    FLAPPING = "flapping"
    """Calls raise for a moment and work for a moment, in turns."""


TAIL_S = (0.1, 1.2)
"""Range of long calls without a fault: a later call may end before. Some exceed their deadline, most do not."""

DEGRADED_S = (0.15, 0.28)
"""Range of the calls to a tier that is degraded."""

CALM_S = 0.0005
"""Duration of calls when a run comes to rest."""


class FaultSchedule:
    """Fault of one tier over time. All times are seconds of simulated time.

    Args:
        rng: chance.
        menu: what can go wrong; empty: nothing ever does.
        healthy_s, trouble_s: how long spells last on average.
        usual_s: how long calls usually take; any of these.
        tail: the share of calls that takes long although nothing is wrong.
        probe_key_s: seconds that a probe takes per key, in addition.
    """

    def __init__(
        self,
        rng: Random,
        menu: Sequence[Fault],
        healthy_s: float,
        faulty_s: float,
        usual_s: Sequence[float],
        tail: float,
        probe_key_s: float,
    ) -> None:
        self.fault = Fault.NONE
        self.rng = rng
        self._menu = menu
        self._healthy_s = healthy_s
        self._trouble_s = faulty_s
        self._usual_s = usual_s
        self._tail = tail
        self._probe_key_s = probe_key_s
        self._until_s = -math.inf
        self._now_s = 0.0

    def advance(self, now_s: float) -> bool:
        """Move to a time. Returns whether the fault has changed."""
        self._now_s = now_s
        if now_s < self._until_s or not self._menu:
            return False
        before, rng = self.fault, self.rng
        first = self._until_s == -math.inf
        healthy = first or before is not Fault.NONE
        self.fault = Fault.NONE if healthy else rng.choice(self._menu)
        self._until_s = now_s + rng.expovariate(1 / (self._healthy_s if healthy else self._trouble_s))
        return self.fault is not before

    def clear_up(self) -> None:
        """End all faults and long calls: no deadline is missed any more."""
        self.fault = Fault.NONE
        self._menu = ()
        self._tail = self._probe_key_s = 0.0
        self._usual_s = (CALM_S,)

    def duration(self, probed_keys: int = 0) -> float:
        """Seconds of a call that begins now. probed_keys: number of keys, if it is a probe."""
        match self.fault:
            case Fault.HUNG | Fault.STUCK:
                return math.inf
            case Fault.DEGRADED:
                return self.rng.uniform(*DEGRADED_S)
            case Fault.SLOW:
                return self.rng.uniform(0.1, 4.0)
        if self.rng.random() < self._tail:
            return self.rng.uniform(*TAIL_S)
        return self.rng.choice(self._usual_s) + probed_keys * self._probe_key_s

    @property
    def raises(self) -> bool:
        """Whether a call raises at once now."""
        if self.fault is Fault.FLAPPING:
            return int(self._now_s * 4) % 2 == 0
        return self.fault is Fault.RAISING

    def error(self) -> BaseException:
        """Error that a plugin might raise."""
        return self.rng.choice(ERRORS)()

    def key_error(self) -> BackendError | None:
        """Error of one key, if there is one: a value, as the contract says."""
        if self.fault is Fault.FULL:
            return OutOfSpaceError("no room left")
        if self.fault is Fault.PARTIAL and self.rng.random() < 0.4:
            return self.rng.choice((BackendUnavailableError("try again"), BackendError("this one is bad")))
        return None


class _UnspeakableError(Exception):
    """Error whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: BackendUnavailableError("connection refused"),
    lambda: OSError(errno.EIO, "input/output error"),
    lambda: TimeoutError("timed out"),
    lambda: ConnectionResetError("reset by peer"),
    lambda: RuntimeError("bug in a plugin"),
    lambda: MemoryError("no memory"),
    lambda: KeyError("missing"),
    lambda: SystemExit(3),
    _UnspeakableError,
)
"""Errors that calls of a backend raise."""
