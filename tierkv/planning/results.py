"""Results of a plan: values, as reports show them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tierkv.planning.assumptions import Assumptions
from tierkv.planning.growth import Growth
from tierkv.planning.traffic import Moved
from tierkv.replay.tenants import TenantHits
from tierkv.types.cache_events import HOST

SPAN_S_MIN = 1.0
"""Shortest time that a trace counts as, so that rates are finite."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Computation of all prompts, and what users wait for it."""

    prefill_s: float
    """Seconds of computation, all requests together."""
    engines: int
    """Engines that the busiest hour of them needs, each busy for at most ``BUSY_MAX`` of its time."""
    ttft_p50_s: float
    """Median time to the first token, in seconds, with the engines of the plan."""
    ttft_p95_s: float
    """Time to the first token that 95 % of the requests do not exceed."""


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier of a stack."""

    name: str
    """Name of the tier."""
    capacity_bytes: int | None
    """Capacity; None: no bound."""
    hits: int
    """Chunks found in it."""
    slow: int
    """Chunks of these that are faster to compute than to load."""
    read: Moved
    """Bytes read from it."""
    written: Moved
    """Bytes written to it."""
    price: float | None
    """Price of its capacity, or of what it holds at the end; None: not stated."""

    @property
    def drive_writes_per_day(self) -> float | None:
        """Times per day that its whole capacity is written; None: it is memory, or has no bound."""
        if self.name == HOST:
            return None
        return self.written.bytes_per_day / self.capacity_bytes if self.capacity_bytes else None


@dataclass(frozen=True, slots=True)
class StackPlan:
    """Answer for one stack."""

    name: str
    """Name of the stack."""
    is_exact_lru: bool
    """Whether stack distances gave the hits. Otherwise the real scheduler and manager served the trace."""
    tiers: tuple[TierPlan, ...]
    """Tiers, the host tier first."""
    chunks: int
    """Chunks of all requests."""
    fleet: Fleet
    """Computation that is left, and waiting times."""
    engines_saved: int
    """Engines that the stack saves."""
    prefill_saved_s: float
    """Seconds of computation that the stack saves."""
    price: float | None
    """Price of its tiers; None: not stated."""
    price_saved: float | None
    """Price of the saved engines; None: not stated."""
    worst: TenantHits | None
    """Tenant with the smallest share of hits; None: there are not two tenants."""
    tenants: tuple[TenantHits, ...]
    """Hits by tenant."""
    growths: tuple[Growth, ...]
    """Effect of more room in each tier."""

    @property
    def room_bytes(self) -> float:
        """Capacity of all tiers; infinite where one has no bound."""
        return sum(math.inf if tier.capacity_bytes is None else tier.capacity_bytes for tier in self.tiers)

    @property
    def hits(self) -> int:
        """Chunks found in all tiers."""
        return sum(tier.hits for tier in self.tiers)

    @property
    def slow(self) -> int:
        """Chunks found and not worth loading."""
        return sum(tier.slow for tier in self.tiers)

    @property
    def hit_percent(self) -> float:
        """Percentage of chunks that are found."""
        return 100 * self.hits / self.chunks if self.chunks else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Answer for all stacks."""

    requests: int
    chunks: int
    distinct_chunks: int
    span_s: float
    """Seconds of the trace; at least :data:`SPAN_S_MIN`."""
    is_cut: bool
    """Whether only the front of the trace was planned."""
    assumed: Assumptions
    engines: int
    """Engines for the times to the first token."""
    without: Fleet
    """Computation without a cache."""
    stacks: tuple[StackPlan, ...]
    curve: tuple[tuple[int, float], ...]
    """Hits of one LRU cache by its size: bytes, percentage of chunks."""
