"""More room in one tier of a stack, and what it would bring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tierkv.config.resolving import ResolvedStack, resolve
from tierkv.plugins.registry import PluginRegistry
from tierkv.types.cache_events import HOST


@dataclass(frozen=True, slots=True)
class Growth:
    """Effect of more room in a tier."""

    tier: str
    """Tier that is larger."""
    more_bytes: int
    """Added room."""
    hit_points: float
    """Percentage points by which hits grow."""
    prefill_saved_s: float
    """Seconds of computation saved beyond those that the stack saves."""
    price: float | None
    """Price of the added room; None: not stated."""


def grown_stacks(
    stack: ResolvedStack, more_bytes: int | None, registry: PluginRegistry
) -> Iterator[tuple[str, int, ResolvedStack]]:
    """Yield each tier with a capacity, its added room, and the stack with it.

    more_bytes: added room; None: as much as the tier has.
    """
    config = stack.config
    more = more_bytes or config.host.capacity
    host = config.host.model_copy(update={"capacity": config.host.capacity + more})
    yield HOST, more, resolve(config.model_copy(update={"host": host}), registry)
    for i, tier in enumerate(config.tiers):
        if tier.capacity is None:
            continue
        more = more_bytes or tier.capacity
        larger = tier.model_copy(update={"capacity": tier.capacity + more})
        tiers = (*config.tiers[:i], larger, *config.tiers[i + 1 :])
        yield tier.name, more, resolve(config.model_copy(update={"tiers": tiers}), registry)
