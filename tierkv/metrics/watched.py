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
    slow: bool = False
    """Whether it takes longer than computing what it brings: its hits are shortened."""


class TierLoad(NamedTuple):
    """Operations of one lower tier at one moment."""

    queued_ops: int
    """Operations that wait for a call to the backend."""
    queue_age_s: float
    """Seconds for which the oldest of them has waited."""
    running_ops: int
    """Operations that are in a call."""
    late_ops: int
    """Operations among them whose deadline has passed: the call may never return."""
    breaker: int
    """State of the breaker: 0 closed, 1 half open (a trial is under way), 2 open."""


class TierContent(NamedTuple):
    """Chunks of one tier at one moment."""

    chunks: int | None
    """Chunks that it holds; None for a tier without an index of its own."""
    held_bytes: int | None
    """Their bytes; None for such a tier."""
    capacity_bytes: int | None
    """Its configured capacity; None if it has none."""
    waiting_chunks: int | None
    """Chunks of the host tier that wait to be written to it; None for the host tier."""


class WaitingRequests(NamedTuple):
    """Requests with chunks in a tier that are not read yet, at one moment."""

    slots: int = 0
    """Requests that wait for slots of the host tier."""
    first_reads: int = 0
    """Requests that wait for the first reads from a tier of unknown speed, or behind one that does."""
    age_s: float = 0.0
    """Seconds for which the oldest of them has got no chunk."""


class WatchedTiers(Protocol):
    """The part of ``stack.tiers`` that exporters read."""

    def stats(self) -> Mapping[str, Mapping[str, int]]:
        """Return the counters of dispatch, per lower tier."""

    def speeds(self) -> Mapping[str, Mapping[str, float]]:
        """Return measured latency and bandwidth, per lower tier."""

    def health(self) -> Mapping[str, TierCondition]:
        """Return whether each lower tier is in service and can be written."""

    def load(self) -> Mapping[str, TierLoad]:
        """Return the operations of each lower tier that wait and run."""

    def content(self) -> Mapping[str, TierContent]:
        """Return the chunks of each tier, the host tier first."""

    def room(self) -> Mapping[str, int]:
        """Return the bytes that each lower tier may hold, where there is a bound."""


class WatchedMetrics(Protocol):
    """The part of ``stack.metrics`` that exporters read."""

    counters: CoreCounters
    """Counters of scheduler and manager."""

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """The engine's prefill rate; None: not known yet."""

    def waiting(self) -> WaitingRequests:
        """Return the requests that wait to be read."""

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
