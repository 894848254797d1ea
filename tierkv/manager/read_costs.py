"""Costs of reads from lower tiers: which tier a chunk would be read from, and how fast that tier is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tierkv.manager.contract import RequestContext
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.read_speed import ReadTimes
from tierkv.manager.lower.tier_list import TierList
from tierkv.manager.moves.tier_io import TierIO
from tierkv.manager.step_state import StepState
from tierkv.types.cache_events import HOST
from tierkv.types.keys import Key


class ReadCosts:
    """Answers what reads and questions cost. Only :meth:`note_slow` and :meth:`remeasure` change anything. Sans-IO."""

    def __init__(self, step: StepState, host: HostTier, tiers: TierList, tier_io: TierIO) -> None:
        self._step = step
        self._host = host
        self._tiers = tiers
        self._tier_io = tier_io

    def expected(self, chunks: int = 0) -> dict[int, ReadTimes | None]:
        """Expected times of a read, by number of a lower tier; None until measured.

        chunks: that the request needs from lower tiers.
        """
        return {tier.index: self._tier_io.reads[tier.index].speed.expected(chunks) for tier in self._tiers}

    def probe_s(self, tier: int) -> float | None:
        """Seconds per chunk of a long question to a tier; None until measured, or if it need not be asked.

        tier: its number.
        """
        return None if self._tiers[tier].capabilities.authoritative_index else self._tiers[tier].probes.s_per_key

    def is_slow(self, tier: int) -> bool:
        """Whether a tier was noted as slower than computing. tier: its number."""
        return self._tiers[tier].probes.is_slow

    def note_slow(self, tier: int, *, is_slow: bool) -> None:
        """Note whether a tier is slower than computing: then no request waits for its answers. tier: its number."""
        probes = self._tiers[tier].probes
        self._step.version += 1  # requests wait for its answers
        if is_slow:
            probes.became_slow()
        else:
            probes.is_slow = False

    def speeds(self) -> dict[str, dict[str, float]]:
        """``latency_s`` and ``bytes_per_s`` of reads by tier, as measured; without tiers that are not measured yet."""
        speeds = {tier.name: self._tier_io.reads[tier.index].speed.as_dict() for tier in self._tiers}
        return {name: speed for name, speed in speeds.items() if speed}

    def source_of(self, key: Key, ctx: RequestContext) -> int | None:
        """Number of the lower tier that a chunk would be, or is being, read from; None if no read is needed."""
        return self.sources_of((key,), ctx)[0]

    def sources_of(self, keys: Sequence[Key], ctx: RequestContext) -> list[int | None]:
        """Numbers as of :meth:`source_of`, for many chunks at once."""
        slots, source = self._host.slots.find_all(keys), self._host.slots.fills.source
        below = [key for key, slot in zip(keys, slots, strict=True) if slot is None]
        tiers = iter(self._tier_io.sources_of(below, ctx.hints.load_tiers, since=ctx.asked_s))
        by_name = {tier.name: tier for tier in self._tiers} if len(below) < len(slots) else {}
        found = [next(tiers) if slot is None else by_name.get(source(slot)) for slot in slots]
        return [None if tier is None else tier.index for tier in found]

    def context_without(self, ctx: RequestContext, tiers: frozenset[str]) -> RequestContext:
        """Context of the same request that may not load from ``tiers``."""
        allowed = ctx.hints.load_tiers
        if allowed is None:
            allowed = frozenset({HOST, *(tier.name for tier in self._tiers)})
        return replace(ctx, hints=replace(ctx.hints, load_tiers=allowed - tiers))

    def remeasure(self, tier: int, key: Key, ctx: RequestContext) -> None:
        """Read one chunk from a tier that is avoided as slow, if it was not measured for a while."""
        if self._host.slots.find(key) is None and self.source_of(key, ctx) == tier:
            self._tier_io.remeasure(tier, key)
