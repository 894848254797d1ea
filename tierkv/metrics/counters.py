"""What happened so far, as plain numbers. Written on the engine's thread only; read by anybody."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class CoreCounters:
    """Counters of scheduler and manager. They only grow.

    lookups: answers given to the engine, deferrals among them. deferrals: answers "ask me again". deadlines_expired:
    lookups ended by their deadline. tokens_loaded, chunks_hit: by the tier whose bytes were used. stores_refused: store
    batches the host tier had no room for. chunks_not_stored: chunks that were never offered with success before their
    request ended. cascades_dropped: chunks that a lower tier did not get because its queue was
    full or it was unusable, by tier. demotions, demotions_dropped: the same for tiers that are written back to.
    admissions_refused: chunks that a tier's policy did not let in. promotions,
    cascades: chunks read from and written to a tier. chunks_corrupt: frames that failed their check, by tier.
    evictions: by tier. reads_failed, writes_failed: by tier, for any other reason. probes: existence questions, by
    tier. events_dropped: cache events that nobody took in time. events_undescribed: chunks in events without a payload,
    where payloads were asked for. payloads_forgotten: payloads dropped because too many were remembered. loads_failed:
    chunks a worker could not load. hints_ignored: hints of requests that could not be used. tokens_local: found in the
    engine's own cache, once per request. tokens_stored: copied to the host tier. deferred_ms: time that lookups were
    deferred for. policies_failed: policies that raised or chose what was held, and are asked no more, by tier.
    observations_failed: policies that raised on one, by tier. hits_shortened: answers shorter than what was
    there, because the rest was not worth loading; tokens_shortened: the tokens of it. entries_dropped: what the record
    of the stack does not tell. loads_streamed: loads of several jobs, because the hit was longer than what can be
    gathered at once; loads_given_up: those of them that ended early; tokens_given_up: what they did not bring.
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
    cascades: Counter[str] = field(default_factory=Counter)
    cascades_dropped: Counter[str] = field(default_factory=Counter)
    demotions: Counter[str] = field(default_factory=Counter)
    demotions_dropped: Counter[str] = field(default_factory=Counter)
    chunks_corrupt: Counter[str] = field(default_factory=Counter)
    evictions: Counter[str] = field(default_factory=Counter)
    reads_failed: Counter[str] = field(default_factory=Counter)
    writes_failed: Counter[str] = field(default_factory=Counter)
    events_dropped: int = 0
    events_undescribed: int = 0
    payloads_forgotten: int = 0
    probes: Counter[str] = field(default_factory=Counter)
    hints_ignored: int = 0
    tokens_local: int = 0
    tokens_stored: int = 0
    deferred_ms: int = 0
    hits_shortened: int = 0
    tokens_shortened: int = 0
    policies_failed: Counter[str] = field(default_factory=Counter)
    observations_failed: Counter[str] = field(default_factory=Counter)
    entries_dropped: int = 0
    loads_streamed: int = 0
    loads_given_up: int = 0
    tokens_given_up: int = 0

    @property
    def lost_below(self) -> int:
        """Chunks that did not get to a tier below which should have had them, all tiers together."""
        ways = self.cascades_dropped, self.demotions_dropped, self.writes_failed
        return sum(sum(way.values()) for way in ways)

    def as_dict(self) -> dict[str, int | dict[str, int]]:
        """A copy as plain JSON values. Any thread: each field is copied in one go."""
        values = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values}
