"""What goes down: which chunks of the host tier are written to the tiers below, and when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tierkv.manager.admissions import Admissions
from tierkv.manager.chunk import Filled
from tierkv.manager.chunk_sizes import ChunkSizes
from tierkv.manager.chunk_state import ChunkState
from tierkv.manager.host_index import HostIndex
from tierkv.manager.lower_tier import LowerTier
from tierkv.metrics.counters import CoreCounters
from tierkv.types.keys import Key

CASCADES_PER_STEP_MAX = 512
"""Waiting chunks looked at per tier and step, whether written or dropped: a step stays short after a long outage."""


class Cascades:
    """Chooses; :class:`~tierkv.manager.tier_traffic.TierTraffic` makes instructions of it. Sans-IO."""

    def __init__(
        self,
        host: HostIndex,
        tiers: Iterable[LowerTier],
        sizes: ChunkSizes,
        admissions: Admissions,
        counters: CoreCounters,
    ) -> None:
        self.sizes = sizes
        self._host = host
        self._tiers = tiers
        self._admissions = admissions
        self._terms = admissions.terms
        self._counters = counters

    def became_ready(self, filled: Filled, now: float) -> None:
        """Chunks are readable in the host tier: every tier that wants and may have them gets them."""
        routes = self._admissions.take_routes(filled.slots)
        for tier in self._tiers:
            if tier.limits.writes and filled.keys:
                self._cascade(tier, filled, routes, now)

    def _may_have(self, tier: LowerTier, key: Key, route: frozenset[str] | None) -> bool:
        if route is not None and tier.name not in route:
            return False
        # Of a chunk with an end no other process would know when.
        return not (tier.capabilities.shared and self._terms.ends(key))

    def _cascade(
        self, tier: LowerTier, filled: Filled, routes: Mapping[int, frozenset[str] | None], now: float
    ) -> None:
        wanted = [(slot, key) for slot, key in zip(*filled, strict=True) if tier.wants(key, now)]
        if routes or self._terms.any:
            wanted = [(slot, key) for slot, key in wanted if self._may_have(tier, key, routes.get(slot))]
        if not wanted:
            return
        keys = [key for _, key in wanted]
        if refused := tier.refused(keys, self.sizes.frame_bound(keys[0])):
            wanted = [pair for i, pair in enumerate(wanted) if i not in refused]
            self._counters.admissions_refused[tier.name] += len(keys) - len(wanted)
        generation = self._host.generation
        tier.cascades.extend((slot, generation(slot)) for slot, _ in wanted)
        # Nobody holds what only waits, so the queue itself needs a bound while a tier does not keep up.
        over = len(tier.cascades) - self._host.num_slots if tier.usable else len(wanted)
        if over > 0:
            tier.cascades.drop_front(over)
            self._counters.cascades_dropped[tier.name] += over

    def writable(self, tier: LowerTier, now: float) -> list[int]:
        """Take from the front of the cascade queue what the tier can take now, and start to make room for the rest.

        Waiting chunks are not held: a store that needs their slots wins, and they are dropped and counted. Only what is
        being written is held, under the tier's bound.
        """
        batch: list[int] = []
        host = self._host
        for _ in range(min(len(tier.cascades), CASCADES_PER_STEP_MAX)):
            if tier.num_writing >= tier.queue_chunks_max:
                break
            slot, generation = tier.cascades.front()
            key = host.key(slot)
            if not tier.usable or host.generation(slot) != generation or host.state(slot) is not ChunkState.READY:
                self._counters.cascades_dropped[tier.name] += 1
            elif tier.wants(key, now):
                size = self.sizes.frame_bound(key)
                if not self._has_room(tier, size):
                    if tier.may_get_room(size):
                        break
                    self._counters.cascades_dropped[tier.name] += 1
                else:
                    tier.begin_write(key, size)
                    batch.append(slot)
            tier.cascades.drop_front()
        host.hold(batch)
        return batch

    def _has_room(self, tier: LowerTier, size: int) -> bool:
        self.evict(tier, tier.victims(size, len(tier.cascades)))
        return tier.has_room(size)

    def evict(self, tier: LowerTier, victims: Sequence[Key]) -> None:
        """A tier's policy has chosen: they are to be deleted there."""
        if victims:
            self._counters.evictions[tier.name] += len(victims)
            tier.deletions.extend(victims)
