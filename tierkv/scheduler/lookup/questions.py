"""Searches, and the questions of one search to the manager, within the budget of the step. Sans-IO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tierkv.manager.contract import RequestContext
from tierkv.manager.manager import OffloadManager
from tierkv.manager.step_budget import KEYS_PER_LOOK, BudgetShare
from tierkv.scheduler.lookup.open_lookup import OpenLookup
from tierkv.scheduler.lookup.search import Hit, ResidentPrefix, SearchGroup, find_hit
from tierkv.types.cache_events import HOST
from tierkv.types.keys import Key
from tierkv.types.lookup import LookupResult

_RETRY = LookupResult.RETRY

REPEATS_PER_KEY = 4
"""Repeated questions about chunks for the cost of one key operation. No probe has to be queued for them."""

HOST_LOOKS_PER_KEY = 2
"""Questions about chunks of the host tier only, for the cost of one key operation."""

HOST_ONLY = frozenset({HOST})
"""Tiers that count for a late lookup."""

KEYS_PER_SEARCH = 8
"""Key operations that a search costs beyond those of its chunks, however short it is."""


class SearchTurns:
    """Turns of lookups that are searched. While some have to wait for budget, none is searched twice before them.

    So those that the engine asks about first do not use up every step.

    Args:
        share: key operations of the step.
    """

    def __init__(self, share: BudgetShare) -> None:
        self._share = share
        self._turn = 0
        self._waited = self._waiting = False  # whether a lookup had to wait, in the previous and in this step

    def begin_step(self) -> None:
        """Begin a step; a new turn if no lookup had to wait in the previous one."""
        self._waited, self._waiting = self._waiting, False
        self._turn += not self._waited

    def waits(self, lookup: OpenLookup) -> bool:
        """Whether the lookup has to wait for a later step, because of its turn or of the budget."""
        is_used_up = not self._share.left
        if lookup.turn == self._turn:  # one that was searched keeps none from its next turn
            return self._waited or is_used_up
        self._waiting = self._waiting or is_used_up
        return is_used_up

    def take(self, lookup: OpenLookup) -> bool:
        """Take the budget of a search. Returns whether it may be made in this step; otherwise the lookup is paused."""
        lookup.paused = self.waits(lookup)
        if not lookup.paused:
            self._share.take(KEYS_PER_SEARCH)
            lookup.turn = self._turn
        return not lookup.paused


class Questions:
    """Asks for chunks of one lookup, and keeps in it what was found, so that a later search continues there.

    Args:
        manager: answers.
        lookup: keeps what was found.
        ctx: of the request.
        share: key operations of the step.
    """

    def __init__(self, manager: OffloadManager, lookup: OpenLookup, ctx: RequestContext, share: BudgetShare) -> None:
        self._manager = manager
        self._lookup = lookup
        self._ctx = ctx
        self._share = share
        self._allowed = ctx.hints.load_tiers
        self._seen = lookup.seen.setdefault(self._allowed, {})
        self._repeated = 0  # questions that were asked before
        self._has_looked = False  # the first look is free: the search itself may have used up a small share

    def longest_hit(self, groups: Sequence[SearchGroup], computed_tokens: int, tokens_max: int) -> Hit:
        """Longest hit, as of :func:`find_hit`. A search that was paused goes on below the ends that it has excluded."""
        search, ends = (tokens_max, self._allowed), self._lookup.ends
        end = ends.get(search, tokens_max)
        hit = find_hit(groups, computed_tokens, end, self.presence, self.present_prefix)
        ends[search] = hit.end_max
        return hit

    def presence(self, key: Key) -> LookupResult | None:
        """Presence of one chunk; None if the step's budget is used up.

        An answer that a shared tier gave to this lookup counts until the lookup ends.
        """
        seen = self._seen.get(key)
        if seen is not None:
            return seen
        lookup, manager = self._lookup, self._manager
        if key in lookup.known:
            self._repeated += 1
        costs = key not in lookup.known or not self._repeated % REPEATS_PER_KEY
        if costs and not self._share.take(1) and self._has_looked:
            lookup.paused = True
            return None
        self._has_looked = True
        below = manager.found_below
        answer = manager.lookup(key, self._ctx)
        lookup.found_below = lookup.found_below or manager.found_below != below
        if answer is _RETRY:
            answer = lookup.known.setdefault(key, _RETRY)
        elif key in lookup.known:
            lookup.known[key] = answer
        self._seen[key] = answer
        return answer

    def present_prefix(self, keys: Sequence[Key], start: int, stop: int) -> int:
        """Number of leading ``keys[start:stop]`` that are known to be present; fewer if the budget is used up."""
        lookup, manager = self._lookup, self._manager
        if start >= stop:
            return 0
        run = (keys[start], self._allowed)
        first = start + lookup.reached.get(run, 0)
        if first >= stop:
            return stop - start
        end = min(stop, first + max(1, self._share.left) * KEYS_PER_LOOK)
        below = manager.found_below
        found = manager.present_prefix(keys, first, end, self._ctx)
        lookup.found_below = lookup.found_below or manager.found_below != below
        self._share.take(found // KEYS_PER_LOOK)
        lookup.reached[run] = first + found - start
        if first + found < end and manager.tiers.all_indexed:  # nothing is to be asked: what ends the run is missing
            self._seen[keys[first + found]] = LookupResult.MISS
        if first + found == end < stop:
            lookup.paused = True
        return first + found - start


class HostQuestions:
    """Questions of a late lookup: only chunks count that are readable in the host tier, and no tier is asked.

    The arguments are those of :class:`Questions`.
    """

    def __init__(self, manager: OffloadManager, lookup: OpenLookup, ctx: RequestContext, share: BudgetShare) -> None:
        self._lookup = lookup
        self._share = share
        self._prefix: ResidentPrefix = partial(manager.resident_prefix, ctx=ctx)
        self._is_readable: Callable[[Key], object] = (
            manager.passages.is_readable
            if manager.allows_all(ctx)
            else lambda key: manager.resident_prefix((key,), 0, 1, ctx)
        )
        self._looks = 0

    def longest_hit(self, groups: Sequence[SearchGroup], computed_tokens: int, tokens_max: int) -> Hit:
        """Longest hit, as of :meth:`Questions.longest_hit`."""
        search, ends = (tokens_max, HOST_ONLY), self._lookup.ends
        end = ends.get(search, tokens_max)
        hit = find_hit(groups, computed_tokens, end, self._presence, self._prefix)
        ends[search] = hit.end_max
        return hit

    def _presence(self, key: Key) -> LookupResult | None:
        self._looks += 1
        if not self._looks % HOST_LOOKS_PER_KEY and not self._share.take(1):
            self._lookup.paused = True
        if self._lookup.paused:
            return None
        return LookupResult.HIT if self._is_readable(key) else LookupResult.MISS
