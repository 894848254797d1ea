"""Load or recompute: a hit is answered as far as loading it is expected to be faster than computing it. Sans-IO.

Where both numbers are known, the measured speed of the tiers and the prefill rate; otherwise all of it. Never longer
than the search found, and always one of its own answers.
"""

from __future__ import annotations

from collections.abc import Callable

from tierkv.manager.manager import OffloadManager
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.limits import SchedulerLimits
from tierkv.scheduler.prefill import PrefillRate
from tierkv.scheduler.records import RequestRecord
from tierkv.scheduler.search import NO_HIT, Hit
from tierkv.scheduler.worth import Piece, ReadCost, worth_loading
from tierkv.types.geometry import Geometry

BENEFIT = 1.25
"""A tier in use must be expected to be this much slower than prefill before it is left out, and one that is left out
this much faster before it is used again: or answers would flap between two equal ways."""

ROUNDS_MAX = 4
"""Cuts per answer: a shorter hit of a windowed group needs other chunks, which may be slow in their turn."""


class LoadChoice:
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

    def shorten(self, record: RequestRecord, computed_tokens: int, hit: Hit, find: Callable[[int], Hit]) -> Hit:
        """The part of a hit that shall be loaded.

        Args:
            record: whose hit it is.
            computed_tokens: C.
            hit: what the search found.
            find: the search again, under a cap of C + H.
        """
        shorter = self._cut(record, computed_tokens, hit, find) if self._limits.weighs_recompute else hit
        if not shorter.deferred and shorter.tokens < self._limits.load_tokens_min:
            shorter = NO_HIT
        if shorter.tokens < hit.tokens and not shorter.deferred and record.shortened_about != record.asked_about:
            record.shortened_about = record.asked_about
            record.ledger.shortened_tokens += hit.tokens - shorter.tokens
            self._counters.hits_shortened += 1
            self._counters.tokens_shortened += hit.tokens - shorter.tokens
        return shorter

    def _cut(self, record: RequestRecord, computed_tokens: int, hit: Hit, find: Callable[[int], Hit]) -> Hit:
        rate = self._prefill.tokens_per_s
        costs = self._costs() if rate is not None else {}
        for _ in range(ROUNDS_MAX):
            if rate is None or not costs or not hit.tokens or hit.deferred:
                break
            pieces = self._pieces(record, computed_tokens, hit.tokens)
            if not pieces:
                break
            worth = worth_loading(pieces, computed_tokens, hit.tokens, rate, costs)
            self._learn(record, pieces, computed_tokens + worth)
            if worth >= hit.tokens:
                break
            hit = find(computed_tokens + worth) if worth else NO_HIT
        return hit

    def _costs(self) -> dict[int, ReadCost]:
        """What reads cost, by tier; with the benefit of the doubt for the way that was taken last."""
        costs: dict[int, ReadCost] = {}
        for tier, expected in enumerate(self._manager.read_costs()):
            if expected is not None:
                factor = BENEFIT if tier in self._left_out else 1 / BENEFIT
                costs[tier] = ReadCost(expected[0] * factor, expected[1] * factor)
        return costs

    def _pieces(self, record: RequestRecord, computed_tokens: int, tokens: int) -> list[Piece]:
        """The chunks of a hit that would have to be read, in the order in which they begin."""
        pieces: list[Piece] = []
        for index, group in zip(self._geometry.lookup_order, record.search_groups, strict=True):
            num_bytes = self._geometry.groups[index].payload_bytes
            needs = group.needs(computed_tokens, computed_tokens + tokens)
            resident = self._manager.resident_prefix(group.keys, needs.start, needs.stop) if needs else 0
            for i in needs[resident:]:
                tier = self._manager.would_read(group.keys[i], record.ctx)
                if tier is not None:
                    pieces.append(Piece(i * group.chunk_tokens, tier, num_bytes, group.keys[i]))
        if len(record.search_groups) > 1:
            pieces.sort(key=lambda piece: piece.start)
        return pieces

    def _learn(self, record: RequestRecord, pieces: list[Piece], end: int) -> None:
        """Note which tier is used and which one is left out, and have that one measured again now and then."""
        cut = next((piece for piece in pieces if piece.start >= end), None)
        if cut is not None:
            self._left_out.add(cut.tier)
            self._manager.remeasure(cut.tier, cut.key, record.ctx)
        self._left_out.difference_update({piece.tier for piece in pieces if piece.start < end})
