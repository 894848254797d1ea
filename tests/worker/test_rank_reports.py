"""Reports of workers on the scheduler's side: what merging costs where there is nothing to merge."""

from __future__ import annotations

from calls import calls_of

from tierkv.frames.sealer import FrameSealer
from tierkv.memory.arena import HostArena
from tierkv.types.engine import EngineSpec, GroupSpec
from tierkv.types.geometry import Geometry
from tierkv.types.keys import make_key
from tierkv.types.transfers import ConnectorMeta, SlotRef, TransferJob, WorkerOutput
from tierkv.worker.rank_reports import RankReports

GEOMETRY = Geometry.of(EngineSpec("m", "float32", (GroupSpec(16, (64,)),), 16))


def store_of(chunks: int) -> TransferJob:
    """A store of some chunks of one block."""
    numbers = range(chunks)
    return TransferJob(
        job_id=7,
        request_id="a",
        is_store=True,
        keys=tuple(make_key(b"chunk %d" % i, 0) for i in numbers),
        slots=tuple(SlotRef(i, 1) for i in numbers),
        chunk_groups=(0,) * chunks,
        block_ids=tuple(range(1, chunks + 1)),
        group_sizes=(chunks,),
        block_indices=(0,),
    )


def calls_of_a_report(chunks: int) -> int:
    """Calls of functions in the report of the only worker, which has sealed its chunks, about a store."""
    reports = RankReports(HostArena(1 << 20, GEOMETRY.payload_bytes_max), FrameSealer(bytes(16)), GEOMETRY)
    store = store_of(chunks)
    reports.add_jobs(ConnectorMeta(stores=(store,)))
    output = WorkerOutput({store.job_id: 1}, {store.job_id: frozenset(store.keys[:1])})
    merged: list[WorkerOutput] = []
    calls = calls_of(lambda: merged.append(reports.merge_output(output)))
    assert merged == [output]
    assert not len(reports)
    assert not reports.merge_output(output).finished, "a second report of a job does not count"
    return calls


def test_the_report_of_the_only_worker_is_passed_on() -> None:
    """With nothing to merge, the engine's thread looks at none of its chunks."""
    assert calls_of_a_report(1) == calls_of_a_report(16)
