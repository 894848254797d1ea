"""What is gathered of a hit that is longer than what can be gathered at once, before it is answered: pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from tierkv.scheduler.lookup.search import SearchGroup
from tierkv.types.keys import Key


def window_chunks_max(groups: Sequence[SearchGroup]) -> int:
    """How many chunks of windows a hit needs at most."""
    return sum(group.window_chunks or 0 for group in groups)


def window_keys(groups: Sequence[SearchGroup], computed_tokens: int, tokens: int) -> set[Key]:
    """The chunks of windows that a hit of ``tokens`` beyond C needs. Without any of them the rest is of no use."""
    keys: set[Key] = set()
    for group in groups:
        if group.window_chunks is not None:
            needs = group.needs(computed_tokens, computed_tokens + tokens)
            keys.update(group.keys[needs.start : needs.stop])
    return keys


def first_segment(
    wanted: tuple[Key, ...],
    always: AbstractSet[Key],
    is_readable: Callable[[Key], bool],
    chunks_min: int,
    chunks_max: int,
) -> tuple[Key, ...]:
    """The chunks to bring together first, of those that a hit needs, in the same order.

    Those in ``always``; then those readable in the host tier already, which need no slot, and which later segments
    would evict; then, up to ``chunks_min``, what is missing at the front.

    Args:
        wanted: the chunks of the hit, in the order in which they end.
        always: some of them, fewer than ``chunks_min``.
        is_readable: whether a chunk is readable in the host tier.
        chunks_min: fewer are not worth a job.
        chunks_max: chunks that may be gathered at once.
    """
    chosen = set(always)
    missing: list[Key] = []
    for key in wanted:
        if len(chosen) >= chunks_max:
            break
        if key not in chosen:
            if is_readable(key):
                chosen.add(key)
            elif len(missing) < chunks_min:
                missing.append(key)
    chosen.update(missing[: max(0, chunks_min - len(chosen))])
    return tuple([key for key in wanted if key in chosen])
