"""Bounds and bookkeeping of one tier in the dispatcher.

:class:`TierLimits` is what the configuration sets. :class:`TierState` is one tier's record while the dispatcher serves
it: its lane, its breaker, its counters, and how far a detach has come.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tierkv.dispatch.breaker import Breaker
from tierkv.dispatch.lane import Lane
from tierkv.dispatch.spawn import Handle
from tierkv.dispatch.stats import TierStats, io_histograms
from tierkv.dispatch.ticket import Ticket
from tierkv.metrics.histogram import Histogram
from tierkv.types.tier_ops import Verb


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Bounds of one tier (promise 6).

    Raises:
        ValueError: a bound is out of range.
    """

    queue_ops_max: int = 4096
    """Operations that may be queued; further ones are refused."""
    io_threads: int | None = None
    """Concurrent calls to the backend. None: the backend's preference, which is also the upper limit."""
    breaker_failures: int = 5
    """Consecutive failed operations that open the breaker."""
    breaker_cooldown_s: float = 5.0
    """Seconds from the opening of the breaker to the first trial."""
    trial_deadline_s: float = 2.0
    """Seconds within which a trial must be answered."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        threads = 1 if self.io_threads is None else self.io_threads
        if min(self.queue_ops_max, threads, self.breaker_failures) < 1:
            raise ValueError(f"queue_ops_max, io_threads and breaker_failures must be 1 or more: {self}")
        if self.breaker_cooldown_s < 0 or self.trial_deadline_s <= 0:
            raise ValueError(f"breaker_cooldown_s must be 0 or more, trial_deadline_s more than 0: {self}")

    def concurrency(self, preferred: int) -> int:
        """Return the number of concurrent calls for a backend that prefers ``preferred``."""
        return preferred if self.io_threads is None else min(preferred, self.io_threads)


@dataclass(slots=True)
class TierState:
    """Record of one tier that the dispatcher serves. Engine's thread."""

    index: int
    """Number of the tier; never reused within a stack."""
    lane: Lane
    """Path of its operations to the backend."""
    limits: TierLimits
    """Its bounds."""
    breaker: Breaker
    """Refuses operations while the tier is unusable."""
    stats: TierStats
    """Its counters."""
    seconds: dict[Verb, Histogram] = field(default_factory=io_histograms)
    """Duration of reads and writes, from submission to the end of the I/O."""
    in_flight: int = 0
    """Operations whose I/O has not ended, trials included."""
    writes_in_flight: int = 0
    """Writes among them."""
    detach_by_s: float | None = None
    """Time at which a detached tier's backend is closed at the latest. None: the tier is attached."""
    not_started: list[Ticket] = field(default_factory=list)
    """Operations that were in flight at the detach and may still be refused."""
    close_began: bool = False
    """Whether the close of the backend has begun."""
    scan: Handle | None = None
    """Thread of a scan that missed its bound and may still run."""

    @property
    def is_busy(self) -> bool:
        """Whether a call to the backend may still run."""
        return bool(self.lane.running_calls()) or (self.scan is not None and self.scan.is_alive())

    @property
    def has_detached(self) -> bool:
        """Whether all operations, all calls and the close of the backend have ended."""
        return self.close_began and not (self.in_flight or self.is_busy or self.lane.is_closing())
