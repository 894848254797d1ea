"""Completions: worker reports end jobs, resume or forget requests, and become the report to the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

from tierkv.manager.manager import OffloadManager
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.events.block_events import BlockEvents
from tierkv.scheduler.jobs.jobs import Fences, JobStatus, JobTable
from tierkv.scheduler.load.load_plan import blocks_of_keys
from tierkv.scheduler.load.loads import EndedLoad, Loads
from tierkv.scheduler.requests.accounting import Accounting
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.scheduler.requests.request_state import RequestEvent, RequestState
from tierkv.types.engine import NULL_BLOCK_ID, LoadReport
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key
from tierkv.types.transfers import VOID_SLOT, SlotRef, TransferJob, WorkerOutput

_NO_KEYS: frozenset[Key] = frozenset()

END_KEYS = 1
"""Key operations that the end of a store costs beside its chunks: job, fences and request are forgotten."""


class CompletionHandler:
    """Handles worker reports. Sans-IO; shares records, jobs and fences with the scheduler.

    The chunks of ended stores are taken in within a share of the step's budget; the rest waits for the next step, and
    its jobs stay in flight. Ended loads are handled at once, because the engine may schedule their requests.
    """

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
        self._stored: deque[JobStatus] = deque()  # stores that have ended, and of which not all chunks were taken in
        self._taken = 0  # number of slots of the first one, from the tail, that were taken in
        self._share = manager.budget.share()
        self._pending_report: set[str] = set()  # finished requests whose last store has ended

    @property
    def has_pending_report(self) -> bool:
        """Whether the end of a request's last store is not reported yet."""
        return bool(self._pending_report)

    @property
    def has_stores(self) -> bool:
        """Whether chunks of ended stores wait to be taken in."""
        return bool(self._stored)

    def handle_output(self, output: WorkerOutput, *, holds_stores: bool = False) -> LoadReport:
        """Handle worker reports. holds_stores: ended stores wait for the next :meth:`end_stores`.

        Returns:
            Ended loads, requests whose last store has ended, and blocks without valid data.
        """
        self._jobs.check_reports(output.finished)
        finished: set[str] = set()
        invalid: list[frozenset[int]] = []
        failed_keys, loads = output.failed_keys, list[JobStatus]()
        report_job, note_stored = self._jobs.report_job, self._stored.append
        for job_id, count in output.finished.items():
            failed = failed_keys.get(job_id, _NO_KEYS) if failed_keys else _NO_KEYS
            status = report_job(job_id, count, failed)
            if status is None:
                continue
            if status.job.is_store:
                note_stored(status)
            else:
                self._jobs.remove(job_id)
                loads.append(status)
        if loads:
            self._free_slots(loads)
        for status in loads:
            self._fences.lift_fences(status.job.job_id)
            load = self._loads.end_job(status)
            if load is not None:
                finished.add(status.job.request_id)
                invalid.append(self._invalid_blocks(load, self._records.get(status.job.request_id)))
                self._resume_request(status.job.request_id, load)
        if not holds_stores:
            self.end_stores()
        stored, self._pending_report = frozenset(self._pending_report), set()
        blocks = invalid[0] if len(invalid) == 1 else frozenset(chain.from_iterable(invalid))
        return LoadReport(frozenset(finished), blocks, stored)

    def end_stores(self, *, whole: bool = False) -> None:
        """Take in chunks of ended stores, the oldest job first, within the share of this step.

        Those without a failure are taken in together, because a batch of many costs about as much as one job.

        whole: all of them, for a flush, which is not part of a step.
        """
        good: list[SlotRef] = []
        ended: list[JobStatus] = []
        while self._stored:
            status = self._stored[0]
            left = len(status.job.slots) - self._taken
            count = left if whole else self._share.take(left)
            if not count:
                break
            # From the tail, because what becomes readable first is evicted first (S54).
            slots = status.job.slots[left - count : left]
            self._taken += count
            if status.failed:
                self._manager.complete_store(slots, status.failed)
            else:
                good += slots
            if count < left:
                break
            self._stored.popleft()
            self._taken = 0
            ended.append(status)
            if not whole:
                self._share.take(END_KEYS)
        if good:
            self._manager.complete_store(good)
        for status in ended:
            self._jobs.remove(status.job.job_id)
            if not status.stale:
                self._accounting.note_stored(status.job, status.failed)
            self.end_store(status.job)

    def _free_slots(self, ended: Sequence[JobStatus]) -> None:
        """Free the slots of load jobs. Those without a failure form one batch: it costs about as much as one job."""
        good: list[SlotRef] = []
        for status in reversed(ended):  # the manager goes through a batch from its end
            job = status.job
            if not status.failed:
                good += job.slots
                continue
            failed = status.failed
            bad = [ref for key, ref in zip(job.keys, job.slots, strict=True) if key in failed]
            if not status.stale:
                self._counters.loads_failed += len(bad) - bad.count(VOID_SLOT)
            self._manager.complete_load(job.slots, bad)
        if good:
            self._manager.complete_load(good)

    def _invalid_blocks(self, load: EndedLoad, record: RequestRecord | None) -> frozenset[int]:
        """Blocks of failed chunks; all blocks of a load that was in flight at a reset, since its data is outdated.

        Also all of them if a group has a window: the load serves one end only, and no shorter part is useful. And if
        the request was dropped: the engine goes on with it, and what was loaded may be of another one.
        """
        if record is not None and record.is_dropped:
            return frozenset(load.transfer.block_ids) - {NULL_BLOCK_ID}
        if not load.has_blocks:
            return frozenset()
        if not (load.failed or load.stale):
            return frozenset()
        keys, failed = load.transfer.keys, load.failed
        if load.stale or self._geometry.has_windows or all(map(failed.__contains__, keys)):
            return frozenset(load.transfer.block_ids)
        return frozenset(blocks_of_keys(load.transfer, failed, self._geometry.blocks_per_chunk))

    def _resume_request(self, request_id: str, load: EndedLoad) -> None:
        """Resume the request after its load, or forget it."""
        record = self._records.get(request_id)
        if record is None:
            return
        if load.failed or load.stale:
            record.offer_again(load.good_tokens)  # recomputed chunks are stored again
        record.load_job = None
        record.apply(RequestEvent.LOAD_ENDED)
        self.forget_if_done(record)

    def end_store(self, job: TransferJob) -> None:
        """End a store: lift the fences on its blocks, and forget its request if that was its last job."""
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
