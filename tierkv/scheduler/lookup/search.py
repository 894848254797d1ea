"""How long a hit is: pure functions over "is this chunk there?" (spec, sections 5 and 6).

The rule (S44): the largest number of tokens H up to a cap such that every group with full attention has all chunks
that cover the tokens from C to C + H, every group with a window has the last W of them, and H is no shorter than the
coarsest chunk; else 0. A group may also restrict where hits end (:attr:`SearchGroup.end_slack`).

How it is found: each group in turn lowers the end of the hit to the largest one that it can serve itself, until all
agree. As long as nothing is known to be missing it counts as there, so the end is never lowered too far; and if every
chunk that the result needs is known, no unknown one can change it. Otherwise, and only then, the answer is deferred:
so it is the same whether it came at once or later. Each chunk is looked up at most once in a search.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

from tierkv.types.geometry import cdiv
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult

_MISS, _RETRY = LookupResult.MISS, LookupResult.RETRY

Lookup = Callable[[Key], LookupResult]

ResidentPrefix = Callable[[Sequence[Key], int, int], int]
"""(keys, start, stop) -> how many from start on are known to be readable; a shortcut over ``Lookup``."""


def no_shortcut(keys: Sequence[Key], start: int, stop: int) -> int:  # noqa: ARG001 - the signature of a shortcut
    """A :data:`ResidentPrefix` that knows nothing."""
    return 0


@dataclass(frozen=True, slots=True)
class SearchGroup:
    """What the search needs to know of one group.

    keys: of all whole chunks of the request; may grow between searches.
    window_chunks: how many chunks before its end a hit needs (W); None: all of them.
    end_slack: of a window, how many tokens before the end of a chunk a hit may end at most; None: anywhere.
    """

    chunk_tokens: int
    keys: list[Key]
    window_chunks: int | None = None
    end_slack: int | None = None

    def needs(self, computed_tokens: int, end: int) -> range:
        """Indices of the chunks that a hit from token ``computed_tokens`` to token ``end`` needs."""
        start, stop = computed_tokens // self.chunk_tokens, cdiv(end, self.chunk_tokens)
        if self.window_chunks is not None:
            start = max(start, stop - self.window_chunks)
        return range(start, stop)

    def allowed_end(self, end: int) -> int:
        """The largest token up to ``end`` at which a hit may end."""
        whole = end // self.chunk_tokens * self.chunk_tokens
        missing = whole + self.chunk_tokens - end  # meaningless where end is whole, and not looked at then
        return end if end == whole or self.end_slack is None or missing <= self.end_slack else whole


@dataclass(frozen=True, slots=True)
class Hit:
    """Result of a search. tokens: beyond those computed locally. deferred: not known yet; ask again."""

    tokens: int
    deferred: bool = False


NO_HIT = Hit(0)
DEFERRED = Hit(0, deferred=True)


def find_hit(
    groups: Sequence[SearchGroup],
    computed_tokens: int,
    tokens_max: int,
    lookup: Lookup,
    resident_prefix: ResidentPrefix = no_shortcut,
) -> Hit:
    """The hit of a request over all its groups.

    Args:
        groups: in lookup order.
        computed_tokens: C, tokens that the engine has already.
        tokens_max: upper bound of C + H.
        lookup: existence of one chunk; PENDING counts as there. Not called twice for a chunk, nor for chunks beyond a
            known bound.
        resident_prefix: shortcut for chunks known to be readable.
    """
    end = min(tokens_max, *(len(group.keys) * group.chunk_tokens for group in groups))
    end_min = computed_tokens + max(group.chunk_tokens for group in groups)
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
        walk.ask_on()
    return DEFERRED if unknown else Hit(end - computed_tokens)


class _Walk(Protocol):
    """One group's part of a search."""

    def reach(self, end: int) -> int:
        """The largest end up to ``end`` that this group may be able to serve. Ends never grow from call to call."""

    def is_unknown(self, end: int) -> bool:
        """Whether something that a hit to ``end``, the last one reached, needs is not known."""

    def ask_on(self) -> None:
        """Look up what will be wanted if that turns out to be missing, so that it is asked for in the same breath."""


def _walk(group: SearchGroup, computed_tokens: int, lookup: Lookup, resident_prefix: ResidentPrefix) -> _Walk:
    if group.window_chunks is None:
        return _PrefixWalk(group, computed_tokens, lookup, resident_prefix)
    return _WindowWalk(group, group.window_chunks, computed_tokens, lookup, resident_prefix)


class _PrefixWalk:
    """Full attention: from the front to the first miss. What lies behind that is never looked up (S23 to S27).

    Walks on over unknown chunks, so that the whole prefix is asked for at once.
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
            if answer is _RETRY and self._unknown is None:
                self._unknown = i
        return stop

    def is_unknown(self, end: int) -> bool:
        return self._unknown is not None and self._unknown < cdiv(end, self._group.chunk_tokens)

    def ask_on(self) -> None:
        return  # the walk went on over what was unknown


class _WindowWalk:
    """A window: from the end to the front, until the last W chunks are there (S28 to S34).

    A run that begins with the first chunk looked at is enough, however short: what lies before it is local already.
    Ends only ever go down, so the chunks ``_low`` to the end are remembered as there, and no chunk is met twice.
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
        """Look at ``start`` to ``stop``, the last one first. Returns the one that is missing, if any is."""
        keys, lookup = self._group.keys, self._lookup
        if self._low is None:  # the shortcut pays once: in a window with gaps it would walk from the wrong side
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
            if answer is _RETRY:
                self._unknown.append(low)
        self._low = low
        return None

    def is_unknown(self, end: int) -> bool:
        stop = cdiv(end, self._group.chunk_tokens)
        start = max(self._first, stop - self._window)
        return any(start <= i < stop for i in self._unknown)

    def ask_on(self) -> None:
        keys, lookup, low = self._group.keys, self._lookup, self._low or 0
        sure = self._unknown[-1] - low
        while sure < self._window and low > self._first:  # down to a window of which nothing is unknown
            low -= 1
            answer = lookup(keys[low])
            sure = 0 if answer is _MISS or answer is _RETRY else sure + 1


def tokens_covered(groups: Sequence[SearchGroup], computed_tokens: int, tokens_max: int, chunks_max: int) -> int:
    """The largest C + H up to ``tokens_max`` whose hit needs at most ``chunks_max`` chunks over all groups.

    Where not all fit, in whole coarsest chunks. A shorter hit never needs more chunks than a longer one.
    """

    def needed(end: int) -> int:
        return sum([len(group.needs(computed_tokens, end)) for group in groups])

    end = min(tokens_max, *(len(group.keys) * group.chunk_tokens for group in groups))
    if needed(end) <= chunks_max:
        return end
    step = max(group.chunk_tokens for group in groups)
    steps = range(computed_tokens // step + 1, end // step + 1)
    fitting = bisect_right(steps, chunks_max, key=lambda count: needed(count * step))
    return steps[fitting - 1] * step if fitting else computed_tokens


def wanted_keys(groups: Sequence[SearchGroup], computed_tokens: int, tokens: int) -> tuple[Key, ...]:
    """The chunks that a hit of ``tokens`` beyond C needs, over all groups, in the order of where they end.

    A shorter hit needs the chunks at the front, and perhaps one more of each group, that ends behind it; of a group
    with a window it also needs some that are not among these.
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
