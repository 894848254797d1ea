"""Replay through a stack of inclusive LRU tiers, by stack distances: exact, in one pass, whatever the sizes.

Where every tier uses LRU, gets each chunk at once and is at least as large as the tier above it, its content is that of
one LRU cache of its size. So a chunk is found in the first tier that is large enough for its stack distance.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from tierkv.config.resolving import ResolvedStack
from tierkv.config.schema import HostConfig
from tierkv.config.tier_schema import TierConfig
from tierkv.errors import ConfigError
from tierkv.frames.frame import frame_bytes
from tierkv.replay.instant_tiers import TierTraffic
from tierkv.replay.stack_distances import NEVER, Ints, StackDistances
from tierkv.replay.stack_player import MINUTE_S, PlayedStack
from tierkv.replay.trace import Trace
from tierkv.types.cache_events import HOST

UNBOUNDED = NEVER - 1
"""Size of a tier without a capacity."""


def sizes_of(resolved: ResolvedStack, chunk_bytes: int) -> tuple[int, ...]:
    """Sizes of the tiers in chunks, the host tier first.

    Raises:
        ConfigError: the host tier is smaller than a chunk.
    """
    size, config = frame_bytes(chunk_bytes), resolved.config
    if config.host.capacity < size:
        raise ConfigError(
            f"host.capacity = {config.host.capacity} bytes: a chunk of this trace needs {size}; give a larger capacity "
            "or smaller chunks"
        )
    lower = [UNBOUNDED if tier.capacity is None else tier.capacity // size for tier in config.tiers]
    return (config.host.capacity // size, *lower)


def is_inclusive_lru(resolved: ResolvedStack, trace: Trace, chunk_bytes: int) -> bool:
    """Whether :func:`play_lru` is exact for a stack and a trace."""
    config = resolved.config
    places: tuple[HostConfig | TierConfig, ...] = (config.host, *config.tiers)
    sizes = sizes_of(resolved, chunk_bytes)
    return (
        not trace.has_hints
        and all(place.policy == "lru" for place in places)
        and all(place.tenant_quota is None and not place.tenant_quotas for place in places)
        and all(tier.write == "through" for tier in config.tiers)
        and list(sizes) == sorted(sizes)
    )


def play_lru(trace: Trace, distances: StackDistances, names: tuple[str, ...], sizes: tuple[int, ...]) -> PlayedStack:
    """Replay a trace through inclusive LRU tiers.

    Args:
        trace: the requests.
        distances: of the trace.
        names: names of the tiers below the host tier.
        sizes: sizes of the tiers in chunks, the host tier first; none is smaller than the one before.
    """
    starts = np.frombuffer(trace.starts, np.uint64).astype(np.int64)
    request = np.repeat(np.arange(len(trace)), np.diff(starts))
    at_s = np.frombuffer(trace.at_s, np.float64) if len(trace) else np.zeros(0)
    minutes = ((at_s - at_s[:1]) // MINUTE_S).astype(np.int64)
    hits = np.zeros((len(sizes), len(trace)), np.int64)
    above = 0
    for tier, size in enumerate(sizes):
        found = request[(distances.needed > above) & (distances.needed <= size)]
        hits[tier] = np.bincount(found, minlength=len(trace))
        above = size
    all_hits = hits.sum(axis=0)
    traffic = [TierTraffic(HOST, _by_minute(minutes, all_hits), _by_minute(minutes, np.diff(starts) - all_hits))]
    for tier, name in enumerate(names, 1):
        written = np.bincount(request[distances.at_use > sizes[tier]], minlength=len(trace))
        traffic.append(TierTraffic(name, _by_minute(minutes, hits[tier]), _by_minute(minutes, written)))
    return PlayedStack((HOST, *names), hits, tuple(traffic))


def _by_minute(minutes: Ints, counts: Ints) -> Counter[int]:
    """Sum counts of requests by minute."""
    known, index = np.unique(minutes, return_inverse=True)
    sums = np.bincount(index, weights=counts, minlength=len(known))
    return Counter({int(minute): int(count) for minute, count in zip(known, sums, strict=True) if count})
