"""What a policy hears of a request: its whole path through the cache, in one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import Key


class RequestPhase(Enum):
    """Which boundary of its life the request passes."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a call into Python

    ARRIVED = "arrived"
    """It was asked for and answered, for the first time."""
    FINISHED = "finished"
    """It ended, in whatever way."""


@dataclass(frozen=True, slots=True)
class RequestObservation:
    """A request at one of its boundaries.

    now_s: on the stack's clock.
    paths: per KV cache group, the keys of all its whole chunks in the order of the prompt: also of those that the
        engine had in its own cache, which no tier is ever asked for. When it finished: of what was computed.
    gpu_chunks: per group, how many of them, from the front, the engine had itself.
    tier_chunks: by tier, how many chunks the answered hit consists of, over all groups; ``host`` are those that were in
        the host tier before the request came.
    new_chunks: per group, how many of the path at its arrival, from its end, lie behind the hit. A policy that
        remembers what it has evicted can tell those it never saw from those it forgot.
    hints: what the request said of itself.
    """

    request_id: str
    phase: RequestPhase
    now_s: float
    paths: tuple[tuple[Key, ...], ...]
    gpu_chunks: tuple[int, ...]
    new_chunks: tuple[int, ...]
    tier_chunks: Mapping[str, int] = field(default_factory=dict)
    hints: RequestHints = NO_HINTS
