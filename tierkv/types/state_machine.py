"""State machines as literal tables: one lookup and one log of transitions for chunks, requests, loads and breakers.

The module of a machine holds two enumerations and one table, (state, event) -> state after. Everything that may change
the state of an item is a row of that table. :meth:`StateMachine.next` finds the row; an event without a row is a bug,
and raises with the latest transitions of the item.

States and events are looked up in every engine step. Their classes set ``__hash__ = object.__hash__``, because the hash
of :class:`enum.Enum` is a call into Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Generic, TypeVar

from tierkv.errors import IllegalTransitionError

TRANSITIONS_KEPT = 16
"""Latest transitions that the log of one item keeps."""

StateT = TypeVar("StateT", bound=Enum)
EventT = TypeVar("EventT", bound=Enum)


class StateMachine(Generic[StateT, EventT]):
    """One kind of item and its table.

    Args:
        kind: noun for error messages, such as "request".
        table: (state, event) -> state after.
    """

    __slots__ = ("kind", "table")

    def __init__(self, kind: str, table: Mapping[tuple[StateT, EventT], StateT]) -> None:
        self.kind = kind
        self.table = table

    def next(self, state: StateT, event: EventT, name: str | bytes, log: Callable[[], str]) -> StateT:
        """State of an item after ``event``.

        name: of the item, for the error message. log: returns the transitions of the item; called only on an error.

        Raises:
            IllegalTransitionError: the table has no such row.
        """
        try:
            return self.table[state, event]
        except KeyError:
            shown = name.hex() if isinstance(name, bytes) else repr(name)
            raise IllegalTransitionError(
                f"{self.kind} {shown} is {state.value}: event {event.value!r} is not allowed. Transitions: {log()}"
            ) from None


class TransitionLog(deque[tuple[EventT, StateT]]):
    """Latest transitions of one item: pairs of an event and the state after it, oldest first.

    A deque with a bound, so that ``append`` costs no call into Python: ``TransitionLog(maxlen=TRANSITIONS_KEPT)``.
    """

    __slots__ = ()

    def describe(self) -> str:
        """Text for error messages."""
        return describe_transitions(self) or "none yet"


def describe_transitions(transitions: Iterable[tuple[Enum | None, Enum]]) -> str:
    """Text of some transitions, oldest first. Event None: the item was created in that state."""
    return "; ".join(f"{'created' if event is None else event.value} -> {state.value}" for event, state in transitions)
