"""One tier, as the dispatcher sees it on the engine's thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierkv.dispatch.breaker import Breaker
from tierkv.dispatch.lane import Lane
from tierkv.dispatch.limits import TierLimits
from tierkv.dispatch.spawn import Handle
from tierkv.dispatch.stats import TierStats, io_histograms
from tierkv.dispatch.ticket import Ticket
from tierkv.metrics.histogram import Histogram
from tierkv.types.tier_ops import Verb


@dataclass(slots=True)
class Line:
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
