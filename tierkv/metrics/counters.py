"""Counters of scheduler and manager, as plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from operator import attrgetter

from tierkv.types.cache_events import HOST

HOST_TOO = {HOST: True}
"""Metadata of a counter by tier that counts the host tier as well; others count the tiers below it."""


@dataclass(slots=True)
class CoreCounters:
    """Counters of scheduler and manager. They only grow. Engine's thread writes them; any thread may read them.

    :data:`tierkv.metrics.definitions.COUNTERS` holds the meaning of each field. A field that is a ``Counter`` counts by
    tier name: of the tiers below the host tier, and with :data:`HOST_TOO` of the host tier as well.
    """

    lookups: int = 0
    deferrals: int = 0
    deadlines_expired: int = 0
    tokens_loaded: Counter[str] = field(default_factory=Counter, metadata=HOST_TOO)
    chunks_hit: Counter[str] = field(default_factory=Counter, metadata=HOST_TOO)
    chunks_stored: int = 0
    chunks_loaded: int = 0
    stores_refused: int = 0
    stores_failed: int = 0
    chunks_not_stored: int = 0
    loads_failed: int = 0
    admissions_refused: Counter[str] = field(default_factory=Counter, metadata=HOST_TOO)
    promotions: Counter[str] = field(default_factory=Counter)
    chunks_read_ahead: int = 0
    chunks_read_in_vain: int = 0
    cascades: Counter[str] = field(default_factory=Counter)
    cascades_dropped: Counter[str] = field(default_factory=Counter)
    writes_skipped: Counter[str] = field(default_factory=Counter)
    demotions: Counter[str] = field(default_factory=Counter)
    demotions_dropped: Counter[str] = field(default_factory=Counter)
    chunks_corrupt: Counter[str] = field(default_factory=Counter, metadata=HOST_TOO)
    evictions: Counter[str] = field(default_factory=Counter, metadata=HOST_TOO)
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
    policies_failed: Counter[str] = field(default_factory=Counter, metadata=HOST_TOO)
    observations_failed: Counter[str] = field(default_factory=Counter, metadata=HOST_TOO)
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
        for name, counts_host in BY_TIER.items():
            first = {HOST: 0} | zeros if counts_host else zeros
            values[name] = first | values[name]  # type: ignore[operator]  # counts by tier
        return values


_all_fields = attrgetter(*CoreCounters.__slots__)

BY_TIER = {each.name: HOST in each.metadata for each in fields(CoreCounters) if each.default_factory is Counter}
"""Counters by tier -> whether they count the host tier as well."""
