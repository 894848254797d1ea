"""How long a hit is: pure functions over "is this chunk there?" (spec, sections 5 and 6).

The rule: the largest number of tokens H up to a cap such that every group has all chunks that cover the tokens from C
to C + H, and H is no shorter than the coarsest chunk; else 0. Whether an answer came at once or was deferred first
never changes it (S44).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierkv.types.geometry import cdiv
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult

Lookup = Callable[[Key], LookupResult]

ResidentPrefix = Callable[[Sequence[Key], int, int], int]
"""(keys, start, stop) -> how many from start on are known to be readable; a shortcut over ``Lookup``."""


def no_shortcut(keys: Sequence[Key], start: int, stop: int) -> int:  # noqa: ARG001 - the signature of a shortcut
    """A :data:`ResidentPrefix` that knows nothing."""
    return 0


@dataclass(frozen=True, slots=True)
class SearchGroup:
    """What the search needs to know of one full-attention group. keys: of all whole chunks of the request."""

    chunk_tokens: int
    keys: list[Key]


@dataclass(frozen=True, slots=True)
class Hit:
    """Result of a search. tokens: beyond those computed locally. deferred: not known yet; ask again."""

    tokens: int
    deferred: bool = False


NO_HIT = Hit(0)
DEFERRED = Hit(0, deferred=True)


def prefix_hits(keys: Sequence[Key], lookup: Lookup) -> int | None:
    """Chunks present from the front; None if that is not known yet.

    Walks on past unknown chunks, so that all of the prefix is asked for at once, and stops at the first miss: what
    lies behind it is never looked up (S23 to S27). PENDING counts as present: it will be readable soon.
    """
    hits, known = 0, True
    for key in keys:
        answer = lookup(key)
        if answer is LookupResult.MISS:
            break
        known = known and answer is not LookupResult.RETRY
        hits += 1
    return hits if known else None


def find_hit(
    groups: Sequence[SearchGroup],
    computed_tokens: int,
    tokens_max: int,
    lookup: Lookup,
    resident_prefix: ResidentPrefix = no_shortcut,
) -> Hit:
    """The hit of a request over all its groups.

    Args:
        groups: full-attention groups in lookup order.
        computed_tokens: C, tokens that the engine has already.
        tokens_max: upper bound of C + H.
        lookup: existence of one chunk. Not called for chunks beyond a known bound.
        resident_prefix: shortcut for chunks known to be readable.
    """
    chunk_tokens_max = max(group.chunk_tokens for group in groups)
    bound, deferred = tokens_max, False
    for group in groups:
        size = group.chunk_tokens
        bound = min(bound, len(group.keys) * size)
        if bound - computed_tokens < chunk_tokens_max:
            return NO_HIT
        start, stop = computed_tokens // size, min(cdiv(bound, size), len(group.keys))
        resident = resident_prefix(group.keys, start, stop)
        more = prefix_hits(group.keys[start + resident : stop], lookup) if start + resident < stop else 0
        if more is None:
            deferred = True
        else:
            bound = min(bound, size * (start + resident + more))
    hit = bound - computed_tokens
    if hit < chunk_tokens_max:
        return NO_HIT
    if deferred and _still_unknown(groups, computed_tokens, bound, lookup):
        return DEFERRED
    return Hit(hit)


def _still_unknown(groups: Sequence[SearchGroup], computed_tokens: int, bound: int, lookup: Lookup) -> bool:
    """Whether a chunk inside the final bound is unknown: a group visited later may have cut the unknown ones off."""
    for group in groups:
        stop = min(cdiv(bound, group.chunk_tokens), len(group.keys))
        if prefix_hits(group.keys[computed_tokens // group.chunk_tokens : stop], lookup) is None:
            return True
    return False


def tokens_covered(groups: Sequence[SearchGroup], computed_tokens: int, chunks_max: int) -> int:
    """The largest C + H, in whole coarsest chunks, whose chunks over all groups number at most ``chunks_max``."""
    step = max(group.chunk_tokens for group in groups)
    sizes = [group.chunk_tokens for group in groups]
    # Where sizes do not divide each other, a step can touch one chunk more than its length says.
    per_step = sum(cdiv(step, size) + (step % size != 0) for size in sizes)
    aligned = cdiv(computed_tokens, step)
    first = sum(cdiv(aligned * step, size) - computed_tokens // size for size in sizes)
    if chunks_max < first:
        return computed_tokens
    return (aligned + (chunks_max - first) // per_step) * step


def wanted_keys(groups: Sequence[SearchGroup], computed_tokens: int, tokens: int) -> tuple[Key, ...]:
    """The chunks that cover tokens C to C + H, over all groups, in the order of where they end.

    A shorter hit needs the chunks at the front, and perhaps one more of each group, that ends behind it.
    """
    runs = []
    for group in groups:
        size = group.chunk_tokens
        start, stop = computed_tokens // size, cdiv(computed_tokens + tokens, size)
        runs.append(group.keys[start:stop])
        if len(groups) == 1:
            return tuple(runs[0])
    ends = [
        ((computed_tokens // group.chunk_tokens + i + 1) * group.chunk_tokens, order, key)
        for order, (group, run) in enumerate(zip(groups, runs, strict=True))
        for i, key in enumerate(run)
    ]
    ends.sort(key=lambda item: item[:2])
    return tuple(key for _, _, key in ends)


def ready_tokens(
    groups: Sequence[SearchGroup], computed_tokens: int, tokens: int, resident_prefix: ResidentPrefix
) -> int:
    """How much of a hit of H tokens is readable right now: what is answered when the deadline has passed."""
    bound = computed_tokens + tokens
    for group in groups:
        start, stop = computed_tokens // group.chunk_tokens, cdiv(bound, group.chunk_tokens)
        ready = resident_prefix(group.keys, start, stop)
        if ready < stop - start:
            bound = min(bound, (start + ready) * group.chunk_tokens)
    hit = bound - computed_tokens
    return hit if hit >= max(group.chunk_tokens for group in groups) else 0
