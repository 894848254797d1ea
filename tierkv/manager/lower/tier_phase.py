"""Phases of a lower tier, as a table: everything that may change whether the tier is used.

Two things vary independently: whether dispatch can reach the tier, and whether a reset is still deleting its chunks. A
detached tier only ends what is under way.
"""

from __future__ import annotations

from enum import Enum
from typing import Self

from tierkv.types.state_machine import StateMachine


class TierPhase(Enum):
    """Phase of a lower tier. ``usable`` and ``emptying`` are plain attributes, because hot paths read them."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    usable: bool
    """Whether reads, writes and deletions may be issued."""
    emptying: bool
    """Whether a reset is deleting its chunks, so that it answers nothing and takes nothing."""

    SERVING = "serving", True, False
    """In service."""
    DOWN = "down", False, False
    """Out of service: its circuit breaker is open. Counts as empty; chunks that wait for it are dropped."""
    EMPTYING = "emptying", True, True
    """A reset is deleting its chunks, some in each step."""
    EMPTYING_DOWN = "emptying_down", False, True
    """Out of service before a reset has deleted everything. Deletes nothing until it is back."""
    DETACHED = "detached", False, False
    """Taken out of the stack. Operations that are under way still end."""

    def __new__(cls, value: str, usable: bool, emptying: bool) -> Self:  # noqa: FBT001 - columns of the list above
        """Member with its attributes; its value is the first one."""
        member = object.__new__(cls)
        member._value_ = value
        member.usable = usable
        member.emptying = emptying
        return member


class TierEvent(Enum):
    """Event of a lower tier."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    HEALTH_LOST = "health lost"
    HEALTH_REGAINED = "health regained"
    RESET = "reset"
    EMPTIED = "emptied"
    DETACHED = "detached"


_P, _E = TierPhase, TierEvent

TRANSITIONS: dict[tuple[TierPhase, TierEvent], TierPhase] = {
    (_P.SERVING, _E.HEALTH_LOST): _P.DOWN,
    (_P.SERVING, _E.HEALTH_REGAINED): _P.SERVING,
    (_P.SERVING, _E.RESET): _P.EMPTYING,
    (_P.SERVING, _E.DETACHED): _P.DETACHED,
    (_P.DOWN, _E.HEALTH_LOST): _P.DOWN,
    (_P.DOWN, _E.HEALTH_REGAINED): _P.SERVING,
    (_P.DOWN, _E.RESET): _P.EMPTYING_DOWN,
    (_P.DOWN, _E.DETACHED): _P.DETACHED,
    (_P.EMPTYING, _E.HEALTH_LOST): _P.EMPTYING_DOWN,
    (_P.EMPTYING, _E.HEALTH_REGAINED): _P.EMPTYING,
    (_P.EMPTYING, _E.RESET): _P.EMPTYING,
    (_P.EMPTYING, _E.EMPTIED): _P.SERVING,
    (_P.EMPTYING, _E.DETACHED): _P.DETACHED,
    (_P.EMPTYING_DOWN, _E.HEALTH_LOST): _P.EMPTYING_DOWN,
    (_P.EMPTYING_DOWN, _E.HEALTH_REGAINED): _P.EMPTYING,
    (_P.EMPTYING_DOWN, _E.RESET): _P.EMPTYING_DOWN,
    (_P.EMPTYING_DOWN, _E.EMPTIED): _P.DOWN,
    (_P.EMPTYING_DOWN, _E.DETACHED): _P.DETACHED,
    # Dispatch still reports the health of a tier whose operations have not ended.
    (_P.DETACHED, _E.HEALTH_LOST): _P.DETACHED,
    (_P.DETACHED, _E.HEALTH_REGAINED): _P.DETACHED,
}

TIER_PHASES = StateMachine("tier", TRANSITIONS)
"""Lookup in the table above."""
