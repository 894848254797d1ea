"""Measurements of a stack: delays of lookups by the rules of the specification, and samples."""

from __future__ import annotations

from tierkv.metrics.definitions import DEFERRED_SECONDS, LOOKUP_SECONDS, TRANSFER_BYTES, TRANSFER_SECONDS
from tierkv.metrics.histogram import Histogram
from tierkv.metrics.stack_stats import SAMPLES_MAX, ConnectorStats, StackStats
from tierkv.metrics.transfer_stats import LOAD, SIZE, TIME


def series_of(stats: StackStats) -> dict[str, Histogram]:
    """Histograms by the name of their metric."""
    return {series.metric.name: series.histogram for series in stats.series()}


def test_every_call_is_timed_and_a_wait_once() -> None:
    """A request that is deferred three times waited once: from its first deferral to its answer."""
    stats = StackStats()
    for step in range(3):
        stats.looked_up("a", step, step + 0.25, answered=False)
    stats.looked_up("b", 3.0, 3.5, answered=True)
    stats.looked_up("a", 4.0, 4.25, answered=True)
    taken = stats.take(0)
    assert taken is not None
    assert taken.lookup_sync_s == [0.25, 0.25, 0.25, 0.5, 0.25]
    assert taken.lookup_async_s == [4.0]
    found = series_of(stats)
    assert found[LOOKUP_SECONDS.name].count == 5
    assert found[DEFERRED_SECONDS.name].total == 4.0
    assert not stats._deferred_since


def test_a_request_that_ends_while_it_waits_has_waited() -> None:
    """Aborted requests wait longest; without them the figure would be too small."""
    stats = StackStats()
    stats.looked_up("a", 0.0, 0.5, answered=False)
    stats.finished("a", 2.5)
    stats.finished("never asked", 3.0)
    taken = stats.take(0)
    assert taken is not None
    assert taken.lookup_async_s == [2.0]


def test_taken_once() -> None:
    """Refusals are reported as the increment since the last call."""
    stats = StackStats()
    assert stats.take(0) is None
    stats.transferred({LOAD: [{SIZE: 10, TIME: 0.5}, {SIZE: 10}]})
    first = stats.take(2)
    assert first is not None
    assert (first.allocation_failures, len(first.transfers.data[LOAD])) == (2, 1)
    second = stats.take(3)
    assert second is not None
    assert (second.allocation_failures, second.transfers.is_empty) == (1, True)
    assert stats.take(3) is None
    found = series_of(stats)
    assert (found[TRANSFER_BYTES.name].count, found[TRANSFER_SECONDS.name].total) == (1, 0.5)


def test_samples_are_bounded() -> None:
    """Promise 6: an exporter may never take them."""
    stats = StackStats()
    for step in range(5 * SAMPLES_MAX):
        stats.looked_up("a", step, step, answered=True)
    taken = stats.take(0)
    assert taken is not None
    assert SAMPLES_MAX <= len(taken.lookup_sync_s) < 2 * SAMPLES_MAX
    total = ConnectorStats().aggregate(taken).aggregate(taken)
    assert len(total.lookup_sync_s) == SAMPLES_MAX


def test_d9_added_up_statistics_share_nothing() -> None:
    """Two workers' samples, added to one total, remain their own."""
    one = ConnectorStats(lookup_sync_s=[1.0], lookup_async_s=[2.0], allocation_failures=1)
    total = ConnectorStats()
    total.aggregate(one)
    total.aggregate(one)
    total.lookup_sync_s.append(9.0)
    assert one == ConnectorStats(one.transfers, [1.0], [2.0], 1)
    assert ConnectorStats.from_dict(total.as_dict()).as_dict() == total.as_dict()
    assert ConnectorStats.from_dict({}).is_empty
