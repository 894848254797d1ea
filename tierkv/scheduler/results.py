"""What workers report, turned into an engine's report: jobs end, requests go on or are forgotten."""

from __future__ import annotations

from tierkv.manager.manager import OffloadManager
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.accounts import Accounts
from tierkv.scheduler.block_events import BlockEvents
from tierkv.scheduler.jobs import Fences, JobStatus, JobTable
from tierkv.scheduler.lookups import Lookups
from tierkv.scheduler.records import RequestRecord
from tierkv.scheduler.request_state import RequestEvent, RequestState
from tierkv.types.engine import LoadReport
from tierkv.types.geometry import Geometry
from tierkv.types.transfers import WorkerOutput, chunk_blocks


class Results:
    """The half of the scheduler that hears of ends. Sans-IO; shares the records, jobs and fences of the other half."""

    def __init__(  # noqa: PLR0913, PLR0917 - the scheduler hands in its parts
        self,
        manager: OffloadManager,
        geometry: Geometry,
        counters: CoreCounters,
        records: dict[str, RequestRecord],
        jobs: JobTable,
        fences: Fences,
        lookups: Lookups,
        accounts: Accounts,
        block_events: BlockEvents,
    ) -> None:
        self._manager = manager
        self._geometry = geometry
        self._counters = counters
        self._records = records
        self._jobs = jobs
        self._fences = fences
        self._lookups = lookups
        self._accounts = accounts
        self._block_events = block_events
        self._sent: set[str] = set()

    @property
    def has_news(self) -> bool:
        """Whether the end of a request's last store is still to be told."""
        return bool(self._sent)

    def take_in(self, output: WorkerOutput) -> LoadReport:
        """Workers ended jobs. Tells which loads and last stores are over, and which blocks hold no valid data."""
        finished: set[str] = set()
        invalid: set[int] = set()
        for job_id, count in output.finished.items():
            status = self._jobs.report(job_id, count, output.failed_keys.get(job_id, frozenset()))
            if status is None:
                continue
            if status.job.is_store:
                self._manager.complete_store(status.job.slots, frozenset(status.failed))
                if not status.stale:
                    self._accounts.stored(status.job, status.failed)
            else:
                if not status.stale:
                    self._lookups.loading_ended(status.job.keys)
                self._manager.complete_load(status.job.slots, frozenset(status.failed))
                finished.add(status.job.request_id)
                invalid |= self._invalid_blocks(status)
            self.end_job(status)
        sent, self._sent = frozenset(self._sent), set()
        return LoadReport(frozenset(finished), frozenset(invalid), sent)

    def _invalid_blocks(self, status: JobStatus) -> set[int]:
        """Blocks of failed chunks. Of a load that a reset has overtaken, all of them: its data is of the past.

        Also all of them where a group has a window: it was loaded for one end only, so no shorter part is of use.
        """
        job = status.job
        if status.stale:
            return set(job.block_ids)
        self._counters.loads_failed += len(status.failed)
        if status.failed and self._geometry.has_windows:
            return set(job.block_ids)
        parts = zip(job.keys, chunk_blocks(job, self._geometry.blocks_per_chunk), strict=True)
        return {block_id for key, (_, ids) in parts if key in status.failed for block_id in ids}

    def end_job(self, status: JobStatus) -> None:
        """A job is over: its blocks are fenced no more, and its request goes on, or is forgotten."""
        job = status.job
        self._fences.lift(job.job_id)
        if job.is_store:
            self._block_events.ended(job.keys)
        record = self._records.get(job.request_id)
        if record is None:
            return
        if job.is_store:
            record.store_jobs.discard(job.job_id)
        else:
            if status.failed or status.stale:
                record.offer_again()  # what is recomputed shall be stored again
            record.load_job = None
            record.apply(RequestEvent.LOAD_ENDED)
        self.forget_if_done(record)

    def forget_if_done(self, record: RequestRecord) -> None:
        """Forget a finished request when its last job has ended."""
        if record.state is RequestState.FINISHED and not record.has_jobs:
            self._records.pop(record.ctx.request_id, None)
            if record.held_for_stores:
                self._sent.add(record.ctx.request_id)
            self._accounts.close(record.ctx.request_id)
