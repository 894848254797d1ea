"""Load or recompute: shorten a hit to the part that is expected to load faster than it computes. Sans-IO.

Applied where the measured speed of the tiers and the prefill rate are known; otherwise the whole hit is loaded. The
result is never longer than the hit, and always a hit that the search found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

from tierkv.manager.contract import RequestContext
from tierkv.manager.lower.read_speed import ReadTimes
from tierkv.manager.manager import OffloadManager
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.limits import SchedulerLimits
from tierkv.scheduler.lookup.load_cost import PendingRead, ReadCost, best_load_tokens, reading_s
from tierkv.scheduler.lookup.prefill_rate import PrefillRate
from tierkv.scheduler.lookup.search import NO_HIT, Hit
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.types.geometry import Geometry, cdiv
from tierkv.types.keys import Key

BENEFIT = 1.25
"""Hysteresis factor against answers that alternate between two nearly equal choices.

A tier in use is left out when it is expected to be this factor slower than prefill. A tier that was left out is used
again when it is this factor faster.
"""

QUEUE_PATIENCE = 16.0
"""Seconds in the queue of a tier that a hit may wait for each second in which the engine could compute it.

Loads of a burst end sooner than its prefills wherever the tier is faster, so waiting pays, and the GPU is left to
others. But a short prompt does not wait for the loads of many long ones.
"""

PIECES_MAX = 256
"""Pieces into which the missing chunks of all groups are divided: the reads of a tier in one piece are one read.

