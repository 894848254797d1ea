"""How much of a hit is worth loading: pure functions (docs/explanation/load-or-recompute.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tierkv.types.keys import Key


class PendingRead(NamedTuple):
    """One chunk of a hit that would be read from a lower tier. start: its first token."""

    start: int
    tier: int
    num_bytes: int
    key: Key


class ReadCost(NamedTuple):
    """What a tier's reads cost: seconds until the first byte, and seconds per byte."""

    start_s: float
    s_per_byte: float


def best_load_tokens(
    reads: Iterable[PendingRead], computed_tokens: int, hit_tokens: int, prefill_tokens_per_s: float,
    costs: Mapping[int, ReadCost],
) -> int:  # fmt: skip
    """How many tokens of a hit to load, so that the request's prefix is complete soonest.

    A hit of h tokens costs the pending reads that start before its end, tiers side by side, and the prefill of
    the tokens behind it: ``max over tiers (start_s + bytes * s_per_byte) + (H - h) / prefill_tokens_per_s``. The
    smallest sum wins; of equal ones the longest. Chunks without a pending read (in the host tier, or in flight) cost
    nothing, nor do those of a tier that is not in ``costs`` (it has to be measured first).

    Args:
        reads: in the order of ``start``.
        computed_tokens: C; the hit covers C to C + H.
        hit_tokens: H.
        prefill_tokens_per_s: how fast the engine computes a prompt.
        costs: by tier.

    Returns:
        The h: H, or a number of tokens that ends where a read begins, or 0.
    """
    end = computed_tokens + hit_tokens
    best, best_s = 0, hit_tokens / prefill_tokens_per_s
    read_bytes: dict[int, int] = {}
    reading_s = 0.0
    for start, tier, num_bytes, _ in reads:
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
    """Seconds to read all pending chunks: the first part of the sum that :func:`best_load_tokens` makes smallest."""
    read_bytes: dict[int, int] = {}
    for read in reads:
        if read.tier in costs:
            read_bytes[read.tier] = read_bytes.get(read.tier, 0) + read.num_bytes
    return max((costs[tier].start_s + size * costs[tier].s_per_byte for tier, size in read_bytes.items()), default=0.0)
