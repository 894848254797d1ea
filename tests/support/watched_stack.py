"""Stack whose figures a test sets, for tests of exporters."""

from __future__ import annotations

from tierkv.metrics.counters import CoreCounters
from tierkv.metrics.definitions import READ_SECONDS, WAIT_BUCKETS
from tierkv.metrics.histogram import Histogram
from tierkv.metrics.stack_stats import Series
from tierkv.metrics.watched import TierCondition, TierContent, TierLoad, WaitingRequests


class WatchedTiers:
    """Figures of a stack's tiers, set by a test."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[str, int]] = {"disk": {"bytes_read": 0, "corrupt": 0}}
        self.measured: dict[str, dict[str, float]] = {}
        self.conditions: dict[str, TierCondition] = {}
        self.rooms: dict[str, int] = {}
        self.loads: dict[str, TierLoad] = {}
        self.contents: dict[str, TierContent] = {}

    def stats(self) -> dict[str, dict[str, int]]:
        """Return a copy of the counters per tier."""
        return {tier: dict(stats) for tier, stats in self.counts.items()}

    def speeds(self) -> dict[str, dict[str, float]]:
        """Return the measured speeds per tier."""
        return self.measured

    def health(self) -> dict[str, TierCondition]:
        """Return the health per tier."""
        return self.conditions

    def load(self) -> dict[str, TierLoad]:
        """Return the operations per tier."""
        return self.loads

    def content(self) -> dict[str, TierContent]:
        """Return the chunks per tier."""
        return self.contents

    def room(self) -> dict[str, int]:
        """Return the room per tier."""
        return self.rooms


class WatchedMetrics:
    """Measurements of a stack, set by a test."""

    def __init__(self) -> None:
        self.counters = CoreCounters()
        self.prefill_tokens_per_s: float | None = None
        self.reads = Histogram(WAIT_BUCKETS)
        self.more: list[Series] = []
        self.wait = WaitingRequests()

    def waiting(self) -> WaitingRequests:
        """Return the requests that wait."""
        return self.wait

    def series(self) -> list[Series]:
        """Return the reads of the disk, and what the test adds."""
        return [Series(READ_SECONDS, ("disk",), self.reads), *self.more]


class WatchedStack:
    """Stack whose figures a test sets."""

    def __init__(self) -> None:
        self.tiers = WatchedTiers()
        self.metrics = WatchedMetrics()
