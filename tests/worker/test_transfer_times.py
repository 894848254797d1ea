"""Statistics of a worker's copies: bytes and seconds, reported once each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from tierkv.frames.sealer import FrameSealer
from tierkv.memory.arena import HostArena
from tierkv.metrics.transfer_stats import LOAD, SIZE, STORE, TIME
from tierkv.types.engine import EngineSpec, GroupSpec
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key, make_key
from tierkv.types.transfers import ConnectorMeta, SlotRef, TransferJob, WorkerOutput
from tierkv.worker.host_copies import HostTransfer
from tierkv.worker.worker import Worker

GEOMETRY = Geometry.of(EngineSpec("m", "uint8", (GroupSpec(16, (256,)),), 16))
KEYS = tuple(make_key(b"%08d" % i, 0) for i in range(2))


def inline(copy: Callable[[], frozenset[Key]]) -> Future[frozenset[Key]]:
    """Run a copy at once."""
    future: Future[frozenset[Key]] = Future()
    future.set_result(copy())
    return future


class Steps:
    """Clock that returns given numbers in order."""

    def __init__(self, times: Sequence[float]) -> None:
        self._times = list(times)

    def __call__(self) -> float:
        return self._times.pop(0)


def job_of(job_id: int, *, store: bool) -> TransferJob:
    """Return a job of both chunks, one block each."""
    slots = tuple(SlotRef(i, 0) for i in range(2))
    return TransferJob(job_id, "r", store, KEYS, slots, (0, 0), (1, 2), (2,), (0,))


def worker_with(times: Sequence[float]) -> Worker:
    """Return a worker over real memory whose copies take the time of the clock."""
    arena = HostArena(1 << 20, GEOMETRY.payload_bytes_max)
    worker = Worker(arena, FrameSealer(b"n" * 16), GEOMETRY, inline, clock=Steps(times))
    worker.register_kv_caches([[np.arange(4 * 256, dtype=np.uint8).reshape(4, 256)]])
    return worker


def test_each_job_is_one_operation_with_its_bytes_and_seconds() -> None:
    """A store and a load appear once, in the report in which they ended."""
    worker = worker_with([0.5, 1.0, 1.5, 1.75, 2.0, 2.25])
    worker.queue_stores(ConnectorMeta(stores=(job_of(1, store=True),)))
    worker.start_step(ConnectorMeta())
    worker.start_step(ConnectorMeta(loads=(job_of(2, store=False),)))
    output = worker.get_finished()
    assert output.transfers == {STORE: [{SIZE: 512, TIME: 0.5}], LOAD: [{SIZE: 512, TIME: 0.25}]}
    assert worker.get_finished().transfers == {}


def test_s109_failed_chunks_are_not_counted() -> None:
    """Empty slots hold no frames: the load is refused, moves nothing and is no operation."""
    worker = worker_with([0.5, 1.0, 1.5])
    worker.start_step(ConnectorMeta(loads=(job_of(1, store=False),)))
    output = worker.get_finished()
    assert output.failed_keys == {1: frozenset(KEYS)}
    assert output.transfers == {}


def test_untimed_copies_last_until_their_end_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU copies asynchronously: bytes without a duration would be missing in every rate."""
    worker = worker_with([1.0, 2.0, 3.0, 5.0])
    original = HostTransfer.result
    monkeypatch.setattr(HostTransfer, "result", lambda transfer: replace(original(transfer), seconds=None))
    worker.queue_stores(ConnectorMeta(stores=(job_of(1, store=True),)))
    worker.start_step(ConnectorMeta())
    assert worker.get_finished().transfers == {STORE: [{SIZE: 512, TIME: 4.0}]}
    assert not worker._began_s


def test_d9_reports_of_workers_are_aggregated_unchanged() -> None:
    """Two workers, one aggregate. Each worker's own list is unchanged."""
    outputs = [WorkerOutput({1: 1}, transfers={STORE: [{SIZE: 512.0, TIME: 0.5}]}) for _ in range(2)]
    joined = WorkerOutput.aggregate([*outputs, WorkerOutput()])
    assert len(joined.transfers[STORE]) == 2
    assert [len(output.transfers[STORE]) for output in outputs] == [1, 1]
