"""Counters of scheduler and manager, as plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from tierkv.metrics.definitions import OF_EVERY_TIER, OF_LOWER_TIERS
from tierkv.types.cache_events import HOST


@dataclass(slots=True)
class CoreCounters:
    """Counters of scheduler and manager. They only grow. Engine's thread writes them; any thread may read them.

    :data:`tierkv.metrics.definitions.COUNTERS` holds the meaning of each field. A field that is a ``Counter`` counts by
    tier name.
    """

    lookups: int = 0
    deferrals: int = 0
    deadlines_expired: int = 0
    tokens_loaded: Counter[str] = field(default_factory=Counter)
    chunks_hit: Counter[str] = field(default_factory=Counter)
    chunks_stored: int = 0
    chunks_loaded: int = 0
    stores_refused: int = 0
    stores_failed: int = 0
    chunks_not_stored: int = 0
    loads_failed: int = 0
    admissions_refused: Counter[str] = field(default_factory=Counter)
    promotions: Counter[str] = field(default_factory=Counter)
    chunks_read_ahead: int = 0
    chunks_read_in_vain: int = 0
    cascades: Counter[str] = field(default_factory=Counter)
    cascades_dropped: Counter[str] = field(default_factory=Counter)
    writes_skipped: Counter[str] = field(default_factory=Counter)
    demotions: Counter[str] = field(default_factory=Counter)
    demotions_dropped: Counter[str] = field(default_factory=Counter)
    chunks_corrupt: Counter[str] = field(default_factory=Counter)
    evictions: Counter[str] = field(default_factory=Counter)
    reads_failed: Counter[str] = field(default_factory=Counter)
    reads_absent: Counter[str] = field(default_factory=Counter)
    writes_failed: Counter[str] = field(default_factory=Counter)
    events_dropped: int = 0
    events_undescribed: int = 0
    payloads_forgotten: int = 0
    tokens_not_kept: int = 0
    probes: Counter[str] = field(default_factory=Counter)
    hints_ignored: int = 0
    requests_dropped: int = 0
    errors_contained: int = 0
    tokens_asked: int = 0
    tokens_local: int = 0
    tokens_computed: int = 0
    tokens_stored: int = 0
    deferred_tier_ms: int = 0
    deferred_queue_ms: int = 0
    hits_shortened: int = 0
    tokens_shortened: int = 0
    slowdowns: Counter[str] = field(default_factory=Counter)
    recoveries: Counter[str] = field(default_factory=Counter)
    policies_failed: Counter[str] = field(default_factory=Counter)
    observations_failed: Counter[str] = field(default_factory=Counter)
    entries_dropped: int = 0
    loads_streamed: int = 0
    loads_given_up: int = 0
    tokens_given_up: int = 0

    @property
    def lost_below(self) -> int:
        """Chunks that were not written to a tier that should have them, summed over all tiers."""
        ways = self.cascades_dropped, self.demotions_dropped, self.writes_failed
        return sum(sum(way.values()) for way in ways)

    def as_dict(self) -> dict[str, int | dict[str, int]]:
        """Return a copy as plain JSON values. Any thread: each field is copied at once."""
        values = zip(self.__slots__, _all_fields(self), strict=True)
        return {name: dict(value) if type(value) is Counter else value for name, value in values}

    def exported(self, lower_tiers: Iterable[str]) -> dict[str, int | dict[str, int]]:
        """Return a copy in which each tier has a value, zero included. Any thread.

        A series that appears with its first increment hides this increment from every rate over it.
        """
        values, zeros = self.as_dict(), dict.fromkeys(lower_tiers, 0)
        for name in OF_LOWER_TIERS:
            values[name] = zeros | values[name]  # type: ignore[operator]  # counts by tier
        for name in OF_EVERY_TIER:
            values[name] = {HOST: 0} | zeros | values[name]  # type: ignore[operator]  # (the same)
        return values


_all_fields = attrgetter(*CoreCounters.__slots__)
