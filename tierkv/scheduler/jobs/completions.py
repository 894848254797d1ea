"""What workers report, turned into an engine's report: jobs end, requests go on or are forgotten."""

from __future__ import annotations

from tierkv.manager.manager import OffloadManager
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.events.block_events import BlockEvents
from tierkv.scheduler.jobs.jobs import Fences, JobStatus, JobTable
from tierkv.scheduler.load.loads import EndedLoad, Loads
from tierkv.scheduler.requests.accounting import Accounting
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.scheduler.requests.request_state import RequestEvent, RequestState
from tierkv.types.engine import LoadReport
from tierkv.types.geometry import Geometry
from tierkv.types.transfers import VOID_SLOT, TransferJob, WorkerOutput, chunk_blocks


class CompletionHandler:
    """The half of the scheduler that hears of ends. Sans-IO; shares the records, jobs and fences of the other half."""

    def __init__(  # noqa: PLR0913, PLR0917 - the scheduler hands in its parts
        self,
        manager: OffloadManager,
        geometry: Geometry,
        counters: CoreCounters,
        records: dict[str, RequestRecord],
        jobs: JobTable,
        fences: Fences,
        loads: Loads,
        accounting: Accounting,
        block_events: BlockEvents,
    ) -> None:
        self._manager = manager
        self._geometry = geometry
        self._counters = counters
        self._records = records
        self._jobs = jobs
        self._fences = fences
        self._loads = loads
        self._accounting = accounting
        self._block_events = block_events
        self._pending_report: set[str] = set()

    @property
    def has_pending_report(self) -> bool:
        """Whether the end of a request's last store is still to be told."""
        return bool(self._pending_report)

    def handle_output(self, output: WorkerOutput) -> LoadReport:
        """Workers ended jobs. Tells which loads and last stores are over, and which blocks hold no valid data."""
        finished: set[str] = set()
        invalid: set[int] = set()
        for job_id, count in output.finished.items():
            status = self._jobs.report_job(job_id, count, output.failed_keys.get(job_id, frozenset()))
            if status is None:
                continue
            if status.job.is_store:
                self._manager.complete_store(status.job.slots, frozenset(status.failed))
                if not status.stale:
                    self._accounting.note_stored(status.job, status.failed)
                self.end_store(status.job)
            else:
                load = self._end_load_job(status)
                if load is not None:
                    finished.add(status.job.request_id)
                    invalid |= self._invalid_blocks(load)
                    self._resume_request(status.job.request_id, load)
        sent, self._pending_report = frozenset(self._pending_report), set()
        return LoadReport(frozenset(finished), frozenset(invalid), sent)

    def _end_load_job(self, status: JobStatus) -> EndedLoad | None:
        """A job of a load is over, and perhaps the load with it."""
        job = status.job
        if status.failed and not status.stale:
            void = [key for key, ref in zip(job.keys, job.slots, strict=True) if ref == VOID_SLOT]
            self._counters.loads_failed += len(status.failed.difference(void))
        self._manager.complete_load(job.slots, frozenset(status.failed))
        self._fences.lift_fences(job.job_id)
        return self._loads.end_job(status)

    def _invalid_blocks(self, load: EndedLoad) -> set[int]:
        """Blocks of failed chunks. Of a load that a reset has overtaken, all of them: its data is of the past.

        Also all of them where a group has a window: it was loaded for one end only, so no shorter part is of use.
        """
        if not load.has_blocks:
            return set()
        if load.stale or (load.failed and self._geometry.has_windows):
            return set(load.transfer.block_ids)
        if not load.failed:
            return set()
        parts = zip(load.transfer.keys, chunk_blocks(load.transfer, self._geometry.blocks_per_chunk), strict=True)
        return {block_id for key, (_, ids) in parts if key in load.failed for block_id in ids}

    def _resume_request(self, request_id: str, load: EndedLoad) -> None:
        """The request goes on, or is forgotten."""
        record = self._records.get(request_id)
        if record is None:
            return
        if load.failed or load.stale:
            record.offer_again(load.good_tokens)  # what is recomputed shall be stored again
        record.load_job = None
        record.apply(RequestEvent.LOAD_ENDED)
        self.forget_if_done(record)

    def end_store(self, job: TransferJob) -> None:
        """A store is over: its blocks are fenced no more, and its request is forgotten if it waited for that."""
        self._fences.lift_fences(job.job_id)
        self._block_events.on_store_ended(job.keys)
        record = self._records.get(job.request_id)
        if record is not None:
            record.store_jobs.discard(job.job_id)
            self.forget_if_done(record)

    def forget_if_done(self, record: RequestRecord) -> None:
        """Forget a finished request when its last job has ended."""
        if record.state is RequestState.FINISHED and not record.has_jobs:
            self._records.pop(record.ctx.request_id, None)
            if record.held_for_stores:
                self._pending_report.add(record.ctx.request_id)
            self._accounting.close_stats(record.ctx.request_id)
