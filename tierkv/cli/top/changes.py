"""Changes of a stack between two samples, in words: the events of ``tierkv top``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tierkv.cli.top.sources import Values

KEPT = 200
"""Changes kept; the oldest are dropped."""
JOINED_S = 30.0
"""Changes of one kind and tier that are no further apart become one line with their number."""

_GROWTH = {
    "tierkv_tier_corrupt_total": "{n} damaged frames refused",
    "tierkv_tier_failed_total": "{n} chunks failed in the backend",
    "tierkv_reads_absent_total": "{n} chunks were gone when they were read",
    "tierkv_tier_timed_out_total": "{n} chunks missed their deadline",
    "tierkv_tier_no_space_total": "no space for {n} chunks",
    "tierkv_cascades_dropped_total": "{n} chunks not written: queue full, or out of service",
    "tierkv_demotions_dropped_total": "{n} chunks evicted before they were written",
    "tierkv_policies_failed_total": "eviction policy failed",
    "tierkv_stores_refused_total": "host tier had no room for {n} batches of stores",
    "tierkv_deadlines_expired_total": "{n} lookups answered before their tier delivered",
    "tierkv_loads_failed_total": "{n} chunks could not be loaded to the GPU",
    "tierkv_requests_dropped_total": "{n} requests went on without tierkv",
    "tierkv_errors_contained_total": "{n} errors of tierkv were kept from the engine",
}
_LEVELS = {
    "tierkv_tier_usable": ("OUT of service", "in service again"),
    "tierkv_tier_writable": ("cannot be written", "can be written again"),
    "tierkv_tier_slow": ("faster than computing again", "slower than computing: its hits are shortened"),
}


@dataclass(frozen=True, slots=True)
class Change:
    """One change, or several of one kind in a row."""

    first_s: float
    """Time of the first one."""
    last_s: float
    """Time of the latest one."""
    labels: str
    """Labels of the stack."""
    tier: str
    """Tier; empty if it concerns all."""
    kind: str
    """Text with a place for the number."""
    count: int = 1
    """Number of chunks, or of others that the text names."""

    @property
    def text(self) -> str:
        """Sentence without time and tier."""
        return self.kind.format(n=self.count)


class Changes:
    """The latest changes of all stacks of a source."""

    def __init__(self) -> None:
        self._kept: deque[Change] = deque(maxlen=KEPT)

    def note(self, change: Change) -> None:
        """Add a change. A number of a kind that was noted a moment ago is added to that one."""
        for i in range(len(self._kept) - 1, -1, -1):
            old = self._kept[i]
            if change.first_s - old.last_s > JOINED_S:
                break
            if "{n}" in change.kind and (old.labels, old.tier, old.kind) == (change.labels, change.tier, change.kind):
                del self._kept[i]
                change = replace(change, first_s=old.first_s, count=old.count + change.count)
                break
        self._kept.append(change)

    def note_all(self, at_s: float, labels: str, before: Values, now: Values) -> None:
        """Add everything that has changed between two samples."""
        for tier, kind, count in _changes(before, now):
            self.note(Change(at_s, at_s, labels, tier, kind, count))

    def latest(self, count: int) -> list[Change]:
        """Return up to ``count`` changes, the latest first."""
        return list(self._kept)[: -count - 1 : -1]


def _changes(before: Values, now: Values) -> Iterator[tuple[str, str, int]]:
    for name, (fell, rose) in _LEVELS.items():
        for tier, value in now.get(name, {}).items():
            old = before.get(name, {}).get(tier)
            if old is not None and old != value:
                if name == "tierkv_tier_writable" and now.get("tierkv_tier_usable", {}).get(tier) == 0:
                    continue  # it is out of service, which is said already
                yield tier, (rose if value else fell), 1
    tiers, earlier = now.get("tierkv_tier_usable", {}), before.get("tierkv_tier_usable", {})
    yield from ((tier, "attached", 1) for tier in tiers if tier not in earlier)
    yield from ((tier, "detached", 1) for tier in earlier if tier not in tiers)
    for name, kind in _GROWTH.items():
        for tier, value in now.get(name, {}).items():
            grown = int(value - before.get(name, {}).get(tier, 0.0))
            if grown > 0:
                yield tier, kind, grown
