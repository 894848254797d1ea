"""What bounds the I/O of one tier."""

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

    queue_ops_max: operations that may wait; more are refused.
    io_threads: calls to the backend at once; None: what it prefers, which is also the most.
    breaker_failures: operations that must fail in a row until the tier is left alone.
    breaker_cooldown_s: seconds until it is tried again.
    trial_deadline_s: seconds within which that trial must be answered.
    """

    queue_ops_max: int = 4096
    io_threads: int | None = None
    breaker_failures: int = 5
    breaker_cooldown_s: float = 5.0
    trial_deadline_s: float = 2.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        threads = 1 if self.io_threads is None else self.io_threads
        if min(self.queue_ops_max, threads, self.breaker_failures) < 1:
            raise ValueError(f"queue_ops_max, io_threads and breaker_failures must be 1 or more: {self}")
        if self.breaker_cooldown_s < 0 or self.trial_deadline_s <= 0:
            raise ValueError(f"breaker_cooldown_s must be 0 or more, trial_deadline_s more than 0: {self}")

    def concurrency(self, preferred: int) -> int:
        """Calls at once, for a backend that prefers so many."""
        return preferred if self.io_threads is None else min(preferred, self.io_threads)


@dataclass(slots=True)
class TierState:
    """A tier's lane, bounds and counts.

    live, writes: operations and writes whose I/O has not ended. leave_by_s: set when it is detached: the time at which
    its backend is closed at the latest. waiting: of a tier that leaves, what no thread has begun, perhaps. scan: one
    that was late, and may go on.
    """

    index: int
    lane: Lane
    limits: TierLimits
    breaker: Breaker
    stats: TierStats
    seconds: dict[Verb, Histogram] = field(default_factory=io_histograms)
    live: int = 0
    writes: int = 0
    leave_by_s: float | None = None
    close_began: bool = False
    waiting: list[Ticket] = field(default_factory=list)
    scan: Handle | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a call runs in its backend."""
        return bool(self.lane.busy()) or (self.scan is not None and self.scan.is_alive())

    @property
    def has_left(self) -> bool:
        """Whether everything has ended since its backend began to close."""
        return self.close_began and not (self.live or self.is_busy or self.lane.closing())
