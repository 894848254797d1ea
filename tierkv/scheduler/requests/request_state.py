"""State machine of a request. Every event that may change the state of a request is a row of the table."""

from __future__ import annotations

from enum import Enum

from tierkv.types.state_machine import StateMachine


class RequestState(Enum):
    """States of the request machine; TRANSITIONS connects them."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    IDLE = "idle"
    """Known; no open lookup, nothing held."""
    ASKING = "asking"
    """Deferred: a tier has not yet answered whether it has the chunks."""
    GATHERING = "gathering"
    """Deferred: wanted chunks are in flight into the host tier, or another request is loading them to the GPU."""
    OFFERED = "offered"
    """A hit was answered; its chunks are held until blocks are allocated, the question changes, or it lapses."""
    LOADING = "loading"
    """A load fills its blocks."""
    RUNNING = "running"
    """Computing, or about to; store jobs may be in flight."""
    FINISHED = "finished"
    """Gets no new jobs; forgotten when the last one has ended."""


class RequestEvent(Enum):
    """Inputs of the request machine."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    UNKNOWN = "unknown"
    WANTED = "wanted"
    MISSED = "missed"
    ANSWERED = "answered"
    LAPSED = "lapsed"
    LOAD_STARTED = "load started"
    LOAD_ENDED = "load ended"
    SCHEDULED = "scheduled"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_S, _E = RequestState, RequestEvent

_ASKED = {_E.UNKNOWN: _S.ASKING, _E.WANTED: _S.GATHERING, _E.MISSED: _S.IDLE, _E.ANSWERED: _S.OFFERED}

TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    **{
        (state, event): after
        for state in (_S.IDLE, _S.ASKING, _S.GATHERING, _S.OFFERED)
        for event, after in _ASKED.items()
    },
    # The engine asks about others, which need the slots, or the cache was reset: its chunks are released.
    (_S.ASKING, _E.LAPSED): _S.IDLE,
    (_S.GATHERING, _E.LAPSED): _S.IDLE,
    (_S.OFFERED, _E.LAPSED): _S.IDLE,
    (_S.OFFERED, _E.LOAD_STARTED): _S.LOADING,
    (_S.LOADING, _E.LOAD_ENDED): _S.RUNNING,
    # An engine may continue without waiting for the answer, or with fewer tokens than offered.
    (_S.IDLE, _E.SCHEDULED): _S.RUNNING,
    (_S.ASKING, _E.SCHEDULED): _S.RUNNING,
    (_S.GATHERING, _E.SCHEDULED): _S.RUNNING,
    (_S.OFFERED, _E.SCHEDULED): _S.RUNNING,
    (_S.RUNNING, _E.SCHEDULED): _S.RUNNING,
    (_S.RUNNING, _E.PREEMPTED): _S.IDLE,
    **{(state, _E.FINISHED): _S.FINISHED for state in _S if state is not _S.FINISHED},
    (_S.FINISHED, _E.LOAD_ENDED): _S.FINISHED,
}

REQUEST_STATES = StateMachine("request", TRANSITIONS)
"""Lookup in the table above."""
