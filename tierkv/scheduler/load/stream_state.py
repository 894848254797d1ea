"""The life of a load that streams, as a table. Everything that may change its state stands here."""

from __future__ import annotations

from enum import Enum

from tierkv.types.state_machine import StateMachine


class StreamState(Enum):
    """Where a load that streams stands."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    GATHERING = "gathering"
    """Its next segment is on its way into the host tier; no job of it is in flight."""
    COPYING = "copying"
    """A segment is on its way to the GPU, and the next one into the host tier."""
    ENDING = "ending"
    """Its last job is in flight."""
    ENDED = "ended"
    """Every job of it has ended."""


class StreamEvent(Enum):
    """What can happen to a load that streams."""

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
    # Its request is over, and so are all others: both jobs go out in what may be the last step, one behind the other.
    (_S.COPYING, _E.LAST_SENT): _S.ENDING,
    (_S.ENDING, _E.SEGMENT_ENDED): _S.ENDING,
    (_S.ENDING, _E.LAST_ENDED): _S.ENDED,
}

STREAM_STATES = StateMachine("load of request", STREAM_TRANSITIONS)
"""Lookup in the table above."""
