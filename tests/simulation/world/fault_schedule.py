"""What is wrong with a tier, and when: spells of fault between spells of health, drawn from one seed."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Sequence
from enum import Enum
from random import Random

from tierkv.errors import BackendError, BackendUnavailableError, OutOfSpaceError


class Fault(Enum):
    """One kind of fault. Each may last for many operations."""

    NONE = "none"
    SLOW = "slow"
    """Everything takes longer, often longer than its deadline."""
    HUNG = "hung"
    """Nothing ends before the spell does."""
    STUCK = "stuck"
    """What begins now ends when the run does, or never."""
    RAISING = "raising"
    """Every call raises, before it has done anything."""
    LOST_REPLIES = "lost replies"
    """Calls do some of their work, then raise."""
    PARTIAL = "partial"
    """Some keys of a batch fail."""
    FULL = "full"
    """No room."""
    BABBLING = "babbling"
    """Results break the contract: too few, too many, of other types."""
    FALSE_PRESENCE = "false presence"
    """Says that chunks are there which are not, and the other way round."""
    BAD_READS = "bad reads"
    """Other bytes come back: flipped bits, another chunk's frame, half a frame."""
    FORGETFUL = "forgetful"
    """Writes are acknowledged and not kept, or only half of them."""
    FLAPPING = "flapping"
    """Raises for a moment, works for a moment."""


TAIL_S = (0.1, 1.2)
"""How long it takes where nothing is wrong and it takes long: what began later may end before. Some end beyond their
deadline, most within."""

CALM_S = 0.0005
"""How long calls take when a run comes to rest."""


class FaultSchedule:
    """The fault of one tier over time. All times are seconds of simulated time.

    Args:
        rng: chance.
        menu: what can go wrong; empty: nothing ever does.
        healthy_s, trouble_s: how long spells last on average.
        usual_s: how long calls usually take; any of these.
        tail: the share of calls that takes long although nothing is wrong.
    """

    def __init__(
        self,
        rng: Random,
        menu: Sequence[Fault],
        healthy_s: float,
        faulty_s: float,
        usual_s: Sequence[float],
        tail: float,
    ) -> None:
        self.fault = Fault.NONE
        self.rng = rng
        self._menu = menu
        self._healthy_s = healthy_s
        self._trouble_s = faulty_s
        self._usual_s = usual_s
        self._tail = tail
        self._until_s = -math.inf
        self._now_s = 0.0

    def advance(self, now_s: float) -> bool:
        """Time has passed; whether the fault schedule has changed."""
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
        """Nothing goes wrong any more, and nothing takes long: no deadline is missed."""
        self.fault = Fault.NONE
        self._menu = ()
        self._tail = 0.0
        self._usual_s = (CALM_S,)

    def duration(self) -> float:
        """Seconds that a call takes which begins now."""
        match self.fault:
            case Fault.HUNG | Fault.STUCK:
                return math.inf
            case Fault.SLOW:
                return self.rng.uniform(0.1, 4.0)
        if self.rng.random() < self._tail:
            return self.rng.uniform(*TAIL_S)
        return self.rng.choice(self._usual_s)

    @property
    def raises(self) -> bool:
        """Whether a call that comes now raises at once."""
        if self.fault is Fault.FLAPPING:
            return int(self._now_s * 4) % 2 == 0
        return self.fault is Fault.RAISING

    def error(self) -> BaseException:
        """Something that a plugin might raise."""
        return self.rng.choice(ERRORS)()

    def key_error(self) -> BackendError | None:
        """What goes wrong with one key, if anything does: a value, as the contract wants it."""
        if self.fault is Fault.FULL:
            return OutOfSpaceError("no room left")
        if self.fault is Fault.PARTIAL and self.rng.random() < 0.4:
            return self.rng.choice((BackendUnavailableError("try again"), BackendError("this one is bad")))
        return None


class _UnspeakableError(Exception):
    """An error that cannot be shown."""

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
"""What calls of a backend raise."""
