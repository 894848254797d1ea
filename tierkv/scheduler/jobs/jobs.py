"""Transfer jobs in flight, counted until every worker has reported, and fences on the blocks that they read or fill."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from tierkv.errors import EngineProtocolError, require
from tierkv.types.engine import NULL_BLOCK_ID
from tierkv.types.keys import Key
from tierkv.types.transfers import NO_REQUEST, TransferJob


@dataclass(slots=True)
class JobStatus:
    """One job in flight."""

    job: TransferJob
    workers_left: int
    """Number of workers that have not reported it."""
    failed: frozenset[Key] = frozenset()
    """Chunks that a worker reported as failed."""
    stale: bool = False
    """The cache was reset since the job started. Known when every worker has reported it."""


class JobTable:
    """Jobs in flight. Ids count up over loads and stores alike and are never reused."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._live: dict[int, JobStatus] = {}
        self._last_id = 0
        self._stale_id = 0  # the newest job before the latest reset

    def __len__(self) -> int:
        return len(self._live)

    def new_id(self) -> int:
        """Id for the next job."""
        self._last_id += 1
        return self._last_id

    def start_job(self, job: TransferJob) -> None:
        """Register a job that is handed to the workers."""
        self._live[job.job_id] = JobStatus(job, self._num_workers)

    def job(self, job_id: int) -> TransferJob:
        """Job in flight with this id."""
        return self._live[job_id].job

    def disown(self, job_id: int) -> None:
        """Remove the owner of a job: its request is forgotten, and another request may get the id."""
        status = self._live[job_id]
        status.job = replace(status.job, request_id=NO_REQUEST)

    def remove(self, job_id: int) -> JobStatus:
        """Remove a job whose end is handled, or that was never handed to workers."""
        status = self._live.pop(job_id)
        status.stale = job_id <= self._stale_id
        return status

    def check_reports(self, counts: Mapping[int, int]) -> None:
        """Check reports before any is taken in.

        Args:
            counts: number of workers that ended each job; unknown ids are ignored.

        Raises:
            EngineProtocolError: more reports than workers (S84).
        """
        live = self._live
        for job_id, count in counts.items():
            if job_id in live and count > live[job_id].workers_left:
                raise EngineProtocolError(
                    f"job {job_id} was reported by more workers than there are ({self._num_workers})"
                )

    def report_job(self, job_id: int, count: int, failed: frozenset[Key]) -> JobStatus | None:
        """Note that ``count`` workers ended the job; unknown ids are ignored. It is in flight until it is removed.

        Returns:
            Its status, if every worker has reported it now.
        """
        if job_id not in self._live or count <= 0:
            return None
        status = self._live[job_id]
        if not status.workers_left:
            return None
        status.workers_left -= count
        status.failed = status.failed | failed if status.failed else failed
        return None if status.workers_left else status

    def live_ids(self) -> frozenset[int]:
        """Ids of all jobs in flight."""
        return frozenset(self._live)

    def oldest_ids(self, chunks_max: int) -> frozenset[int]:
        """Ids of the jobs to flush in a step that may be the last one: the oldest, up to ``chunks_max`` chunks.

        At least one, if any is in flight. The engine waits for their copies, and steps on while jobs are left.
        """
        ids: list[int] = []
        for job_id, status in self._live.items():
            chunks_max -= len(status.job.keys)
            if ids and chunks_max < 0:
                break
            ids.append(job_id)
        return frozenset(ids)

    def ownerless_ids(self) -> frozenset[int]:
        """Ids of jobs that belong to no request."""
        return frozenset(job_id for job_id, status in self._live.items() if status.job.request_id == NO_REQUEST)

    def mark_stale(self) -> None:
        """Mark all jobs as stale after a reset of the cache. Their slots and blocks stay taken until they end."""
        self._stale_id = self._last_id


class Fences:
    """Blocks that must not be overwritten before certain jobs have ended.

    Such a block belongs to no request any more, but a store still reads it, or a load still fills it.
    """

    def __init__(self) -> None:
        self._jobs_by_block: dict[int, frozenset[int]] = {}
        self._blocks_by_job: dict[int, set[int]] = {}

    def __len__(self) -> int:
        """Number of fenced blocks."""
        return len(self._jobs_by_block)

    @property
    def job_ids(self) -> AbstractSet[int]:
        """Ids of jobs that fence blocks."""
        return self._blocks_by_job.keys()

    def fence_blocks(self, job: TransferJob, block_ids: Iterable[int] | None = None) -> None:
        """Fence blocks of the job, by default all of them. May be repeated."""
        fenced = set(job.block_ids if block_ids is None else block_ids)
        if fenced:
            self._blocks_by_job.setdefault(job.job_id, set()).update(fenced)
            by_block, this = self._jobs_by_block, frozenset((job.job_id,))
            for block_id in fenced:
                by_block[block_id] = by_block[block_id] | this if block_id in by_block else this

    def covers_job(self, job: TransferJob) -> bool:
        """Whether every block of the job is fenced."""
        return self._blocks_by_job.get(job.job_id, set()).issuperset(job.block_ids)

    def jobs_fencing(self, block_ids: Iterable[int]) -> set[int]:
        """Ids of jobs that must end before these blocks are written."""
        jobs: set[int] = set()
        if self._jobs_by_block:
            for block_id in block_ids:
                if block_id != NULL_BLOCK_ID:
                    jobs |= self._jobs_by_block.get(block_id, frozenset())
        return jobs

    def lift_fences(self, job_id: int) -> None:
        """Remove the fences of a job that has ended. Absent and repeated blocks are allowed (D2)."""
        by_block, this = self._jobs_by_block, frozenset((job_id,))
        for block_id in self._blocks_by_job.pop(job_id, ()):
            if block_id in by_block:
                by_block[block_id] = by_block[block_id] - this
                if not by_block[block_id]:
                    del by_block[block_id]

    def validate(self) -> None:
        """Check that both maps agree (I3: a fenced block has a job).

        Raises:
            InvariantError: they do not agree.
        """
        blocks = {(block_id, job_id) for block_id, jobs in self._jobs_by_block.items() for job_id in jobs}
        fences = {(block_id, job_id) for job_id, ids in self._blocks_by_job.items() for block_id in ids}
        require(blocks == fences, f"both maps of fences disagree: {sorted(blocks ^ fences)[:3]}")
        require(all(self._jobs_by_block.values()), "a block is fenced by no job")
