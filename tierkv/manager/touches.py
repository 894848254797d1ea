"""Uses of prefixes, by requests that have ended or store on, a bounded number per step. Sans-IO."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from tierkv.manager.contract import RequestContext
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.tier_index import TierRows
from tierkv.manager.lower.tier_list import TierList
from tierkv.manager.step_budget import KEYS_PER_LOOK, BudgetShare
from tierkv.structures.ranks import ranks_of
from tierkv.types.geometry import cdiv
from tierkv.types.keys import Key

WAITING_MAX = 1 << 20
"""Chunks whose use may wait for later steps. Further uses are not counted: eviction is less exact then."""

TOGETHER = 64
"""Chunks that are looked up in one batch. Of these, as many are counted as the budget pays for in all tiers."""

RANKED_PER_KEY = 2
"""Chunks that are ranked anew, each in one tier, for the cost of one key operation."""

TIERS_PER_KEY = 4
"""Tiers that a batch looks at for the cost of one key operation, whether they have any of its chunks or not."""

PresentPrefix = Callable[[Sequence[Key], int, int, RequestContext], int]
"""(keys, start, stop, request) -> number of chunks from ``start`` that are in a tier."""


@dataclass(slots=True)
class _Continuation:
    """Request that stores chunks of its own behind a prefix.

    ctx: of the request. chunk_tokens: tokens of each chunk. num_present: chunks from the front that were found in a
    tier. is_found: whether all of these are known.
    """

    ctx: RequestContext
    chunk_tokens: int
    num_present: int = 0
    is_found: bool = False


@dataclass(slots=True)
class _Use:
    """Chunks of one prompt whose use is counted from the last one to the first.

    keys: of the prompt; its owner only appends to it. num_left: of these, those that are not counted. by: the request
    that continues them; None: one that has ended.
    """

    keys: Sequence[Key]
    num_left: int
    by: _Continuation | None = None


class Touches:
    """Counts uses of chunks in every tier that has them: now, as far as the budget allows, and in later steps.

    The tail of a prefix comes first (S54), so its head is evicted last.

    Args:
        host: the host tier.
        tiers: the tiers below.
        present_prefix: finds the chunks of a prefix that are in a tier.
        share: key operations of the step.
    """

    def __init__(self, host: HostTier, tiers: TierList, present_prefix: PresentPrefix, share: BudgetShare) -> None:
        self._host = host
        self._tiers = tiers
        self._present_prefix = present_prefix
        self._share = share
        self._waiting: deque[_Use] = deque()
        self.num_waiting = 0
        """Chunks whose use is not counted yet."""

    def add(self, keys: Sequence[Key]) -> None:
        """Count a use of chunks, given in prefix order, without moving any."""
        self._add(_Use(keys, len(keys)))

    def continue_prefix(self, keys: Sequence[Key], chunk_tokens: int, ctx: RequestContext) -> None:
        """Rank those leading ``keys``, the prompt of a request, that are in a tier, and count a use of them.

        So the chunks that the request stores behind them are not stored in their place. chunk_tokens: of each chunk.
        """
        self._add(_Use(keys, len(keys), _Continuation(ctx, chunk_tokens)))

    def _add(self, use: _Use) -> None:
        if use.num_left and self.num_waiting < WAITING_MAX:
            if not self._waiting and self._share.left > 0:
                self._advance(use)
                if not use.num_left:  # usual
                    return
            self._waiting.append(use)
            self.num_waiting += use.num_left
            self.begin_step()

    def _advance(self, use: _Use) -> None:
        """Do a part of the work for a use."""
        if use.by is not None and not use.by.is_found:
            self._find(use, use.by)
        else:
            self._count_some(use)

    def begin_step(self) -> None:
        """Count uses that wait, the oldest first."""
        while self._waiting and self._share.left > 0:
            use = self._waiting[0]
            before = use.num_left
            self._advance(use)
            self.num_waiting -= before - use.num_left
            if not use.num_left:
                self._waiting.popleft()

    def _find(self, use: _Use, by: _Continuation) -> None:
        """Look for further chunks of a prefix that are in a tier."""
        if use.num_left <= TOGETHER and self._tiers.all_indexed and by.ctx.hints.load_tiers is None:
            self._continue_short(use, by)
            return
        first, end = by.num_present, min(use.num_left, by.num_present + KEYS_PER_LOOK * self._share.left)
        by.num_present += self._present_prefix(use.keys, first, end, by.ctx)
        self._share.take(cdiv(by.num_present - first + 1, KEYS_PER_LOOK))
        by.is_found = by.num_present < end or end == use.num_left
        if by.is_found:
            use.num_left = by.num_present
            if last := use.keys[max(0, by.num_present - TOGETHER) : by.num_present]:
                self._tiers.note_continued(self._tiers.rows_of(last), _ranks_by(by, 0, 1)[0])

    def _continue_short(self, use: _Use, by: _Continuation) -> None:
        """Find the chunks of a short prefix that are in a tier, and count their use, with one lookup for both."""
        keys = use.keys[: use.num_left]
        slots, rows = self._host.slots.find_all(keys), self._tiers.rows_of(keys)
        below = {position for _, _, positions in rows for position in positions}
        count = 0
        for slot in slots:
            if slot is None and count not in below:
                break
            count += 1
        use.num_left = by.num_present = count
        by.is_found = True
        if count:
            rows = [(tier, some[:stop], at[:stop]) for tier, some, at in rows if (stop := bisect_left(at, count))]
            self._tiers.note_continued(rows, _ranks_by(by, 0, 1)[0])
            self._rank(use, by, 0, slots[:count], rows)
        else:
            self._share.take(1)

    def _count_some(self, use: _Use) -> None:
        """Count the use of some chunks from the tail."""
        stop, by = use.num_left, use.by
        first = max(0, stop - TOGETHER)
        if by is not None:
            # With one chunk that was moved before, so that the parts of the prefix are linked.
            keys = use.keys[first : min(stop + 1, by.num_present)]
            self._rank(use, by, first, self._host.slots.find_all(keys), self._tiers.rows_of(keys))
            return
        keys = use.keys[first:stop]
        rows, cut = self._affordable(self._tiers.rows_of(keys), len(keys), KEYS_PER_LOOK)
        use.num_left = first + cut
        self._host.touch(keys[cut:][::-1])
        for tier, some, _ in rows:
            tier.policy.touch(some[::-1])

    def _rank(
        self, use: _Use, by: _Continuation, first: int, slots: Sequence[int | None], rows: Sequence[TierRows]
    ) -> None:
        """Rank chunks anew where they are, as many from the tail as the share pays for. first: number of the first."""
        rows, cut = self._affordable(rows, min(len(slots), use.num_left - first), RANKED_PER_KEY)
        use.num_left = first + cut
        ranks = _ranks_by(by, first, len(slots))
        self._host.continue_prefix(slots[cut:], ranks[cut:])
        for tier, some, positions in rows:
            tier.residency.continue_prefix(some, [ranks[i] for i in positions])

    def _affordable(self, rows: Sequence[TierRows], chunks: int, per_key: int) -> tuple[Sequence[TierRows], int]:
        """Choose the last of some chunks whose use the share pays for in all tiers, and take it from the share.

        Args:
            rows: of the chunks, and perhaps of one behind them.
            chunks: how many are to be counted; at least one is.
            per_key: uses in one tier for the cost of one key operation.

        Returns:
            The rows of the chosen ones, and the position of the first.
        """
        uses, left = chunks + sum([len(some) for _, some, _ in rows]), self._share.left
        self._share.take(cdiv(uses, per_key) + len(self._tiers.in_service) // TIERS_PER_KEY)
        if uses <= left * per_key:  # usual
            return rows, 0
        at = Counter(chain.from_iterable(positions for _, _, positions in rows))
        cut, paid = chunks - 1, 1 + at[chunks - 1]
        while cut and paid + 1 + at[cut - 1] <= left * per_key:
            cut -= 1
            paid += 1 + at[cut]
        cuts = [(tier, some, positions, bisect_left(positions, cut)) for tier, some, positions in rows]
        return [(tier, some[i:], positions[i:]) for tier, some, positions, i in cuts if i < len(some)], cut


def _ranks_by(by: _Continuation, first: int, count: int) -> list[int]:
    """Ranks of chunks that a request continues, from the one of number ``first`` on."""
    size = by.chunk_tokens
    return ranks_of(by.ctx.request_id, range(size * (first + 1), size * (first + count + 1), size), by.ctx.number)
