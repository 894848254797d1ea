"""The life of a request as tierkv sees it, as a table. Everything that may change a request's state stands here."""

from __future__ import annotations

from enum import Enum

from tierkv.types.state_machine import StateMachine


class RequestState(Enum):
    """Where a request stands."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    IDLE = "idle"
    """Known; nothing asked, nothing held."""
    ASKING = "asking"
    """Deferred: whether its chunks are there is not known yet."""
    GATHERING = "gathering"
    """Deferred: the wanted chunks are on their way into the host tier, under its reservation; or another request is
    just loading some of them, which will be found on the GPU."""
    OFFERED = "offered"
    """A hit was answered; its chunks are held until blocks are allocated, the engine asks again, or it lets go."""
    LOADING = "loading"
    """A load job fills its blocks."""
    RUNNING = "running"
    """Computing, or about to; store jobs may be in flight."""
    FINISHED = "finished"
    """Takes no new jobs; forgotten when its last one has ended."""


class RequestEvent(Enum):
    """What can happen to a request."""

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
    # The engine stopped asking for longer than the deadline: what was held for the request is released.
    (_S.ASKING, _E.LAPSED): _S.IDLE,
    (_S.GATHERING, _E.LAPSED): _S.IDLE,
    (_S.OFFERED, _E.LAPSED): _S.IDLE,
    (_S.OFFERED, _E.LOAD_STARTED): _S.LOADING,
    (_S.LOADING, _E.LOAD_ENDED): _S.RUNNING,
    # An engine may go ahead without waiting for the answer, or with fewer tokens than offered.
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
