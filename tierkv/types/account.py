"""What one request got from the tiers, and gave to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RequestAccount:
    """The account of one request, over all its lookups and loads (a preempted request may have several).

    local_tokens: found in the engine's own cache when its last lookup was answered.
    loaded_tokens: by tier: tokens of loads that were started, by the tier whose bytes were read for this request. What
        was in the host tier before the request came counts as ``host``, whichever tier it once came from. They add up
        to the external tokens exactly: where several groups have chunks over the same tokens, the first full-attention
        group that loads anything decides.
    loaded_bytes: by tier: bytes of the loaded chunks, over all groups.
    stored_tokens: copied from the GPU to the host tier for this request, told by the first full-attention group.
    deferrals: how often its lookup was answered "ask me again".
    deferred_s: seconds from the first such answer to the one that settled it, summed over its lookups.
    shortened_tokens: tokens that were there and were not offered, because computing them was expected to be faster.
    """

    request_id: str
    local_tokens: int = 0
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    loaded_bytes: Mapping[str, int] = field(default_factory=dict)
    stored_tokens: int = 0
    deferrals: int = 0
    deferred_s: float = 0.0
    shortened_tokens: int = 0
