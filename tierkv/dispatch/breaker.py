"""The breaker of one tier: when to leave it alone, and when to try it again. Reads no clock: time comes in.

========= ========= =========================================================================================
state     usable    leaves it by
========= ========= =========================================================================================
CLOSED    yes       enough operations in a row failed, or it was tripped -> OPEN
OPEN      no        the cooldown is over and a trial begins -> HALF_OPEN
HALF_OPEN no        the trial was answered -> CLOSED; it was not -> OPEN, with a new cooldown
========= ========= =========================================================================================

Operations that were under way when the breaker opened still end; they change nothing, the trial decides.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

from tierkv.errors import IllegalTransitionError

_STORY_MAX = 16


class State(Enum):
    """What the breaker lets through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Event(Enum):
    """What happens to it."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TRIPPED = "tripped"
    TRIAL_BEGAN = "trial_began"
    TRIAL_SUCCEEDED = "trial_succeeded"
    TRIAL_FAILED = "trial_failed"


TABLE: dict[tuple[State, Event], State] = {
    (State.CLOSED, Event.SUCCEEDED): State.CLOSED,
    (State.CLOSED, Event.FAILED): State.CLOSED,
    (State.CLOSED, Event.TRIPPED): State.OPEN,
    (State.OPEN, Event.SUCCEEDED): State.OPEN,
    (State.OPEN, Event.FAILED): State.OPEN,
    (State.OPEN, Event.TRIPPED): State.OPEN,
    (State.OPEN, Event.TRIAL_BEGAN): State.HALF_OPEN,
    (State.HALF_OPEN, Event.SUCCEEDED): State.HALF_OPEN,
    (State.HALF_OPEN, Event.FAILED): State.HALF_OPEN,
    (State.HALF_OPEN, Event.TRIPPED): State.HALF_OPEN,
    (State.HALF_OPEN, Event.TRIAL_SUCCEEDED): State.CLOSED,
    (State.HALF_OPEN, Event.TRIAL_FAILED): State.OPEN,
}


class Breaker:
    """See the module. Used on the engine's thread alone; every method is O(1).

    Args:
        failures_max: operations that must fail in a row.
        cooldown_s: seconds that it stays open at least.
    """

    def __init__(self, failures_max: int, cooldown_s: float) -> None:
        self._failures_max = failures_max
        self._cooldown_s = cooldown_s
        self._failures = 0
        self._opened_s = 0.0
        self._story: deque[tuple[State, Event]] = deque(maxlen=_STORY_MAX)
        self.state = State.CLOSED

    @property
    def usable(self) -> bool:
        """Whether operations may be submitted."""
        return self.state is State.CLOSED

    def succeeded(self, now_s: float) -> None:
        """An operation was answered."""
        self._failures = 0
        self._on(Event.SUCCEEDED, now_s)

    def failed(self, now_s: float) -> None:
        """An operation failed or missed its deadline; opens the breaker if that is enough."""
        self._failures += 1
        self._on(Event.FAILED, now_s)
        if self.state is State.CLOSED and self._failures >= self._failures_max:
            self._on(Event.TRIPPED, now_s)

    def trip(self, now_s: float) -> None:
        """Open it, whatever was counted."""
        self._on(Event.TRIPPED, now_s)

    def trial_is_due(self, now_s: float) -> bool:
        """Whether the cooldown is over."""
        return self.state is State.OPEN and now_s >= self._opened_s + self._cooldown_s

    def trial_began(self, now_s: float) -> None:
        """One operation is on its way to find out."""
        self._on(Event.TRIAL_BEGAN, now_s)

    def trial_ended(self, now_s: float, *, answered: bool) -> None:
        """It found out."""
        self._on(Event.TRIAL_SUCCEEDED if answered else Event.TRIAL_FAILED, now_s)

    def _on(self, event: Event, now_s: float) -> None:
        before = self.state
        after = TABLE.get((before, event))
        if after is None:
            story = ", ".join(f"{state.name} {past.name}" for state, past in self._story)
            raise IllegalTransitionError(f"breaker in {before.name} cannot take {event.name}; so far: {story}")
        if after is not before:
            self._story.append((before, event))
            self._failures = 0
            self._opened_s = now_s
        self.state = after
