"""Accounts of requests: which tier served which tokens, what was stored, what was waited for. Sans-IO."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.load.load_plan import LoadPlan
from tierkv.scheduler.requests.record import RequestStats
from tierkv.types.account import RequestAccount
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key
from tierkv.types.transfers import TransferJob

ACCOUNTS_KEPT_MAX = 4096
"""Accounts of requests that are over, kept for who asks late; older ones are dropped."""


def tokens_of_chunks(plan: LoadPlan, geometry: Geometry, start: int, end: int) -> list[int]:
    """How many of the tokens from ``start`` to ``end`` each chunk of a load stands for; adds up to ``end - start``.

    Told by the chunks of one group, so that groups of different sizes count no token twice: the first in lookup order
    (full attention first) that loads anything. What lies before its first chunk (blocks that the engine has, or tokens
    outside a window) goes with that chunk.
    """
    tokens = [0] * len(plan.keys)
    lead = next((index for index in geometry.lookup_order if plan.group_sizes[index]), None)
    if lead is None:
        return tokens
    size = geometry.groups[lead].chunk_tokens
    chunk, told, last = plan.block_indices[lead] // geometry.blocks_per_chunk, start, 0
    for i, group in enumerate(plan.chunk_groups):
        if group == lead:
            chunk += 1
            upto, last = min(end, chunk * size), i
            tokens[i] = upto - told
            told = upto
    tokens[last] += end - told
    return tokens


def tokens_by_tier(plan: LoadPlan, sources: Sequence[str], geometry: Geometry, start: int, end: int) -> Counter[str]:
    """Which tier served which of the tokens from ``start`` to ``end``: see :func:`tokens_of_chunks`."""
    return _by_tier(tokens_of_chunks(plan, geometry, start, end), sources)


def _by_tier(tokens: Sequence[int], sources: Sequence[str]) -> Counter[str]:
    by_tier: Counter[str] = Counter()
    for count, source in zip(tokens, sources, strict=True):
        if count:
            by_tier[source] += count
    return by_tier


class Accounting:
    """The ledgers of all requests that are known, and the last ones of those that are over."""

    def __init__(self, geometry: Geometry, counters: CoreCounters) -> None:
        self._geometry = geometry
        self._counters = counters
        self._open: dict[str, RequestStats] = {}
        self._closed: OrderedDict[str, RequestAccount] = OrderedDict()

    def open_stats(self, request_id: str) -> RequestStats:
        """A new stats."""
        stats = self._open[request_id] = RequestStats(request_id)
        return stats

    def close_stats(self, request_id: str) -> None:
        """The request is over, and so are its transfers."""
        stats = self._open.pop(request_id, None)
        if stats is not None:
            self._closed[request_id] = stats.as_account()
            self._closed.move_to_end(request_id)
            if len(self._closed) > ACCOUNTS_KEPT_MAX:
                self._closed.popitem(last=False)

    def account_of(self, request_id: str) -> RequestAccount | None:
        """The account of a request, as it stands or as it ended; None if it is unknown or long over."""
        stats = self._open.get(request_id)
        return self._closed.get(request_id) if stats is None else stats.as_account()

    # -- entries -----------------------------------------------------------------------------------------------------

    def note_deferred(self, stats: RequestStats, now_s: float) -> None:
        """A lookup was answered "ask me again"."""
        stats.deferrals += 1
        if stats.deferred_since_s is None:
            stats.deferred_since_s = now_s

    def note_answered(self, stats: RequestStats, now_s: float) -> None:
        """The lookup was answered, or nobody waits for its answer any more."""
        if stats.deferred_since_s is not None:
            waited_s = now_s - stats.deferred_since_s
            stats.deferred_s += waited_s
            stats.deferred_since_s = None
            self._counters.deferred_ms += round(waited_s * 1000)

    def note_load(self, stats: RequestStats, plan: LoadPlan, sources: Sequence[str], start: int, end: int) -> None:
        """A load of the tokens from ``start`` to ``end`` begins."""
        if len(set(sources)) == 1:  # as where all was in the host tier: no need to ask which chunk stands for what
            self._note_tokens(stats, plan.chunk_groups, {sources[0]: end - start}, sources)
        else:
            self.note_chunks(stats, plan.chunk_groups, tokens_of_chunks(plan, self._geometry, start, end), sources)

    def note_chunks(
        self, stats: RequestStats, groups: Sequence[int], tokens: Sequence[int], sources: Sequence[str]
    ) -> None:
        """Some chunks of a load are on their way. Of each: its group, the tokens it stands for, its tier."""
        self._note_tokens(stats, groups, _by_tier(tokens, sources), sources)

    def _note_tokens(
        self, stats: RequestStats, groups: Sequence[int], tokens: Mapping[str, int], sources: Sequence[str]
    ) -> None:
        """tokens: by tier."""
        for source, count in tokens.items():
            stats.loaded_tokens[source] += count
            self._counters.tokens_loaded[source] += count
        for (group, source), chunks in Counter(zip(groups, sources, strict=True)).items():
            self._counters.chunks_hit[source] += chunks
            stats.loaded_bytes[source] += chunks * self._geometry.groups[group].payload_bytes

    def note_stored(self, job: TransferJob, failed: AbstractSet[Key]) -> None:
        """A store of the request's chunks has ended."""
        stats = self._open.get(job.request_id)
        lead = self._geometry.lookup_order[0]
        size = self._geometry.groups[lead].chunk_tokens
        good = job.chunk_groups.count(lead)
        if failed:
            good -= sum(g == lead and key in failed for g, key in zip(job.chunk_groups, job.keys, strict=True))
        self._counters.tokens_stored += good * size
        if stats is not None:
            stats.stored_tokens += good * size
