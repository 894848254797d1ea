"""Reports of several workers on the scheduler's side: jobs that each rank has reported, and sealing of complete chunks.

Sealing reads no payload: the header page is written from the checksums that the workers computed. A chunk becomes
visible after all of its parts are in place, or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tierkv.errors import EngineProtocolError
from tierkv.frames.frame import CHECKSUM_BYTES
from tierkv.frames.sealer import FrameSealer
from tierkv.memory.arena import HostArena
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key
from tierkv.types.transfers import ConnectorMeta, TransferJob, WorkerOutput

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _OpenJob:
    """Job that not every worker has reported."""

    job: TransferJob
    """The job."""
    parts: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    """Checksums of each rank's parts, by rank."""
    failed: set[Key] = field(default_factory=set)
    """Keys that a rank reported as failed."""


class RankReports:
    """Jobs in flight of a stack with several workers, or with workers in other processes. Scheduler's thread.

    A rank's second report of a job is ignored: a job must not end while a worker still copies for it.

    Args:
        arena: memory of the host tier.
        sealer: writes headers.
        geometry: sizes of groups and chunks, and the number of workers.
    """

    def __init__(self, arena: HostArena, sealer: FrameSealer, geometry: Geometry) -> None:
        self._arena = arena
        self._sealer = sealer
        self._geometry = geometry
        self._open: dict[int, _OpenJob] = {}

    def __len__(self) -> int:
        """Number of jobs in flight."""
        return len(self._open)

    def add_jobs(self, meta: ConnectorMeta) -> None:
        """Record the jobs of a step, which are sent to all workers."""
        for job in (*meta.loads, *meta.stores):
            self._open[job.job_id] = _OpenJob(job)

    def merge_output(self, output: WorkerOutput) -> WorkerOutput:
        """Merge a report of one or several workers, and seal the stores that it completes.

        Returns:
            Report for the scheduler, which counts each rank once per job.

        Raises:
            EngineProtocolError: a report names an unknown rank, or no rank although there are several workers.
        """
        if self._geometry.num_workers == 1:  # nothing to merge: it has sealed its chunks itself
            for rank in {rank for by_rank in output.parts.values() for rank in by_rank} if output.parts else ():
                self._check_rank(rank)
            ended = {job_id: 1 for job_id in output.finished if self._open.pop(job_id, None) is not None}
            return WorkerOutput(ended, output.failed_keys)
        finished: dict[int, int] = {}
        failed = dict(output.failed_keys)
        for job_id, count in output.finished.items():
            entry = self._open.get(job_id)
            if entry is None:  # unknown, or ended before: the scheduler does not count it
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
        """Return a report for a lost worker: its part of every job in flight has failed.

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
        """Return the checksums of a job by reporting rank."""
        by_rank = output.parts.get(job_id)
        if by_rank is None:
            raise EngineProtocolError(
                f"{count} reports of job {job_id} name no worker: pass the output of Worker.get_finished, or the "
                "aggregate of several outputs"
            )
        return by_rank

    def _new_parts(self, entry: _OpenJob, by_rank: Mapping[int, tuple[bytes, ...]]) -> dict[int, tuple[bytes, ...]]:
        for rank in by_rank:
            self._check_rank(rank)
        return {rank: checksums for rank, checksums in by_rank.items() if rank not in entry.parts}

    def _check_rank(self, rank: int) -> None:
        if rank not in range(self._geometry.num_workers):
            raise EngineProtocolError(f"worker {rank}: this stack has workers 0 to {self._geometry.num_workers - 1}")

    def _seal(self, entry: _OpenJob) -> set[Key]:
        """Write the header of every chunk that is complete. Returns the keys of the others."""
        failed = set()
        for key, slot, group, checksums in self._chunks(entry):
            if key in entry.failed or self._is_whole(group):  # the worker has sealed the slot
                continue
            try:
                raw_bytes = self._geometry.groups[group].payload_bytes
                self._sealer.seal_parts(self._arena.slot(slot), key, raw_bytes, checksums)
            except ValueError as error:  # a part was not reported: the chunk is incomplete
                _log.warning("chunk %s cannot be sealed: %s", key.hex(), error)
                failed.add(key)
        return failed

    def _is_whole(self, group: int) -> bool:
        """Whether each worker holds all parts."""
        sizes = self._geometry.groups[group]
        return sizes.parts == sizes.worker_parts

    def _chunks(self, entry: _OpenJob) -> Iterator[tuple[Key, int, int, list[bytes]]]:
        """Yield key, slot, group and part checksums of each chunk. An empty checksum marks a missing part."""
        job = entry.job
        for number, (key, ref, group) in enumerate(zip(job.keys, job.slots, job.chunk_groups, strict=True)):
            sizes = self._geometry.groups[group]
            ranks = range(ref.slot % sizes.copies, self._geometry.num_workers, sizes.copies)  # those that store it
            columns = [entry.parts[rank] for rank in ranks]
            reported = b"".join(column[number] if number < len(column) else b"" for column in columns)
            starts = range(0, sizes.parts * CHECKSUM_BYTES, CHECKSUM_BYTES)
            yield key, ref.slot, group, [reported[start : start + CHECKSUM_BYTES] for start in starts]
