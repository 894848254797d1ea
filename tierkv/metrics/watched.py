"""Interface of a stack that exporters read: :class:`tierkv.Stack` and :class:`tierkv.StagedStack` have it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from tierkv.metrics.counters import CoreCounters
from tierkv.metrics.stack_stats import Series


class TierCondition(NamedTuple):
    """Health of one lower tier."""

    usable: bool
    """Whether the tier is in service."""
    writable: bool
    """Whether it is, and its last writes did not all fail."""


class WatchedTiers(Protocol):
    """The part of ``stack.tiers`` that exporters read."""

    def stats(self) -> Mapping[str, Mapping[str, int]]:
        """Return the counters of dispatch, per lower tier."""

    def speeds(self) -> Mapping[str, Mapping[str, float]]:
        """Return measured latency and bandwidth, per lower tier."""

    def health(self) -> Mapping[str, TierCondition]:
        """Return whether each lower tier is in service and can be written."""

    def room(self) -> Mapping[str, int]:
        """Return the bytes that each lower tier may hold, where there is a bound."""


class WatchedMetrics(Protocol):
    """The part of ``stack.metrics`` that exporters read."""

    counters: CoreCounters
    """Counters of scheduler and manager."""

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """The engine's prefill rate; None: not known yet."""

    def series(self) -> Iterable[Series]:
        """Return all histograms."""


class Watched(Protocol):
    """The part of a stack that exporters read."""

    @property
    def tiers(self) -> WatchedTiers:
        """The lower tiers."""

    @property
    def metrics(self) -> WatchedMetrics:
        """The measurements."""
