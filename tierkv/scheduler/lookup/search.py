"""Length of a hit: pure functions over a lookup of single chunks.

The rule (S44): the largest number of tokens H up to a limit such that every group with full attention has all chunks
that cover tokens C to C + H, every group with a window has the last W of them, and H is no shorter than the largest
chunk; otherwise 0. A group may also restrict where hits end (:attr:`SearchGroup.end_slack`).

The algorithm: each group in turn lowers the end of the hit to the largest one that it can serve, until all groups
agree. A chunk whose presence is unknown counts as present, so the end is never lowered too far. If every chunk that the
result needs is known, no unknown chunk can change the result. Otherwise the answer is deferred. So an immediate answer
equals a later one. Each chunk is looked up at most once in a search.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Protocol

from tierkv.types.geometry import cdiv
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult

_MISS, _RETRY = LookupResult.MISS, LookupResult.RETRY

Lookup = Callable[[Key], LookupResult | None]
"""Key -> presence of the chunk; None: not looked up, because the step's budget is used up. A later search continues."""

ResidentPrefix = Callable[[Sequence[Key], int, int], int]
"""(keys, start, stop) -> number of chunks from ``start`` that are known to be readable; a shortcut for ``Lookup``."""


def no_shortcut(keys: Sequence[Key], start: int, stop: int) -> int:  # noqa: ARG001 - the signature of a shortcut
    """Return 0: a :data:`ResidentPrefix` that knows nothing."""
    return 0


@dataclass(frozen=True, slots=True)
class SearchGroup:
    """Chunks of one group, as the search needs them."""

    chunk_tokens: int
    """Tokens per chunk."""
    keys: list[Key]
    """Keys of all whole chunks of the request; the list may grow between searches."""
    window_chunks: int | None = None
    """Number of chunks before its end that a hit needs (W); None: all of them."""
    end_slack: int | None = None
    """With a window: largest distance in tokens from the end of a hit to the end of its last chunk; None: any."""

    def needs(self, computed_tokens: int, end: int) -> range:
        """Indices of the chunks that a hit from token ``computed_tokens`` to token ``end`` needs."""
        start, stop = computed_tokens // self.chunk_tokens, cdiv(end, self.chunk_tokens)
        if self.window_chunks is not None:
            start = max(start, stop - self.window_chunks)
        return range(start, stop)

    def allowed_end(self, end: int) -> int:
        """Largest token up to ``end`` at which a hit may end."""
        whole = end // self.chunk_tokens * self.chunk_tokens
        missing = whole + self.chunk_tokens - end  # unused if end is whole
        return end if end == whole or self.end_slack is None or missing <= self.end_slack else whole


@dataclass(frozen=True, slots=True)
class Hit:
    """Result of a search."""

    tokens: int
    """Tokens beyond those computed locally; 0 if deferred."""
    deferred: bool = False
    """Whether the result is not known yet."""
    end_max: int = field(default=0, compare=False)
    """Largest end that a hit may have, as far as is known."""


NO_HIT = Hit(0)


def find_hit(
    groups: Sequence[SearchGroup],
    computed_tokens: int,
    tokens_max: int,
    lookup: Lookup,
    resident_prefix: ResidentPrefix = no_shortcut,
) -> Hit:
    """Longest hit of a request over all its groups.

    Args:
        groups: in lookup order.
        computed_tokens: C, tokens that the engine has already.
        tokens_max: upper bound of C + H.
        lookup: presence of one chunk; PENDING counts as present. Called at most once per chunk, and for no chunk beyond
            a known bound.
        resident_prefix: shortcut for chunks known to be readable.
    """
    end = min(tokens_max, *[len(group.keys) * group.chunk_tokens for group in groups])
    end_min = computed_tokens + max([group.chunk_tokens for group in groups])
    if end < end_min:
        return NO_HIT
    walks = [_walk(group, computed_tokens, lookup, resident_prefix) for group in groups]
    agreeing, turns = 0, cycle(walks)
    while agreeing < len(walks):
        reach = next(turns).reach(end)
        if reach < end_min:
            return NO_HIT
        agreeing = agreeing + 1 if reach == end else 1
        end = reach
    unknown = [walk for walk in walks if walk.is_unknown(end)]
    for walk in unknown:
        walk.look_up_rest()
    return Hit(0 if unknown else end - computed_tokens, deferred=bool(unknown), end_max=end)


class _Walk(Protocol):
    """One group's part of a search."""

    def reach(self, end: int) -> int:
        """Largest end up to ``end`` that this group may be able to serve. ``end`` never grows from call to call."""

    def is_unknown(self, end: int) -> bool:
        """Whether the presence of a chunk that a hit to ``end``, the last result, needs is unknown."""

    def look_up_rest(self) -> None:
        """Look up the chunks needed in case the unknown ones are missing, so that tiers are asked at once."""


def _walk(group: SearchGroup, computed_tokens: int, lookup: Lookup, resident_prefix: ResidentPrefix) -> _Walk:
    if group.window_chunks is None:
        return _PrefixWalk(group, computed_tokens, lookup, resident_prefix)
    return _WindowWalk(group, group.window_chunks, computed_tokens, lookup, resident_prefix)


