"""Cost of loading a hit, against computing it: pure functions (docs/explanation/load-or-recompute.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tierkv.types.keys import Key


class PendingRead(NamedTuple):
    """Read of a chunk of a hit, or of some that follow each other, from a lower tier."""

    start: int
    """First token of the first chunk."""
    tier: int
    num_bytes: int
    key: Key
    """Of the first chunk."""
    num_chunks: int = 1


class ReadCost(NamedTuple):
    """Cost of a tier's reads."""

    start_s: float
    """Seconds until the first byte."""
    s_per_byte: float


def best_load_tokens(
    reads: Iterable[PendingRead], computed_tokens: int, hit_tokens: int, prefill_tokens_per_s: float,
    costs: Mapping[int, ReadCost],
) -> int:  # fmt: skip
    """Number of tokens of a hit to load, so that the prefix of the request is complete soonest.

    Loading h tokens costs the pending reads that start before its end, tiers in parallel, and the prefill of the tokens
    behind it: ``max over tiers (start_s + bytes * s_per_byte) + (H - h) / prefill_tokens_per_s``. The smallest sum
    wins; of equal sums the longest hit. Chunks without a pending read (in the host tier, or in flight) cost nothing.
    Reads from a tier that is not in ``costs`` cost nothing either, so that the tier gets measured.

    Args:
        reads: in the order of ``start``.
        computed_tokens: C; the hit covers tokens C to C + H.
        hit_tokens: H.
        prefill_tokens_per_s: tokens that the engine computes per second.
        costs: per tier.

    Returns:
        h: H, or a number of tokens that ends where a pending read starts, or 0.
    """
    end = computed_tokens + hit_tokens
    best, best_s = 0, hit_tokens / prefill_tokens_per_s
    read_bytes: dict[int, int] = {}
    reading_s = 0.0
    for start, tier, num_bytes, _, _ in reads:
        cost = costs.get(tier)
        if cost is None:
            continue
        total_s = reading_s + (end - start) / prefill_tokens_per_s
        if start > computed_tokens and total_s <= best_s:
            best, best_s = start - computed_tokens, total_s
        read_bytes[tier] = read_bytes.get(tier, 0) + num_bytes
        reading_s = max(reading_s, cost.start_s + read_bytes[tier] * cost.s_per_byte)
    return hit_tokens if reading_s <= best_s else best


def reading_s(reads: Iterable[PendingRead], costs: Mapping[int, ReadCost]) -> float:
    """Seconds to read all pending chunks: the first term of the sum that :func:`best_load_tokens` minimizes."""
    read_bytes: dict[int, int] = {}
    for read in reads:
        if read.tier in costs:
            read_bytes[read.tier] = read_bytes.get(read.tier, 0) + read.num_bytes
    return max((costs[tier].start_s + size * costs[tier].s_per_byte for tier, size in read_bytes.items()), default=0.0)
