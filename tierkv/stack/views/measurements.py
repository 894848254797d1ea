"""Counters and histograms of a stack, for exporters."""

from __future__ import annotations

from collections.abc import Callable

from tierkv.metrics.counters import CoreCounters
from tierkv.metrics.stack_stats import ConnectorStats, Series, StackStats
from tierkv.metrics.watched import WaitingRequests
from tierkv.stack.views.tiers import latest_by_name
from tierkv.stack.wiring import StackWiring


class StackMetrics:
    """Measurements of one stack, as ``stack.metrics``."""

    counters: CoreCounters
    """Counters of scheduler and manager. Any thread may read them."""

    def __init__(self, wiring: StackWiring, stats: StackStats, prefill_rate: Callable[[], float | None]) -> None:
        """Wire the metrics of a stack.

        Args:
            wiring: what it measures.
            stats: delays and transfers as the stack observes them.
            prefill_rate: the engine's prefill rate in tokens per second, or None.
        """
        self.counters = wiring.counters
        self._stats = stats
        self._dispatcher = wiring.dispatcher
        self._changes = wiring.changes
        self._passages = wiring.manager.passages
        self._prefill_rate = prefill_rate

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """The engine's prefill rate, as its description says or as measured; None: not known yet.

        Always None in a stack of an engine that schedules itself: it reports no computed tokens.
        """
        return self._prefill_rate()

    def waiting(self) -> WaitingRequests:
        """Requests with chunks in a tier that are not read yet, by reason, and the age of the oldest. Any thread."""
        return self._passages.waiting()

    def series(self) -> list[Series]:
        """Histograms: delays of lookups, transfers, reads and writes per tier. Any thread."""
        found = self._stats.series()
        for state in latest_by_name(self._changes, self._dispatcher.states()).values():
            found += state.series
        return found

    def take_samples(self) -> ConnectorStats | None:
        """Samples since the last call, for an engine that exports or logs them itself; None if there are none.

        Engine's scheduler thread.
        """
        return self._stats.take(self.counters.stores_refused)
