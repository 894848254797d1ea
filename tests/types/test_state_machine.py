"""The lookup and the log that every state machine shares."""

from __future__ import annotations

from enum import Enum

import pytest

from tierkv.errors import IllegalTransitionError
from tierkv.types.state_machine import StateMachine, TransitionLog


class Door(Enum):
    """States of an item to test with."""

    OPEN = "open"
    SHUT = "shut"


class Push(Enum):
    """Events of that item."""

    IN = "pushed in"
    OUT = "pushed out"


DOORS = StateMachine("door", {(Door.OPEN, Push.IN): Door.SHUT, (Door.SHUT, Push.OUT): Door.OPEN})


def test_a_row_of_the_table_is_followed() -> None:
    """The log is not asked for: it costs nothing while no event is illegal."""

    def log() -> str:
        raise AssertionError

    assert DOORS.next(Door.OPEN, Push.IN, "front", log) is Door.SHUT


@pytest.mark.parametrize(("name", "shown"), [("front", "'front'"), (b"\xab", "ab")])
def test_an_event_without_a_row_raises_with_the_log(name: str | bytes, shown: str) -> None:
    """A bug report needs the item, its state, the event and the way to it."""
    log: TransitionLog[Push, Door] = TransitionLog(maxlen=2)
    log.append((Push.OUT, Door.OPEN))
    message = f"^door {shown} is open: event 'pushed out' is not allowed. Transitions: pushed out -> open$"
    with pytest.raises(IllegalTransitionError, match=message):
        DOORS.next(Door.OPEN, Push.OUT, name, log.describe)


def test_a_log_keeps_the_latest() -> None:
    """A request may live for days: its log has a bound."""
    log: TransitionLog[Push, Door] = TransitionLog(maxlen=2)
    assert log.describe() == "none yet"
    for event, state in ((Push.IN, Door.SHUT), (Push.OUT, Door.OPEN), (Push.IN, Door.SHUT)):
        log.append((event, state))
    assert log.describe() == "pushed out -> open; pushed in -> shut"
