"""Statistics per request: tokens served by each tier, tokens stored, time deferred. Sans-IO."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.load.load_plan import LoadPlan, tokens_of_chunks
from tierkv.scheduler.requests.record import RequestStats
from tierkv.types.account import RequestAccount
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key
from tierkv.types.transfers import TransferJob

ACCOUNTS_KEPT_MAX = 4096
"""Accounts of ended requests that are kept for late readers; older ones are dropped."""


def tokens_by_tier(tokens: Sequence[int], sources: Sequence[str]) -> Counter[str]:
    """Tokens per tier, from the tokens and the source of each chunk."""
    by_tier: Counter[str] = Counter()
    for count, source in zip(tokens, sources, strict=True):
        if count:
            by_tier[source] += count
    return by_tier


class Accounting:
    """Statistics of all known requests, and accounts of the latest ended ones."""

    def __init__(self, geometry: Geometry, counters: CoreCounters) -> None:
        self._geometry = geometry
        self._counters = counters
        self._open: dict[str, RequestStats] = {}
        self._closed: OrderedDict[str, RequestAccount] = OrderedDict()

    def open_stats(self, request_id: str) -> RequestStats:
        """New statistics of a request."""
        stats = self._open[request_id] = RequestStats(request_id)
        return stats

    def close_stats(self, request_id: str) -> None:
        """Freeze the statistics: the request and its transfers have ended."""
        stats = self._open.pop(request_id, None)
        if stats is not None:
            self._closed[request_id] = stats.as_account()
            self._closed.move_to_end(request_id)
            if len(self._closed) > ACCOUNTS_KEPT_MAX:
                self._closed.popitem(last=False)

    def account_of(self, request_id: str) -> RequestAccount | None:
        """Account of a request, current or final; None if it is unknown or was dropped."""
        stats = self._open.get(request_id)
        return self._closed.get(request_id) if stats is None else stats.as_account()

    # -- entries -----------------------------------------------------------------------------------------------------

    def note_deferred(self, stats: RequestStats, now_s: float) -> None:
        """Count an answer "ask again"."""
        stats.deferrals += 1
        if stats.deferred_since_s is None:
            stats.deferred_since_s = now_s

    def note_answered(self, stats: RequestStats, now_s: float, tier_s: float) -> None:
        """End the time of deferral: the lookup was answered, or is no longer open.

        tier_s: seconds of it in which a tier was asked, or read.
        """
        if stats.deferred_since_s is not None:
            waited_s = now_s - stats.deferred_since_s
            tier_s = min(tier_s, waited_s)
            stats.deferred_s += waited_s
            stats.deferred_tier_s += tier_s
            stats.deferred_since_s = None
            self._counters.deferred_tier_ms += round(tier_s * 1000)
            self._counters.deferred_queue_ms += round((waited_s - tier_s) * 1000)

    def note_start(self, asked_tokens: int, local_tokens: int, loaded_tokens: int = 0) -> None:
        """Count the tokens of a request that gets its blocks: those beyond the others must be computed."""
        counters = self._counters
        counters.tokens_asked += asked_tokens
        counters.tokens_local += local_tokens
        counters.tokens_computed += max(0, asked_tokens - local_tokens - loaded_tokens)

    def note_load(self, stats: RequestStats, plan: LoadPlan, sources: Sequence[str], start: int, end: int) -> None:
        """Count a load of the tokens from ``start`` to ``end`` that begins."""
        self.note_chunks(stats, plan.chunk_groups, tokens_of_chunks(plan, self._geometry, start, end), sources)

    def note_chunks(
        self, stats: RequestStats, groups: Sequence[int], tokens: Sequence[int], sources: Sequence[str]
    ) -> None:
        """Count chunks whose load begins.

        Args:
            stats: of the request.
            groups: of each chunk, its group.
            tokens: of each chunk, the tokens that it represents.
            sources: of each chunk, its tier.
        """
        if len(set(sources)) == 1:  # one tier, mostly the host: they need not be split by chunk
            source, total = sources[0], sum(tokens)
            by_group = {(group, source): groups.count(group) for group in set(groups)}
            self._note_tokens(stats, {source: total} if total else {}, by_group)
        else:
            self._note_tokens(stats, tokens_by_tier(tokens, sources), Counter(zip(groups, sources, strict=True)))

    def _note_tokens(
        self, stats: RequestStats, tokens: Mapping[str, int], chunks: Mapping[tuple[int, str], int]
    ) -> None:
        """tokens: per tier. chunks: number of them by group and tier."""
        for source, count in tokens.items():
            stats.loaded_tokens[source] = stats.loaded_tokens.get(source, 0) + count
            self._counters.tokens_loaded[source] += count
        for (group, source), count in chunks.items():
            self._counters.chunks_hit[source] += count
            size = count * self._geometry.groups[group].payload_bytes
            stats.loaded_bytes[source] = stats.loaded_bytes.get(source, 0) + size

    def note_stored(self, job: TransferJob, failed: AbstractSet[Key]) -> None:
        """Count the chunks of a store that has ended."""
        stats = self._open.get(job.request_id)
        lead = self._geometry.lookup_order[0]
        size = self._geometry.groups[lead].chunk_tokens
        good = job.chunk_groups.count(lead)
        if failed:
            good -= sum(g == lead and key in failed for g, key in zip(job.chunk_groups, job.keys, strict=True))
        self._counters.tokens_stored += good * size
        if stats is not None:
            stats.stored_tokens += good * size
