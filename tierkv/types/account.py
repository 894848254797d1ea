"""Account of one request: the tokens that the tiers served to it, and those stored for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RequestAccount:
    """Account of one request over all its lookups and loads. A preempted request may have several of each."""

    request_id: str
    """Id of the request."""
    local_tokens: int = 0
    """Tokens found in the engine's own cache when the last lookup was answered."""
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens of started loads, by the tier whose bytes were read for this request. Chunks that were in the host tier
    before the request arrived count as ``host``, from whichever tier they came. The sum is exactly the number of
    external tokens. Where chunks of several groups cover the same tokens, the first full-attention group that loads
    decides."""
    loaded_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the loaded chunks by tier, over all groups."""
    stored_tokens: int = 0
    """Tokens copied from the GPU to the host tier for this request, counted by the first full-attention group."""
    deferrals: int = 0
    """Number of lookups answered with "ask again"."""
    deferred_s: float = 0.0
    """Seconds from the first such answer to the final one, summed over the lookups."""
    deferred_tier_s: float = 0.0
    """Seconds of these in which a tier was asked, or read, for the request. The rest is queue time: the engine did not
    ask, or other requests had the slots."""
    shortened_tokens: int = 0
    """Tokens of hits that were not offered, because computing them was expected to be faster."""
