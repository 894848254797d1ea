"""Ranks of chunks in their prompts: who brought or continued a chunk last, and the token at which it ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from zlib import crc32

from tierkv.types.keys import Key
from tierkv.types.transfers import NO_REQUEST

OWNER_BITS = 32
"""Low bits of a rank, with the token; above them is a digest of the request."""

DEPTH_MAX = (1 << OWNER_BITS) - 1
"""Mask of these bits."""


def ranks_of(request_id: str, end_tokens: Iterable[int], number: int = 0) -> list[int]:
    """Ranks of chunks of a request, from the token at which each ends; zeros for chunks of no request.

    number: tells requests apart that had one id after another.
    """
    if request_id == NO_REQUEST:
        return [0 for _ in end_tokens]
    owner = crc32(f"{number}:{request_id}".encode("utf-8", "surrogatepass")) << OWNER_BITS
    ends = list(end_tokens)
    if max(ends, default=0) > DEPTH_MAX:
        ends = [min(end, DEPTH_MAX) for end in ends]
    return [owner | end if end else 0 for end in ends]


def by_request(handles: Iterable[int | None], ranks: Iterable[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Handles with a rank, and their ranks, request by request and each in prefix order."""
    known = sorted((rank, handle) for rank, handle in zip(ranks, handles, strict=True) if rank and handle is not None)
    for _, some in groupby(known, lambda each: each[0] >> OWNER_BITS):
        in_order, of_handles = zip(*some, strict=True)
        yield [*of_handles], [*in_order]


def apart(
    ranks: Sequence[int], handles: Sequence[int], keys: Sequence[Key]
) -> Iterable[tuple[Sequence[int], Sequence[int], Sequence[Key]]]:
    """Ranks, handles and keys of each request, from those of several; chunks of a request mostly come together."""
    if min(ranks) >> OWNER_BITS == max(ranks) >> OWNER_BITS:  # usual
        return ((ranks, handles, keys),)
    owners = [rank >> OWNER_BITS for rank in ranks]
    ends = [i for i, (owner, after) in enumerate(pairwise(owners), 1) if owner != after]
    chunks, by_owner = list(zip(ranks, handles, keys, strict=True)), dict[int, list[tuple[int, int, Key]]]()
    for first, end in pairwise((0, *ends, len(owners))):
        by_owner.setdefault(owners[first], []).extend(chunks[first:end])
    columns = (zip(*some, strict=True) for some in by_owner.values())
    return [(some_ranks, some_handles, some_keys) for some_ranks, some_handles, some_keys in columns]
