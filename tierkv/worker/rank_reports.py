"""The scheduler's side of several workers: who has reported which job, and the seal of a chunk with all its parts in.

Sealing reads no payload: a header page is written from the checksums that the workers computed. So a chunk becomes
visible after all of its parts are in place, or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tierkv.errors import EngineProtocolError
from tierkv.frames.frame import FrameSealer
from tierkv.memory.arena import HostArena
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key
from tierkv.types.transfers import ConnectorMeta, TransferJob, WorkerOutput

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _OpenJob:
    """A job that not every worker has reported yet: what each rank said of its parts, and the keys that failed."""

    job: TransferJob
    parts: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    failed: set[Key] = field(default_factory=set)


class RankReports:
    """Jobs in flight of a stack whose workers are several, or other processes. Scheduler's thread.

    A rank's second report of a job counts for nothing: a job must not end while a worker still copies for it.
    """

    def __init__(self, arena: HostArena, sealer: FrameSealer, geometry: Geometry) -> None:
        self._arena = arena
        self._sealer = sealer
        self._geometry = geometry
        self._open: dict[int, _OpenJob] = {}

    def __len__(self) -> int:
        """Jobs in flight."""
        return len(self._open)

    def add_jobs(self, meta: ConnectorMeta) -> None:
        """These jobs go to all workers now."""
        for job in (*meta.loads, *meta.stores):
            self._open[job.job_id] = _OpenJob(job)

    def merge_output(self, output: WorkerOutput) -> WorkerOutput:
        """Seal what is complete. Returns the report as the scheduler shall see it: each rank counted once per job.

        Raises:
            EngineProtocolError: a report names a rank that there is not.
        """
        finished: dict[int, int] = {}
        failed = dict(output.failed_keys)
        for job_id, count in output.finished.items():
            entry = self._open.get(job_id)
            if entry is None:  # ended already, or nobody's: nothing that the scheduler would count
                continue
            new = self._new_parts(entry, self._reported(output, job_id, count))
            entry.parts.update(new)
            entry.failed |= output.failed_keys.get(job_id, frozenset())
            finished[job_id] = len(new)
            if len(entry.parts) == self._geometry.num_workers:
                del self._open[job_id]
                if entry.job.is_store:
                    entry.failed |= self._seal(entry)
                if entry.failed:
                    failed[job_id] = frozenset(entry.failed)
        return WorkerOutput(finished, failed)

    def output_of_lost(self, rank: int) -> WorkerOutput:
        """What stands for the reports of a worker that will send none: its part of everything in flight has failed.

        Raises:
            EngineProtocolError: there is no such rank.
        """
        self._check_rank(rank)
        missing = [entry.job for entry in self._open.values() if rank not in entry.parts]
        return WorkerOutput(
            {job.job_id: 1 for job in missing},
            {job.job_id: frozenset(job.keys) for job in missing},
            {job.job_id: {rank: ()} for job in missing},
        )

    def _reported(self, output: WorkerOutput, job_id: int, count: int) -> Mapping[int, tuple[bytes, ...]]:
        """Who reported the job in this output. A worker that is alone does not say so."""
        by_rank = output.parts.get(job_id)
        if by_rank is not None:
            return by_rank
        if self._geometry.num_workers > 1:
            raise EngineProtocolError(
                f"{count} reports of job {job_id} do not say which workers they are from: hand in what "
                "Worker.get_finished returned, or the aggregate of it"
            )
        return {0: ()}

    def _new_parts(self, entry: _OpenJob, by_rank: Mapping[int, tuple[bytes, ...]]) -> dict[int, tuple[bytes, ...]]:
        for rank in by_rank:
            self._check_rank(rank)
        return {rank: checksums for rank, checksums in by_rank.items() if rank not in entry.parts}

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._geometry.num_workers:
            raise EngineProtocolError(f"worker {rank}: this stack has workers 0 to {self._geometry.num_workers - 1}")

    def _seal(self, entry: _OpenJob) -> set[Key]:
        """Write the header of every chunk whose parts are all there. Returns the keys of the others."""
        if self._geometry.num_workers == 1:
            return set()  # the worker has sealed them
        failed = set()
        for key, slot, raw_bytes, checksums in self._chunks(entry):
            if key in entry.failed:
                continue
            try:
                self._sealer.seal_parts(self._arena.slot(slot), key, raw_bytes, checksums)
            except ValueError as error:  # a part was not reported: there is no whole chunk
                _log.warning("chunk %s cannot be sealed: %s", key.hex(), error)
                failed.add(key)
        return failed

    def _chunks(self, entry: _OpenJob) -> Iterator[tuple[Key, int, int, list[bytes]]]:
        """Key, slot, length and the parts' checksums of each chunk; an empty one stands for a part that is missing."""
        job = entry.job
        columns = [entry.parts[rank] for rank in range(self._geometry.num_workers)]
        for number, (key, ref, group) in enumerate(zip(job.keys, job.slots, job.chunk_groups, strict=True)):
            checksums = [column[number] if number < len(column) else b"" for column in columns]
            yield key, ref.slot, self._geometry.groups[group].payload_bytes, checksums
