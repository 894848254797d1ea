"""What bounds the I/O of one tier."""

from __future__ import annotations

from dataclasses import dataclass


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
