"""Transfer jobs in flight, counted until every worker has reported; and the fences on the blocks they read or fill."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from tierkv.errors import EngineProtocolError
from tierkv.types.engine import NULL_BLOCK_ID
from tierkv.types.keys import Key
from tierkv.types.transfers import TransferJob


@dataclass(slots=True)
class JobStatus:
    """One job and how many workers have still to report it. stale: the cache was reset since it started."""

    job: TransferJob
    workers_left: int
    failed: set[Key] = field(default_factory=set)
    stale: bool = False


class JobTable:
    """Live jobs. Ids count up over loads and stores alike and are never reused."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._live: dict[int, JobStatus] = {}
        self._last_id = 0

    def __len__(self) -> int:
        """Jobs in flight."""
        return len(self._live)

    def new_id(self) -> int:
        """An id for the next job."""
        self._last_id += 1
        return self._last_id

    def start(self, job: TransferJob) -> None:
        """The job is handed to the workers."""
        self._live[job.job_id] = JobStatus(job, self._num_workers)

    def job(self, job_id: int) -> TransferJob:
        """A job in flight."""
        return self._live[job_id].job

    def take_back(self, job_id: int) -> JobStatus:
        """A job that was never handed out ends here."""
        return self._live.pop(job_id)

    def report(self, job_id: int, count: int, failed: frozenset[Key]) -> JobStatus | None:
        """``count`` workers ended the job. Returns its status when that was the last one; unknown ids are ignored.

        Raises:
            EngineProtocolError: more reports than workers (S84).
        """
        status = self._live.get(job_id)
        if status is None or count <= 0:
            return None
        status.workers_left -= count
        status.failed |= failed
        if status.workers_left < 0:
            raise EngineProtocolError(f"job {job_id} was reported by more workers than there are ({self._num_workers})")
        return self._live.pop(job_id) if status.workers_left == 0 else None

    def live_ids(self) -> frozenset[int]:
        """Ids of all jobs in flight."""
        return frozenset(self._live)

    def mark_stale(self) -> None:
        """The cache was reset: what these jobs bring counts for nothing.

        Their slots and blocks stay taken until they end.
        """
        for status in self._live.values():
            status.stale = True


class Fences:
    """Blocks that may not be overwritten before certain jobs have ended.

    Such a block belongs to nobody any more, but a store still reads it, or a load still fills it.
    """

    def __init__(self) -> None:
        self._jobs_by_block: dict[int, set[int]] = {}
        self._blocks_by_job: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        """Fenced blocks."""
        return len(self._jobs_by_block)

    @property
    def job_ids(self) -> AbstractSet[int]:
        """Jobs that fence blocks."""
        return self._blocks_by_job.keys()

    def put(self, job: TransferJob) -> None:
        """Fence every block of the job. Harmless when done twice."""
        self._blocks_by_job[job.job_id] = job.block_ids
        for block_id in job.block_ids:
            self._jobs_by_block.setdefault(block_id, set()).add(job.job_id)

    def crossed(self, block_ids: Iterable[int]) -> set[int]:
        """Jobs that must end before these blocks are written."""
        jobs: set[int] = set()
        if self._jobs_by_block:
            for block_id in block_ids:
                if block_id != NULL_BLOCK_ID:
                    jobs |= self._jobs_by_block.get(block_id, set())
        return jobs

    def lift(self, job_id: int) -> None:
        """The job ended. Absent and repeated blocks are fine (D2)."""
        for block_id in self._blocks_by_job.pop(job_id, ()):
            jobs = self._jobs_by_block.get(block_id)
            if jobs is not None:
                jobs.discard(job_id)
                if not jobs:
                    del self._jobs_by_block[block_id]
