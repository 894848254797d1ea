"""First segment of a hit: the part that is gathered before the rest is promised. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import islice

from tierkv.scheduler.lookup.search import SearchGroup
from tierkv.types.keys import Key

EARLY_S = 1.0
"""Seconds of reading before an early offer at most. The rest is read in about the same time: GPU blocks wait for it."""


def window_chunks_max(groups: Sequence[SearchGroup]) -> int:
    """Upper bound of the window chunks that a hit needs."""
    return sum(group.window_chunks or 0 for group in groups)


def window_keys(groups: Sequence[SearchGroup], computed_tokens: int, tokens: int) -> set[Key]:
    """Window chunks that a hit of ``tokens`` beyond C needs. The hit is useless without any one of them."""
    keys: set[Key] = set()
    for group in groups:
        if group.window_chunks is not None:
            needs = group.needs(computed_tokens, computed_tokens + tokens)
            keys.update(group.keys[needs.start : needs.stop])
    return keys


def first_segment(
    wanted: tuple[Key, ...],
    always: AbstractSet[Key],
    readable: AbstractSet[Key],
    chunks_min: int,
    chunks_max: int,
) -> tuple[Key, ...]:
    """Chunks of a hit to gather first, in the order of ``wanted``.

    In this priority: the chunks in ``always``; chunks that are readable in the host tier, which need no slot, and which
    later segments would evict; up to ``chunks_min``, missing chunks from the front.

    Args:
        wanted: chunks of the hit, in the order in which they end.
        always: some of them, fewer than ``chunks_min``.
        readable: those of them that are readable in the host tier.
        chunks_min: smallest number of chunks that is worth a job.
        chunks_max: largest number of chunks that can be gathered at once.
    """
    chosen = set(always)
    if readable:
        present = [key for key in wanted if key in readable and key not in always]
        chosen.update(present[: max(0, chunks_max - len(chosen))])
    missing = (key for key in wanted if key not in chosen)
    chosen.update(list(islice(missing, max(0, chunks_min - len(chosen)))))
    return tuple([key for key in wanted if key in chosen])


def may_begin_early(groups: Sequence[SearchGroup], reading_s: float) -> bool:
    """Whether a hit may be offered before all of its chunks are read, after ``reading_s`` seconds.

    Not with windows, where one lost chunk costs the whole hit, and not with several groups, whose chunks are copied in
    another order than they are read in.
    """
    return len(groups) == 1 and groups[0].window_chunks is None and reading_s <= EARLY_S
