"""State machine of a load that streams. Every event that may change its state is a row of the table."""

from __future__ import annotations

from enum import Enum

from tierkv.types.state_machine import StateMachine


class StreamState(Enum):
    """State of a load that streams."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    GATHERING = "gathering"
    """Its next segment is being gathered in the host tier; none of its jobs is in flight."""
    COPYING = "copying"
    """A segment is being copied to the GPU, and the next one is being gathered."""
    ENDING = "ending"
    """Its last job is in flight."""
    ENDED = "ended"
    """All of its jobs have ended."""


class StreamEvent(Enum):
    """Event of a load that streams."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    SEGMENT_SENT = "segment sent"
    SEGMENT_ENDED = "segment ended"
    LAST_SENT = "last job sent"
    LAST_ENDED = "last job ended"


_S, _E = StreamState, StreamEvent

STREAM_TRANSITIONS: dict[tuple[StreamState, StreamEvent], StreamState] = {
    (_S.GATHERING, _E.SEGMENT_SENT): _S.COPYING,
    (_S.COPYING, _E.SEGMENT_ENDED): _S.GATHERING,
    (_S.GATHERING, _E.LAST_SENT): _S.ENDING,
    # Nothing is left to gather, so the last job does not wait for the one in flight.
    (_S.COPYING, _E.LAST_SENT): _S.ENDING,
    (_S.ENDING, _E.SEGMENT_ENDED): _S.ENDING,
    (_S.ENDING, _E.LAST_ENDED): _S.ENDED,
}

STREAM_STATES = StateMachine("load of request", STREAM_TRANSITIONS)
"""Lookup in the table above."""
