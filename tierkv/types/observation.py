"""Observation of a request, for eviction policies: the whole path of the request and the hits on it, in one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import Key


class RequestPhase(Enum):
    """Phase of a request at which it is observed."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    ARRIVED = "arrived"
    """The first lookup of the request was answered."""
    FINISHED = "finished"
    """The request ended, for any reason."""


@dataclass(frozen=True, slots=True)
class RequestObservation:
    """A request at one of its phases."""

    request_id: str
    """Id of the request."""
    phase: RequestPhase
    """Phase of the request."""
    now_s: float
    """Time of the observation in seconds, on the stack's clock."""
    paths: tuple[tuple[Key, ...], ...]
    """Per KV cache group, the keys of all whole chunks in the order of the prompt. They include chunks in the engine's
    own cache, for which no tier is probed. At the end of a request: the keys of all computed chunks."""
    gpu_chunks: tuple[int, ...]
    """Per group, the number of chunks at the front that were in the engine's own cache."""
    new_chunks: tuple[int, ...]
    """Per group, the number of chunks at the end of the arrival's path that are behind the hit. A policy that remembers
    evicted chunks can separate the chunks that it never saw from those that it forgot."""
    tier_chunks: Mapping[str, int] = field(default_factory=dict)
    """Number of chunks in the answered hit by tier, over all groups. ``host`` counts the chunks that were in the host
    tier before the request arrived."""
    hints: RequestHints = NO_HINTS
    """Hints of the request."""