class _PrefixWalk:
    """Full attention: looks up from the front to the first miss, and no chunk behind it (S23 to S27).

    Continues over unknown chunks, so that tiers are asked about the whole prefix at once.
    """

    __slots__ = ("_first", "_group", "_lookup", "_resident_prefix", "_stop", "_unknown")

    def __init__(
        self, group: SearchGroup, computed_tokens: int, lookup: Lookup, resident_prefix: ResidentPrefix
    ) -> None:
        self._group = group
        self._first = computed_tokens // group.chunk_tokens
        self._lookup = lookup
        self._resident_prefix = resident_prefix
        self._stop: int | None = None
        self._unknown: int | None = None

    def reach(self, end: int) -> int:
        size = self._group.chunk_tokens
        if self._stop is None:
            self._stop = self._walk_to(cdiv(end, size))
        return min(end, self._stop * size)

    def _walk_to(self, stop: int) -> int:
        keys, lookup = self._group.keys, self._lookup
        for i in range(self._first + self._resident_prefix(keys, self._first, stop), stop):
            answer = lookup(keys[i])
            if answer is _MISS:
                return i
            if (answer is _RETRY or answer is None) and self._unknown is None:
                self._unknown = i
            if answer is None:
                break
        return stop

    def is_unknown(self, end: int) -> bool:
        return self._unknown is not None and self._unknown < cdiv(end, self._group.chunk_tokens)

    def look_up_rest(self) -> None:
        return  # the walk continued over unknown chunks


class _WindowWalk:
    """Window: looks up from the end to the front, until the last W chunks are present (S28 to S34).

    A run that begins with the first chunk looked at suffices, however short: chunks before it are computed already.
    Ends never grow, so chunks from ``_low`` to the end are remembered as present, and each chunk is looked up once.
    """

    __slots__ = ("_first", "_group", "_lookup", "_low", "_resident_prefix", "_unknown", "_window")

    def __init__(
        self,
        group: SearchGroup,
        window: int,
        computed_tokens: int,
        lookup: Lookup,
        resident_prefix: ResidentPrefix,
    ) -> None:
        self._group = group
        self._window = window
        self._first = computed_tokens // group.chunk_tokens
        self._lookup = lookup
        self._resident_prefix = resident_prefix
        self._low: int | None = None
        self._unknown: list[int] = []

    def reach(self, end: int) -> int:
        size = self._group.chunk_tokens
        while True:
            end = self._group.allowed_end(end)
            stop = cdiv(end, size)
            missing = self._scan(max(self._first, stop - self._window), stop)
            if missing is None:
                return end
            end = missing * size

    def _scan(self, start: int, stop: int) -> int | None:
        """Look up chunks ``start`` to ``stop``, the last one first. Returns the first missing one, if any."""
        keys, lookup = self._group.keys, self._lookup
        if self._low is None:  # only once: in a window with gaps the shortcut starts at the wrong side
            if self._resident_prefix(keys, start, stop) == stop - start:
                self._low = start
                return None
            self._low = stop
        low = min(self._low, stop)
        while low > start:
            answer = lookup(keys[low - 1])
            low -= 1
            if answer is _MISS:
                self._low = low
                return low
            if answer is _RETRY or answer is None:
                self._unknown.append(low)
        self._low = low
        return None

    def is_unknown(self, end: int) -> bool:
        stop = cdiv(end, self._group.chunk_tokens)
        start = max(self._first, stop - self._window)
        return any(start <= i < stop for i in self._unknown)

    def look_up_rest(self) -> None:
        keys, lookup, low = self._group.keys, self._lookup, self._low or 0
        sure = self._unknown[-1] - low
        while sure < self._window and low > self._first:  # down to a whole window without unknown chunks
            low -= 1
            answer = lookup(keys[low])
            if answer is None:
                return
            sure = 0 if answer is _MISS or answer is _RETRY else sure + 1


def tokens_covered(groups: Sequence[SearchGroup], computed_tokens: int, tokens_max: int, chunks_max: int) -> int:
    """Largest C + H up to ``tokens_max`` whose hit needs at most ``chunks_max`` chunks over all groups.

    A shorter hit never needs more chunks than a longer one.
    """

    def needed(end: int) -> int:
        return sum([len(group.needs(computed_tokens, end)) for group in groups])

    end = min(tokens_max, *(len(group.keys) * group.chunk_tokens for group in groups))
    if needed(end) <= chunks_max:
        return end
    return computed_tokens + bisect_right(range(computed_tokens + 1, end + 1), chunks_max, key=needed)


def wanted_keys(groups: Sequence[SearchGroup], computed_tokens: int, tokens: int) -> tuple[Key, ...]:
    """Chunks that a hit of ``tokens`` beyond C needs, over all groups, in the order of their ends.

    A shorter hit needs chunks from the front of these, and up to one more per group, which ends behind it. In a group
    with a window it also needs chunks that are not among these.
    """
    keys: list[Key] = []
    ends: list[int] = []
    for group in groups:
        needs = group.needs(computed_tokens, computed_tokens + tokens)
        if len(needs) == 0:
            continue
        keys += group.keys[needs.start : needs.stop]
        if len(groups) > 1:
            size = group.chunk_tokens
            ends.extend(range((needs.start + 1) * size, (needs.stop + 1) * size, size))
    if len(groups) == 1:
        return tuple(keys)
    order = sorted(range(len(keys)), key=ends.__getitem__)  # runs of ascending ends: sorted() merges them
    return tuple([keys[i] for i in order])
