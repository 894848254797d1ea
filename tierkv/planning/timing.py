"""Times of requests: which hits are worth loading, and when the first token comes.

A request waits for its loads, then for an engine, then for the computation of the rest of its prompt. Each tier loads
for one request at a time, in the order of arrival, and all tiers side by side. A hit is shortened where loading more of
it, the wait for the tier included, would take longer than computing it: as the scheduler does. Each engine computes one
prompt at a time, in the order in which they are ready. Loads do not hold up engines.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierkv.planning.assumptions import Assumptions, TierSpeed
from tierkv.replay.stack_distances import Ints

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class UsefulHits:
    """Hits without those that are slower to load than to compute."""

    chunks: Ints
    """Chunks to load, by tier and request."""
    ready_s: Seconds
    """Time at which the loads of each request have ended, at its arrival if there are none."""


def useful_hits(at_s: Seconds, hits: Ints, speeds: Sequence[TierSpeed], assumed: Assumptions) -> UsefulHits:
    """Shorten each hit to the length that saves most time. The front of a hit is in the fastest tier.

    Args:
        at_s: arrivals, in order.
        hits: chunks found, by tier and request.
        speeds: of the tiers.
        assumed: rate of computation, and sizes.
    """
    useful, ready_s = hits.copy(), at_s.copy()
    chunk_s = [speed.load_s(assumed.chunk_bytes) for speed in speeds]
    free_s = [0.0] * len(speeds)  # each tier is a queue of its own
    for number in np.flatnonzero(hits.any(axis=0)):
        arrived_s, chunks = float(at_s[number]), hits[:, number].tolist()
        ends_s = [
            max(free_s[tier], arrived_s) + speeds[tier].latency_s + count * chunk_s[tier] if count else arrived_s
            for tier, count in enumerate(chunks)
        ]
        kept, best_s, found, end_s = 0, 0.0, 0, arrived_s
        for tier, count in enumerate(chunks):
            found, end_s = found + count, max(end_s, ends_s[tier])
            saved_s = found * assumed.chunk_prefill_s - (end_s - arrived_s)
            if count and saved_s > best_s:
                kept, best_s, ready_s[number] = tier + 1, saved_s, end_s
        useful[kept:, number] = 0
        free_s[:kept] = [
            end if count else free for end, count, free in zip(ends_s[:kept], chunks, free_s, strict=False)
        ]
    return UsefulHits(useful, ready_s)


def busiest_s(at_s: Seconds, compute_s: Seconds, window_s: float) -> float:
    """Most seconds of computation that arrive within a window of time.

    Args:
        at_s: arrivals, in order.
        compute_s: seconds of computation by request.
        window_s: length of the window.
    """
    before_s = np.concatenate(([0.0], np.cumsum(compute_s)))
    since_s = at_s - at_s[:1]  # times since 1970 are too coarse for a sum
    ends = np.searchsorted(since_s, since_s + window_s, side="right")
    return float((before_s[ends] - before_s[:-1]).max(initial=0.0))


def first_token_s(at_s: Seconds, ready_s: Seconds, compute_s: Seconds, engines: int) -> Seconds:
    """Seconds from the arrival of each request to its first token.

    Args:
        at_s: arrivals.
        ready_s: times at which the loads of each request have ended.
        compute_s: seconds of computation by request.
        engines: number of engines, at least 1.
    """
    engine_free_s = [0.0] * min(engines, len(at_s))
    result = np.zeros(len(at_s))
    for number in np.argsort(ready_s, kind="stable"):
        end_s = max(float(ready_s[number]), engine_free_s[0]) + float(compute_s[number])
        heapq.heapreplace(engine_free_s, end_s)
        result[number] = end_s - at_s[number]
    return result
