"""Load or recompute: a hit is answered as far as loading it is expected to be faster than computing it. Sans-IO.

Where both numbers are known, the measured speed of the tiers and the prefill rate; otherwise all of it. Never longer
than the search found, and always one of its own answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from tierkv.manager.manager import OffloadManager
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.limits import SchedulerLimits
from tierkv.scheduler.lookup.load_cost import PendingRead, ReadCost, best_load_tokens, reading_s
from tierkv.scheduler.lookup.prefill_rate import PrefillRate
from tierkv.scheduler.lookup.search import NO_HIT, Hit
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.types.geometry import Geometry

BENEFIT = 1.25
"""A tier in use must be expected to be this much slower than prefill before it is left out, and one that is left out
this much faster before it is used again: or answers would flap between two equal ways."""


class Search(Protocol):
    """The search for a request's hit."""

    def __call__(self, tokens_max: int, without: frozenset[str] = frozenset()) -> Hit:
        """Under a cap of C + H, and as if some tiers, by name, had nothing."""


class LoadOrRecompute:
    """See the module's docstring."""

    def __init__(
        self,
        manager: OffloadManager,
        geometry: Geometry,
        limits: SchedulerLimits,
        counters: CoreCounters,
        prefill: PrefillRate,
    ) -> None:
        self._manager = manager
        self._geometry = geometry
        self._limits = limits
        self._counters = counters
        self._prefill = prefill
        self._left_out: set[int] = set()

    def choose_hit(self, record: RequestRecord, computed_tokens: int, search: Search) -> Hit:
        """What the search finds, as far as it shall be loaded.

        Args:
            record: who asks.
            computed_tokens: C.
            search: the request's search.
        """
        known = self._manager.found_below
        hit = search(record.hit_end_max)
        if hit.deferred:
            return hit
        shorter = hit
        if self._limits.weighs_recompute and self._manager.found_below != known:  # else all of it is in the host tier
            shorter = self._shorten(record, computed_tokens, hit, search)
            if shorter.deferred:
                return shorter
        if shorter.tokens < self._limits.load_tokens_min:
            shorter = NO_HIT
        if shorter.tokens < hit.tokens and record.shortened_about != record.asked_about:
            record.shortened_about = record.asked_about
            record.stats.shortened_tokens += hit.tokens - shorter.tokens
            self._counters.hits_shortened += 1
            self._counters.tokens_shortened += hit.tokens - shorter.tokens
        return shorter

    def _shorten(self, record: RequestRecord, computed_tokens: int, hit: Hit, search: Search) -> Hit:
        rate = self._prefill.tokens_per_s
        costs = self._costs() if rate is not None else {}
        if rate is None or not costs or not hit.tokens:
            return hit
        reads = self._pending_reads(record, computed_tokens, hit.tokens)
        load_tokens = best_load_tokens(reads, computed_tokens, hit.tokens, rate, costs)
        best, best_reads = hit, reads
        if load_tokens < hit.tokens:
            best, best_s = NO_HIT, hit.tokens / rate
            best_reads = []
            for other in (hit, *self._shorter_hits(record, computed_tokens, reads, load_tokens, search)):
                if other.deferred:
                    return other  # not known yet; answered at once or later, the answer shall be the same
                own = reads if other is hit else self._pending_reads(record, computed_tokens, other.tokens)
                total_s = reading_s(own, costs) + (hit.tokens - other.tokens) / rate
                if total_s < best_s or (total_s == best_s and other.tokens > best.tokens):
                    best, best_s, best_reads = other, total_s, own
        self._note_choice(record, reads, best_reads, computed_tokens + best.tokens)
        return best

    def _shorter_hits(
        self, record: RequestRecord, computed_tokens: int, reads: list[PendingRead], load_tokens: int, search: Search
    ) -> Iterator[Hit]:
        """Shorter hits that may be better than the whole one, as the search finds them.

        What a full-attention group needs of a shorter hit is a part of what it needs of a longer one, so the best cut
        of the reads is the best there is. A window needs other chunks, perhaps slow ones, wherever the hit ends: there
        the search is also told that the tiers of the whole hit had nothing, one after the other.
        """
        if load_tokens:
            yield search(computed_tokens + load_tokens)
        if self._geometry.has_windows:
            tiers = list(dict.fromkeys(read.tier for read in reversed(reads)))
            for count in range(1, len(tiers) + 1):
                yield search(record.hit_end_max, frozenset(map(self._manager.tier_name, tiers[:count])))

    def _costs(self) -> dict[int, ReadCost]:
        """What reads cost, by tier; with the benefit of the doubt for the way that was taken last."""
        costs: dict[int, ReadCost] = {}
        for tier, expected in self._manager.read_costs().items():
            if expected is not None:
                factor = BENEFIT if tier in self._left_out else 1 / BENEFIT
                costs[tier] = ReadCost(expected[0] * factor, expected[1] * factor)
        return costs

    def _pending_reads(self, record: RequestRecord, computed_tokens: int, tokens: int) -> list[PendingRead]:
        """The chunks of a hit that would have to be read, in the order in which they begin."""
        reads: list[PendingRead] = []
        for index, group in zip(self._geometry.lookup_order, record.search_groups, strict=True):
            num_bytes = self._geometry.groups[index].payload_bytes
            needs = group.needs(computed_tokens, computed_tokens + tokens)
            resident = self._manager.resident_prefix(group.keys, needs.start, needs.stop) if needs else 0
            for i in needs[resident:]:
                tier = self._manager.would_read(group.keys[i], record.ctx)
                if tier is not None:
                    reads.append(PendingRead(i * group.chunk_tokens, tier, num_bytes, group.keys[i]))
        if len(record.search_groups) > 1:
            reads.sort(key=lambda read: read.start)
        return reads

    def _note_choice(self, record: RequestRecord, whole: list[PendingRead], used: list[PendingRead], end: int) -> None:
        """Note which tiers are used and which one is left out, and have that one measured again now and then."""
        in_use = {read.tier for read in used}
        self._left_out -= in_use
        cut = next((read for read in whole if read.start >= end and read.tier not in in_use), None)
        if cut is not None:
            self._left_out.add(cut.tier)
            self._manager.remeasure(cut.tier, cut.key, record.ctx)
