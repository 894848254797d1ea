"""Circuit breaker of one tier: when dispatch stops using it, and when it is tried again.

Reads no clock: time is an argument. Operations that were under way when the breaker opened still end. They change
nothing: only a trial closes the breaker.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import Enum
from itertools import count

from tierkv.types.keys import Key, make_key
from tierkv.types.state_machine import TRANSITIONS_KEPT, StateMachine, TransitionLog


class State(Enum):
    """State of a breaker."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    CLOSED = "closed"
    """Operations are submitted. Enough failures in a row, or a trip, open the breaker."""
    OPEN = "open"
    """No operations are submitted. A trial may begin when the cooldown is over."""
    HALF_OPEN = "half_open"
    """One trial is under way. Its answer closes the breaker; a failure opens it again with a new cooldown."""


class Event(Enum):
    """Event of a breaker."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    TRIPPED = "tripped"
    TRIAL_BEGAN = "trial began"
    TRIAL_SUCCEEDED = "trial succeeded"
    TRIAL_FAILED = "trial failed"


TABLE: dict[tuple[State, Event], State] = {
    (State.CLOSED, Event.TRIPPED): State.OPEN,
    (State.OPEN, Event.TRIPPED): State.OPEN,
    (State.OPEN, Event.TRIAL_BEGAN): State.HALF_OPEN,
    (State.HALF_OPEN, Event.TRIPPED): State.HALF_OPEN,
    (State.HALF_OPEN, Event.TRIAL_SUCCEEDED): State.CLOSED,
    (State.HALF_OPEN, Event.TRIAL_FAILED): State.OPEN,
}

BREAKER_STATES = StateMachine("breaker", TABLE)
"""Lookup in the table above."""


FIRST_SHARE = 1 / 8
"""Share of the cooldown before the first trial of an outage. Most outages are short; a tier that flaps gets it all."""
TRIAL_GROWTH, FLAP_GROWTH = 1.25, 2.0
"""Factors by which the time to the next trial grows after a failed trial, and after a return that did not last. A trial
costs less than the failed operations that end a short service."""


def trial_keys() -> Iterator[Key]:
    """Yield keys for trials to probe: no chunk has them, and their absence is a valid answer.

    Each trial probes another one. A tier of several servers spreads its keys over them, so trials ask one after the
    other, and a dead server does not keep those that live out of service.
    """
    return (make_key(b"tierkv: are you there? %d" % number, 0) for number in count())


class Breaker:
    """Counts failures and moves by the table. Used on the engine's thread alone; every method is O(1).

    Args:
        tier: name of the tier, for error messages.
        failures_max: failures in a row that open it.
        cooldown_s: longest time between opening and the next trial, and the shortest time in service after which the
            next outage is a new one. Its first trial is after :data:`FIRST_SHARE` of it, and each one after
            :data:`TRIAL_GROWTH` times the previous time.
    """

    def __init__(self, tier: str, failures_max: int, cooldown_s: float) -> None:
        self._tier = tier
        self._failures_max = failures_max
        self._cooldown_s = cooldown_s
        self._failures = 0
        self._changed_s = -math.inf
        self._pause_s = cooldown_s
        self._transitions: TransitionLog[Event, State] = TransitionLog(maxlen=TRANSITIONS_KEPT)
        self.state = State.CLOSED
        self.usable = True
        """Whether operations may be submitted: the state is CLOSED."""

    def succeeded(self) -> None:
        """An operation was answered."""
        self._failures = 0

    def failed(self, now_s: float, weight: int = 1) -> None:
        """An operation failed or missed its deadline; opens the breaker after ``failures_max`` in a row.

        weight: failures as which it counts.
        """
        self._failures += weight
        if self.state is State.CLOSED and self._failures >= self._failures_max:
            self._on(Event.TRIPPED, now_s)

    def trip(self, now_s: float) -> None:
        """Open the breaker at once."""
        self._on(Event.TRIPPED, now_s)

    def trial_is_due(self, now_s: float) -> bool:
        """Whether the cooldown is over."""
        return self.state is State.OPEN and now_s >= self._changed_s + self._pause_s

    def trial_began(self, now_s: float) -> None:
        """A trial was submitted."""
        self._on(Event.TRIAL_BEGAN, now_s)

    def trial_ended(self, now_s: float, *, answered: bool) -> None:
        """The trial ended. answered: whether the tier served it."""
        self._on(Event.TRIAL_SUCCEEDED if answered else Event.TRIAL_FAILED, now_s)

    def _on(self, event: Event, now_s: float) -> None:
        before = self.state
        after = BREAKER_STATES.next(before, event, self._tier, self._transitions.describe)
        if after is not before:
            self._transitions.append((event, after))
            self._failures = 0
            if after is State.OPEN:
                is_new = before is State.CLOSED and now_s >= self._changed_s + self._cooldown_s
                longer_s = self._pause_s * (FLAP_GROWTH if before is State.CLOSED else TRIAL_GROWTH)
                self._pause_s = self._cooldown_s * FIRST_SHARE if is_new else min(longer_s, self._cooldown_s)
            self._changed_s = now_s
        self.state, self.usable = after, after is State.CLOSED