A piece has as many chunks in every group, so there may be one more per group. A cut is made where such a read starts.
So of more chunks than this, a cut is at most one piece from the best one.
"""

LOOKED_UP_MAX = 1024
"""Chunks of a group that are looked up in pieces of several tiers. Of more than these, each counts as some."""


class Search(Protocol):
    """Search for the hit of a request."""

    def __call__(self, tokens_max: int, without: frozenset[str] = frozenset()) -> Hit:
        """Longest hit that ends at token ``tokens_max`` or before, as if the tiers ``without`` had nothing."""


class LoadOrRecompute:
    """Chooses the part of a hit to load, and remembers which tiers are left out."""

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
        self._token_bytes = sum(group.payload_bytes / group.chunk_tokens for group in geometry.groups)
        # A window has the same few chunks, however many tokens they serve.
        self._token_keys = sum([1 / group.chunk_tokens for group in geometry.groups if group.window_chunks is None])
        self._left_out: set[int] = set()

    def context_for_reading(self, ctx: RequestContext) -> RequestContext:
        """Context of a request that may not load from tiers which are slower than computing."""
        rate = self._prefill.tokens_per_s
        if rate is None or not self._limits.weighs_recompute:
            return ctx
        bytes_per_s = rate * self._token_bytes
        slow = {index for index, cost in self._costs().items() if cost.s_per_byte * bytes_per_s > 1} | self._left_out
        names = frozenset(tier.name for tier in self._manager.tiers if tier.index in slow)
        return self._manager.read_costs.context_without(ctx, names) if names else ctx

    def slow_tiers(self) -> frozenset[int]:
        """Numbers of the tiers that take longer for a token than computing it; none while the rate is unknown.

        For engines that decide themselves what they load: there no hit is weighed as a whole. None with windows, whose
        few chunks serve many tokens.
        """
        if not self._limits.weighs_recompute or not self._prefill.is_known or self._geometry.has_windows:
            return frozenset()
        self._costs()  # notes which are
        is_slow = self._manager.read_costs.is_slow
        return frozenset(tier.index for tier in self._manager.tiers if is_slow(tier.index))

    @property
    def _version(self) -> int:
        """Number of times that a speed became known, or quite another one."""
        return self._manager.step.speed_changes + self._prefill.is_known

    def is_outdated(self, record: RequestRecord) -> bool:
        """Whether reads were chosen for a request before a speed became known, or became quite another one."""
        return record.lookup.found_below and self.has_changed(record)

    def has_changed(self, record: RequestRecord) -> bool:
        """Whether a speed became known, or became quite another one, since the latest choice for a request."""
        weighs = self._limits.weighs_recompute and self._prefill.is_known
        return weighs and record.lookup.choice_version != self._version

    def end_of_load(self, record: RequestRecord, first: int, start: int, end: int) -> int:
        """Token up to which it still pays to load a request, whose load is under way.

        Args:
            record: the request.
            first: token from which it is loaded.
            start: token of the first chunk that is not sent yet.
            end: token behind the last one.
        """
        record.lookup.choice_version = self._version
        rate = self._prefill.tokens_per_s
        if rate is None:
            return end
        reads, costs, load_tokens = self._weigh(record, start, end - start, rate)
        if not self._geometry.has_windows:
            return start + load_tokens
        # A window serves one end only, so what was loaded before a cut is computed too.
        return end if reading_s(reads, costs) <= (end - first) / rate else first

    def _weigh(
        self, record: RequestRecord, computed_tokens: int, tokens: int, rate: float
    ) -> tuple[list[PendingRead], dict[int, ReadCost], int]:
        """Reads that ``tokens`` behind the computed ones need, what they cost, and how many of the tokens to load."""
        reads = self._pending_reads(record, computed_tokens, tokens)
        chunks = sum(read.num_chunks for read in reads)
        costs = self._costs(self._prefill.expected_for_others(record) / rate, chunks)
        return reads, costs, best_load_tokens(reads, computed_tokens, tokens, rate, costs)

    def choose_hit(self, record: RequestRecord, computed_tokens: int, search: Search) -> Hit:
        """Hit of the search, shortened to the part to load.

        Args:
            record: the request.
            computed_tokens: C.
            search: searches for the request's hit.
        """
        record.lookup.choice_version = self._version
        if self._limits.weighs_recompute and not self._manager.tiers.all_indexed:
            self._costs()  # decides which shared tiers the search asks
        hit = search(record.hit_end_max)
        if hit.deferred:
            return hit
        shorter = hit
        if self._limits.weighs_recompute and record.lookup.found_below:  # otherwise nothing would be read
            shorter = self._shorten(record, computed_tokens, hit, search)
            if shorter.deferred:
                return shorter
        if shorter.tokens < self._limits.load_tokens_min:
            shorter = NO_HIT
        if shorter.tokens < hit.tokens and record.lookup.shortened_question != record.lookup.question:
            record.lookup.shortened_question = record.lookup.question
            record.stats.shortened_tokens += hit.tokens - shorter.tokens
            self._counters.hits_shortened += 1
            self._counters.tokens_shortened += hit.tokens - shorter.tokens
        if self._limits.weighs_recompute:
            self._prefill.expect(record, max(0, record.request.num_tokens - computed_tokens - shorter.tokens))
        return shorter

    def _shorten(self, record: RequestRecord, computed_tokens: int, hit: Hit, search: Search) -> Hit:
        rate = self._prefill.tokens_per_s
        if rate is None or not hit.tokens:
            return hit
        reads, costs, load_tokens = self._weigh(record, computed_tokens, hit.tokens, rate)
        if not costs:
            return hit
        best, best_reads = hit, reads
        if load_tokens < hit.tokens:
            best, best_s = NO_HIT, hit.tokens / rate
            best_reads = []
            for other in (hit, *self._shorter_hits(record, computed_tokens, reads, load_tokens, search)):
                if other.deferred:
                    return other  # not known yet; the answer must not depend on when it is given
                own = reads if other is hit else self._pending_reads(record, computed_tokens, other.tokens)
                total_s = reading_s(own, costs) + (hit.tokens - other.tokens) / rate
                if total_s < best_s or (total_s == best_s and other.tokens > best.tokens):
                    best, best_s, best_reads = other, total_s, own
        self._note_choice(record, reads, best_reads, computed_tokens + best.tokens)
        return best

    def _shorter_hits(
        self, record: RequestRecord, computed_tokens: int, reads: list[PendingRead], load_tokens: int, search: Search
    ) -> Iterator[Hit]:
        """Hits shorter than the whole one that may be cheaper.

        With full attention only, the chunks of a shorter hit are a subset of those of a longer one: the best cut of the
        reads is optimal. A window needs other chunks, perhaps slow ones, at each end. There the search is repeated as
        if the tiers of the whole hit had nothing, adding one tier after the other.
        """
        if load_tokens:
            yield search(computed_tokens + load_tokens)
        if self._geometry.has_windows:
            tiers = list(dict.fromkeys(read.tier for read in reversed(reads)))
            for count in range(1, len(tiers) + 1):
                avoided = frozenset(self._manager.tiers[tier].name for tier in tiers[:count])
                yield search(record.hit_end_max, avoided)

    def _costs(self, busy_s: float = 0.0, chunks: int = 0) -> dict[int, ReadCost]:
        """Cost of reads per tier, biased by ``BENEFIT`` towards the previous choice. Counts tiers that became slow.

        busy_s: seconds for which the engine computes for others first, while reads proceed; chunks: to be read.
        """
        costs: dict[int, ReadCost] = {}
        for tier, expected in self._manager.read_costs.expected(chunks).items():
            self._note_speed(tier, expected)
            if expected is not None:
                factor = BENEFIT if tier in self._left_out else 1 / BENEFIT
                start_s = expected.latency_s + max(0.0, expected.queue_s / QUEUE_PATIENCE - busy_s)
                costs[tier] = ReadCost(start_s * factor, expected.s_per_byte * factor)
        return costs

    def _note_speed(self, tier: int, reads: ReadTimes | None) -> None:
        """Count a tier that became slower than computing, or faster again. No request waits for a slow one's answers.

        A shared tier is slow as well if it answers questions that slowly. Questions and reads are not added up: where
        both share the calls of a tier, the time of each has a part of the other's. reads: None: unknown.
        """
        probe_s = self._manager.read_costs.probe_s(tier) or 0.0
        read_s = 0.0 if reads is None else reads.s_per_byte
        token_s = max(probe_s * self._token_keys, read_s * self._token_bytes)
        computed = token_s * (self._prefill.tokens_per_s or 0.0)  # tokens computed in that time
        is_slow, name = self._manager.read_costs.is_slow(tier), self._manager.tiers[tier].name
        if computed > BENEFIT and not is_slow:
            self._counters.slowdowns[name] += 1
        elif computed < 1 / BENEFIT and is_slow:
            self._counters.recoveries[name] += 1
        else:
            return
        self._manager.read_costs.note_slow(tier, is_slow=not is_slow)

    def _pending_reads(self, record: RequestRecord, computed_tokens: int, tokens: int) -> list[PendingRead]:
        """Reads from lower tiers that a hit needs, in the order of their start: at most one per tier and piece."""
        lacking: list[range] = []
        for group in record.search_groups:
            needs = group.needs(computed_tokens, computed_tokens + tokens)
            resident = self._manager.resident_prefix(group.keys, needs.start, needs.stop) if needs else 0
            lacking.append(needs[resident:])
        step = max(1, cdiv(sum(map(len, lacking)), PIECES_MAX))
        reads: list[PendingRead] = []
        groups = zip(self._geometry.lookup_order, record.search_groups, lacking, strict=True)
        for index, group, missing in groups:
            num_bytes = self._geometry.groups[index].payload_bytes
            keys = group.keys[missing.start : missing.stop]
            for i, tier, count in self._pieces(keys, step, record.ctx):
                start = (missing.start + i) * group.chunk_tokens
                reads.append(PendingRead(start, tier, count * num_bytes, keys[i], count))
        reads.sort(key=lambda read: read.start)
        return reads

    def _pieces(self, keys: Sequence[Key], step: int, ctx: RequestContext) -> Iterator[tuple[int, int, int]]:
        """Index of the first chunk, tier and number of chunks of each read, of pieces of ``step`` chunks.

        A piece that begins in the same tier as the next one is taken to be in that tier as a whole. The chunks of the
        others are looked up: all, or some that count for those behind them too.
        """
        sources_of = self._manager.read_costs.sources_of
        begins = sources_of([*keys[::step], *keys[-1:]], ctx)
        stop, changes = len(keys), sum([begin != end for begin, end in pairwise(begins)])
        apart = max(1, cdiv(step * changes, LOOKED_UP_MAX))
        pieces = [
            (begin, range(first, min(first + step, stop), apart if begin != end else step))
            for first, (begin, end) in zip(range(0, stop, step), pairwise(begins), strict=True)
        ]
        found = iter(sources_of([keys[i] for _, piece in pieces if len(piece) > 1 for i in piece], ctx))
        for begin, piece in pieces:
            if len(piece) == 1:
                places = {begin: [piece.start]}
            else:
                places = dict[int | None, list[int]]()
                for i in piece:
                    places.setdefault(next(found), []).append(i)
            for tier, some in places.items():
                if tier is not None:
                    yield some[0], tier, sum([min(piece.step, piece.stop - i) for i in some])

    def _note_choice(self, record: RequestRecord, whole: list[PendingRead], used: list[PendingRead], end: int) -> None:
        """Note which tiers are used and which is left out; have that one measured again at times."""
        in_use = {read.tier for read in used}
        self._left_out -= in_use
        cut = next((read for read in whole if read.start >= end and read.tier not in in_use), None)
        if cut is not None:
            self._left_out.add(cut.tier)
            self._manager.read_costs.remeasure(cut.tier, cut.key, record.ctx)
