"""Hits of a replay by tenant."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierkv.replay.stack_player import PlayedStack
from tierkv.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class TenantHits:
    """Hits of one tenant."""

    name: str | None
    """Tenant; None: requests without one."""
    requests: int
    """Its requests."""
    chunks: int
    """Chunks that it asked for."""
    hits: int
    """Chunks of these that were found."""

    @property
    def hit_percent(self) -> float:
        """Percentage of chunks that were hits; 0 if it asked for none."""
        return 100 * self.hits / self.chunks if self.chunks else 0.0


def tenant_hits(trace: Trace, played: PlayedStack) -> list[TenantHits]:
    """Hits by tenant; those that ask for most chunks come first."""
    tenants = np.frombuffer(trace.tenants, np.uint32).astype(np.int64) if len(trace) else np.zeros(0, np.int64)
    lengths = np.diff(np.frombuffer(trace.starts, np.uint64).astype(np.int64))
    count = len(trace.tenant_names)
    requests = np.bincount(tenants, minlength=count)
    asked = np.bincount(tenants, weights=lengths, minlength=count)
    found = np.bincount(tenants, weights=played.hits.sum(axis=0), minlength=count)
    hits = [
        TenantHits(name, int(requests[i]), int(asked[i]), int(found[i])) for i, name in enumerate(trace.tenant_names)
    ]
    return sorted(hits, key=lambda one: -one.chunks)


def worst_tenant(hits: list[TenantHits]) -> TenantHits | None:
    """Tenant with the smallest percentage of hits, of those with at least 1 % of all requests."""
    enough = 0.01 * sum(one.requests for one in hits)
    named = [one for one in hits if one.requests >= enough and one.chunks]
    return min(named, key=lambda one: one.hit_percent) if len(named) > 1 else None
