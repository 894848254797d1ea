"""Measurements of a stack: delays of lookups, and transfers as workers report them.

Each is kept twice: as a histogram, for a scrape of this process, and as samples, for an exporter of several engines in
another process. Samples that no exporter takes are bounded; histograms do not grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tierkv.metrics.definitions import (
    DEFERRED_SECONDS,
    LOOKUP_SECONDS,
    TRANSFER_BYTES,
    TRANSFER_SECONDS,
    Metric,
)
from tierkv.metrics.histogram import Histogram
from tierkv.metrics.transfer_stats import SIZE, TIME, Operations, TransferStats

SAMPLES_MAX = 10_000
"""Samples of each kind kept until they are taken; the oldest are dropped first."""


class Series(NamedTuple):
    """One histogram with its labels."""

    metric: Metric
    """Definition."""
    label_values: tuple[str, ...]
    """Values of the metric's own labels."""
    histogram: Histogram
    """Buckets and sum."""


@dataclass(slots=True)
class ConnectorStats:
    """Samples since they were last taken."""

    transfers: TransferStats = field(default_factory=lambda: TransferStats(operations_max=SAMPLES_MAX))
    """Transfers between GPU and host."""
    lookup_sync_s: list[float] = field(default_factory=list)
    """Seconds of each lookup call."""
    lookup_async_s: list[float] = field(default_factory=list)
    """Seconds from a request's first deferral to its answer or end."""
    allocation_failures: int = 0
    """Batches of stores that the host tier had no room for."""

    @property
    def is_empty(self) -> bool:
        """Whether there are no samples."""
        delays = self.lookup_sync_s or self.lookup_async_s
        return self.transfers.is_empty and not delays and not self.allocation_failures

    def aggregate(self, other: ConnectorStats) -> ConnectorStats:
        """Append the samples of ``other``, which is unchanged; return this object."""
        self.transfers.aggregate(other.transfers)
        self.lookup_sync_s = (self.lookup_sync_s + other.lookup_sync_s)[-SAMPLES_MAX:]
        self.lookup_async_s = (self.lookup_async_s + other.lookup_async_s)[-SAMPLES_MAX:]
        self.allocation_failures += other.allocation_failures
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and numbers, for :meth:`from_dict` in another process."""
        return {
            "transfers": {kind: [dict(one) for one in operations] for kind, operations in self.transfers.data.items()},
            "lookup_sync_s": list(self.lookup_sync_s),
            "lookup_async_s": list(self.lookup_async_s),
            "allocation_failures": self.allocation_failures,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ConnectorStats:
        """Rebuild from the result of :meth:`as_dict`; missing parts are empty."""
        return cls(
            TransferStats(data.get("transfers"), operations_max=SAMPLES_MAX),
            list(data.get("lookup_sync_s", ())),
            list(data.get("lookup_async_s", ())),
            data.get("allocation_failures", 0),
        )


class StackStats:
    """Measurements of one stack. Engine's thread, unless a method says otherwise."""

    def __init__(self) -> None:
        self._samples = ConnectorStats()
        self._lookups = Histogram(LOOKUP_SECONDS.buckets)
        self._deferred = Histogram(DEFERRED_SECONDS.buckets)
        self._transfers: dict[str, tuple[Histogram, Histogram]] = {}
        self._series = [Series(LOOKUP_SECONDS, (), self._lookups), Series(DEFERRED_SECONDS, (), self._deferred)]
        self._deferred_since: dict[str, float] = {}
        self._allocation_failures = 0

    def looked_up(self, request_id: str, began_s: float, ended_s: float, *, answered: bool) -> None:
        """Record a lookup call from ``began_s`` to ``ended_s`` on the stack's clock. answered: it was not deferred."""
        self._sample(self._lookups, self._samples.lookup_sync_s, ended_s - began_s)
        if answered:
            self._end_wait(request_id, ended_s)
        else:
            self._deferred_since.setdefault(request_id, ended_s)

    def finished(self, request_id: str, now_s: float) -> None:
        """End the wait of a request that ended before its lookup was answered."""
        if request_id in self._deferred_since:
            self._end_wait(request_id, now_s)

    def _end_wait(self, request_id: str, now_s: float) -> None:
        since_s = self._deferred_since.pop(request_id, None)
        if since_s is not None:
            self._sample(self._deferred, self._samples.lookup_async_s, now_s - since_s)

    @staticmethod
    def _sample(histogram: Histogram, samples: list[float], value: float) -> None:
        histogram.observe(value)
        samples.append(value)
        if len(samples) >= 2 * SAMPLES_MAX:  # seldom, so that an append stays O(1)
            del samples[:-SAMPLES_MAX]

    def transferred(self, operations: Operations) -> None:
        """Record the transfers that workers report."""
        for transfer_type, done in self._samples.transfers.add(operations).items():
            if transfer_type not in self._transfers:
                self._transfers[transfer_type] = self._begin_transfers(transfer_type)
            sizes, times = self._transfers[transfer_type]
            sizes.observe_all([one[SIZE] for one in done])
            times.observe_all([one[TIME] for one in done])

    def _begin_transfers(self, transfer_type: str) -> tuple[Histogram, Histogram]:
        sizes, times = Histogram(TRANSFER_BYTES.buckets), Histogram(TRANSFER_SECONDS.buckets)
        self._series += [
            Series(TRANSFER_BYTES, (transfer_type,), sizes),
            Series(TRANSFER_SECONDS, (transfer_type,), times),
        ]
        return sizes, times

    def take(self, stores_refused: int) -> ConnectorStats | None:
        """Return the samples since the last call, or None. stores_refused: current value of that counter."""
        samples = self._samples
        samples.allocation_failures = stores_refused - self._allocation_failures
        self._allocation_failures = stores_refused
        if samples.is_empty:
            return None
        self._samples = ConnectorStats()
        return samples

    def series(self) -> list[Series]:
        """Return all histograms. Any thread."""
        return self._series.copy()
