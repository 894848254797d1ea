"""Statistics of transfers: added up, reduced, drained, and sent between processes (spec, section 15)."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from tierkv.metrics.transfer_stats import LOAD, SIZE, STORE, TIME, TransferStats

numbers = st.tuples(st.integers(1, 10**9), st.floats(0, 100))
runs = st.dictionaries(st.sampled_from([LOAD, STORE]), st.lists(numbers, min_size=1, max_size=5))


def stats_of(operations: dict[str, list[tuple[int, float]]]) -> TransferStats:
    """Statistics with these operations recorded."""
    stats = TransferStats()
    for transfer_type, done in operations.items():
        for size_bytes, time_s in done:
            stats.record(transfer_type, size_bytes, time_s)
    return stats


def test_s105_d9_adding_up_twice_leaves_the_source_as_it_was() -> None:
    """D9: an engine core that keeps a worker's list would extend it with the next worker's entries."""
    worker = stats_of({LOAD: [(10, 0.5)]})
    total = TransferStats()
    total.aggregate(worker)
    total.aggregate(worker)
    total.record(LOAD, 7, 0.1)
    total.data[LOAD][0][SIZE] = 99
    assert worker.data == {LOAD: [{SIZE: 10, TIME: 0.5}]}
    assert len(total.data[LOAD]) == 3


def test_adding_nothing_changes_nothing() -> None:
    """Most steps move nothing."""
    total = stats_of({LOAD: [(10, 0.5)]})
    before = json.dumps(total.data)
    assert total.aggregate(TransferStats()) is total
    assert json.dumps(total.data) == before


def test_s106_two_operations_reduce_to_their_sums() -> None:
    """A log line has bytes and seconds per kind."""
    stats = stats_of({STORE: [(100, 0.25), (300, 0.5)], LOAD: [(7, 1.0)]})
    assert stats.reduce() == {
        "GPU_to_CPU_total_bytes": 400,
        "GPU_to_CPU_total_time": 0.75,
        "CPU_to_GPU_total_bytes": 7,
        "CPU_to_GPU_total_time": 1.0,
    }


def test_s109_without_time_or_size_nothing_is_recorded() -> None:
    """A failed copy moved nothing, and one without a measured end has no rate; one within a clock tick has."""
    stats = TransferStats()
    stats.record(LOAD, None, 0.5)
    stats.record(LOAD, 0, 0.5)
    stats.record(LOAD, 10, None)
    assert stats.is_empty
    stats.record(LOAD, 10, 0.0)
    assert stats.data == {LOAD: [{SIZE: 10, TIME: 0.0}]}
    assert TransferStats({LOAD: [{SIZE: 5}, {TIME: 1.0}]}).is_empty


def test_draining_starts_afresh() -> None:
    """A sample is taken once, and a taken sample does not change any more."""
    stats = TransferStats()
    assert stats.drain() is None
    stats.record(LOAD, 10, 0.5)
    taken = stats.drain()
    stats.record(LOAD, 20, 0.5)
    assert taken is not None
    assert taken.reduce()["CPU_to_GPU_total_bytes"] == 10
    assert stats.reduce()["CPU_to_GPU_total_bytes"] == 20


def test_samples_are_bounded() -> None:
    """Promise 6: an engine that never takes them keeps the newest."""
    stats = TransferStats(operations_max=3)
    for size_bytes in range(1, 10):
        stats.record(LOAD, size_bytes, 1.0)
    assert [one[SIZE] for one in stats.data[LOAD]] == [7, 8, 9]


@given(runs, runs)
def test_any_split_over_processes_gives_one_sum(
    one: dict[str, list[tuple[int, float]]], two: dict[str, list[tuple[int, float]]]
) -> None:
    """Through JSON and back, in two parts, the sum is that of one process."""
    parts = [TransferStats(json.loads(json.dumps(stats_of(part).data))) for part in (one, two)]
    total = TransferStats().aggregate(parts[0]).aggregate(parts[1])
    whole = {kind: one.get(kind, []) + two.get(kind, []) for kind in {*one, *two}}
    assert total.reduce() == stats_of(whole).reduce()
