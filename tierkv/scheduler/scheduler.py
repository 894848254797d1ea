"""The one scheduler: per request, what to load, what to store, and when to say "ask me again".

An engine calls it in the order of docs/how-to/drive-tierkv.md, on one thread. It starts no thread, reads no clock and
performs no I/O: chunks move because :class:`~tierkv.manager.manager.OffloadManager` and the workers are told so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tierkv.errors import EngineProtocolError
from tierkv.manager.manager import OffloadManager
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.block_events import BlockEvents
from tierkv.scheduler.checking import check_scheduler
from tierkv.scheduler.jobs import Fences, JobStatus, JobTable
from tierkv.scheduler.limits import SchedulerLimits
from tierkv.scheduler.load_plan import LoadPlan, plan_load
from tierkv.scheduler.lookups import Lookups
from tierkv.scheduler.records import RequestRecord
from tierkv.scheduler.request_state import RequestEvent, RequestState
from tierkv.scheduler.stores import Stores
from tierkv.types.cache_events import CacheEvent
from tierkv.types.engine import BlockTables, LoadReport, Request, ScheduledRequest, StepOutput
from tierkv.types.geometry import Geometry
from tierkv.types.transfers import ConnectorMeta, TransferJob, WorkerOutput, chunk_blocks


class OffloadScheduler:
    """See the module's docstring. Every method belongs to the engine's scheduler thread."""

    def __init__(  # noqa: PLR0913 - the composition root hands everything in
        self,
        manager: OffloadManager,
        geometry: Geometry,
        limits: SchedulerLimits,
        counters: CoreCounters,
        warn: Callable[[str], None] = lambda _: None,
        *,
        block_events: BlockEvents | None = None,
    ) -> None:
        """Wire the scheduler.

        ``warn`` is told what a request's parameters got wrong, ``block_events`` what is stored and for whom.
        """
        self._manager = manager
        self._geometry = geometry
        self._limits = limits
        self._counters = counters
        self._warn = warn
        self._lookups = Lookups(manager, limits.lookup_deadline_s, counters, waits_for_loads=limits.gpu_prefix_caching)
        self._records: dict[str, RequestRecord] = {}
        self._jobs = JobTable(limits.num_workers)
        self._fences = Fences()
        if block_events is None:
            block_events = BlockEvents(geometry, counters, warn, active=False)
        self._block_events = block_events
        self._stores = Stores(manager, geometry, limits, self._jobs, self._block_events)
        self._new_loads: list[TransferJob] = []
        self._to_flush: set[int] = set()

    # -- step --------------------------------------------------------------------------------------------------------

    def begin_step(self, now_s: float) -> None:
        """The time, in seconds on the stack's clock, that holds until the next call."""
        self._lookups.now_s = now_s
        self._lookups.sweep()

    # -- requests ----------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """A request has arrived. Harmless when repeated."""
        self._record(request)

    def _record(self, request: Request) -> RequestRecord:
        record = self._records.get(request.request_id)
        if record is None:
            record = self._records[request.request_id] = RequestRecord(request, self._geometry, self._warn)
        elif record.state is RequestState.FINISHED:
            raise EngineProtocolError(
                f"request {request.request_id!r} has finished and still has transfers in flight: use another id"
            )
        return record

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond ``num_computed_tokens`` can be loaded, and whether that happens asynchronously.

        Idempotent while nothing changes. What is answered stays held until :meth:`update_state_after_alloc`.

        Returns:
            (tokens, tokens > 0); or (None, False): ask again next step.

        Raises:
            EngineProtocolError: the request is already running or has finished.
        """
        record = self._record(request)
        self._counters.lookups += 1
        if record.state is RequestState.RUNNING:
            self._start_over(record)  # allocated and never scheduled, or preempted without notice
        if record.has_jobs:
            self._counters.deferrals += 1
            return None, False
        record.extend_keys(self._geometry)
        record.computed_tokens = num_computed_tokens
        tokens = self._lookups.answer(record, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: BlockTables, num_external_tokens: int) -> None:
        """Blocks were allocated for the local and ``num_external_tokens`` external tokens: start the load.

        Raises:
            EngineProtocolError: more tokens than were offered, tables that cannot take them, or a load still runs.
        """
        record = self._record(request)
        if record.state is RequestState.LOADING:
            raise EngineProtocolError(f"request {request.request_id!r} was allocated again before its load had ended")
        offered = record.hit_tokens if record.state is RequestState.OFFERED else 0
        if num_external_tokens > offered:
            raise EngineProtocolError(
                f"request {request.request_id!r}: {num_external_tokens} external tokens, but {offered} were offered"
            )
        if num_external_tokens <= 0:
            self._close_lookup(record)
            record.apply(RequestEvent.SCHEDULED)
            return
        plan = plan_load(record, self._geometry, blocks, record.computed_tokens, num_external_tokens)
        self._start_load(record, plan, num_external_tokens)

    def _start_load(self, record: RequestRecord, plan: LoadPlan, external_tokens: int) -> None:
        grant = self._manager.prepare_load(plan.keys, record.ctx)
        job = TransferJob(
            job_id=self._jobs.new_id(),
            request_id=record.ctx.request_id,
            is_store=False,
            keys=grant.keys,
            slots=grant.slots,
            chunk_groups=plan.chunk_groups,
            block_ids=plan.block_ids,
            group_sizes=plan.group_sizes,
            block_indices=plan.block_indices,
        )
        self._account(record, plan, grant.sources, external_tokens)
        self._lookups.close(record)
        record.apply(RequestEvent.LOAD_STARTED)
        record.load_job = job.job_id
        self._jobs.start(job)
        self._lookups.loading_started(job.keys)
        self._to_flush |= self._fences.crossed(job.block_ids)
        total = record.computed_tokens + external_tokens
        for group in record.groups:  # prefix hits are in the tiers already
            group.next_stored = max(group.next_stored, -(-total // group.chunk_tokens))
        self._new_loads.append(job)

    def _account(self, record: RequestRecord, plan: LoadPlan, sources: Sequence[str], external_tokens: int) -> None:
        """Which tier served which tokens, told by the first group's chunks."""
        start, end = record.computed_tokens, record.computed_tokens + external_tokens
        size = record.groups[0].chunk_tokens
        chunk = start // size
        for group, source in zip(plan.chunk_groups, sources, strict=True):
            self._counters.chunks_hit[source] += 1
            if group == 0:
                tokens = min(end, (chunk + 1) * size) - max(start, chunk * size)
                self._counters.tokens_loaded[source] += tokens
                chunk += 1

    def _close_lookup(self, record: RequestRecord) -> None:
        self._manager.release(record.ctx)
        self._lookups.close(record)

    def request_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, None]:  # noqa: ARG002 - contract
        """The request ended, in whatever way: its blocks may be reused at once, fences guard what is in flight.

        The tables known from scheduling are used; ``block_ids`` is part of the contract that engines follow.
        """
        record = self._records.get(request.request_id)
        if record is None or record.state is RequestState.FINISHED:
            return False, None
        self._close_lookup(record)
        if record.state is RequestState.RUNNING and record.load_job is None:
            self._stores.final_pass(record)
        for job_id in self._job_ids(record):
            self._fences.put(self._jobs.job(job_id))
        record.apply(RequestEvent.FINISHED)
        for group in record.groups:
            self._manager.touch(group.keys[: record.computed_tokens // group.chunk_tokens])
        self._forget_if_done(record)
        return False, None

    @staticmethod
    def _job_ids(record: RequestRecord) -> Iterable[int]:
        return record.store_jobs if record.load_job is None else {record.load_job, *record.store_jobs}

    def _forget_if_done(self, record: RequestRecord) -> None:
        if record.state is RequestState.FINISHED and not record.has_jobs:
            self._records.pop(record.ctx.request_id, None)

    # -- instructions ------------------------------------------------------------------------------------------------

    def build_connector_meta(self, step: StepOutput) -> ConnectorMeta:
        """This step's loads, stores and flushes, for every worker. Called once per step, after scheduling."""
        for request_id in step.preempted:
            self._preempt(request_id)
        for scheduled in step.scheduled:
            self._schedule(scheduled)
        if self._records and all(record.state is RequestState.FINISHED for record in self._records.values()):
            self._to_flush |= self._jobs.live_ids()  # no later step may come (S81)
        meta = ConnectorMeta(tuple(self._new_loads), self._stores.take_jobs(), frozenset(self._to_flush))
        self._new_loads, self._to_flush = [], set()
        return meta

    def _preempt(self, request_id: str) -> None:
        record = self._records.get(request_id)
        if record is not None and record.state is RequestState.RUNNING:
            self._start_over(record)

    def _start_over(self, record: RequestRecord) -> None:
        """A running request has lost its blocks; whoever gets them must not overwrite what is still being stored."""
        self._to_flush |= set(self._job_ids(record))
        record.apply(RequestEvent.PREEMPTED)
        record.replace_blocks(tuple(() for _ in record.groups), whole_table=True)

    def _schedule(self, scheduled: ScheduledRequest) -> None:
        record = self._records.get(scheduled.request_id)
        if record is None or record.state is RequestState.FINISHED:
            return
        if record.state is RequestState.LOADING:
            raise EngineProtocolError(f"request {scheduled.request_id!r} was scheduled before its load had ended")
        if record.state is not RequestState.RUNNING:
            self._close_lookup(record)
        record.apply(RequestEvent.SCHEDULED)
        record.replace_blocks(scheduled.block_ids, whole_table=scheduled.replaces_table)
        for ids in scheduled.block_ids:
            self._to_flush |= self._fences.crossed(ids)
        record.computed_tokens = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        self._stores.offer(record)

    # -- results -----------------------------------------------------------------------------------------------------

    def update_connector_output(self, output: WorkerOutput) -> LoadReport:
        """Workers ended jobs. Tells which requests' loads are over and which blocks of theirs hold no valid data."""
        finished: set[str] = set()
        invalid: set[int] = set()
        for job_id, count in output.finished.items():
            status = self._jobs.report(job_id, count, output.failed_keys.get(job_id, frozenset()))
            if status is None:
                continue
            if status.job.is_store:
                self._manager.complete_store(status.job.slots, frozenset(status.failed))
            else:
                if not status.stale:
                    self._lookups.loading_ended(status.job.keys)
                self._manager.complete_load(status.job.slots, frozenset(status.failed))
                finished.add(status.job.request_id)
                invalid |= self._invalid_blocks(status)
            self._end_job(status)
        return LoadReport(frozenset(finished), frozenset(invalid))

    def _invalid_blocks(self, status: JobStatus) -> set[int]:
        """Blocks of failed chunks. Of a load that a reset has overtaken, all of them: its data is of the past."""
        job = status.job
        if status.stale:
            return set(job.block_ids)
        self._counters.loads_failed += len(status.failed)
        parts = zip(job.keys, chunk_blocks(job, self._geometry.blocks_per_chunk), strict=True)
        return {block_id for key, (_, ids) in parts if key in status.failed for block_id in ids}

    def _end_job(self, status: JobStatus) -> None:
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
        self._forget_if_done(record)

    # -- whole cache -------------------------------------------------------------------------------------------------

    def take_events(self) -> list[CacheEvent]:
        """What became available or left since the last call."""
        return self._manager.take_events()

    def reset_cache(self) -> None:
        """Forget everything in the host tier; between steps only.

        Jobs in flight are flushed in the next step; stores that no worker has heard of yet are taken back.

        Raises:
            EngineProtocolError: called inside a step, with loads not yet handed out (S94).
        """
        if self._new_loads:
            raise EngineProtocolError(
                "reset_cache was called inside a step: call it before scheduling or after results"
            )
        self._lookups.reset()
        self._manager.reset_cache()
        for job in self._stores.take_jobs():
            self._take_back(job)
        self._jobs.mark_stale()
        self._to_flush |= self._jobs.live_ids()
        for record in self._records.values():
            record.offer_again()

    def _take_back(self, job: TransferJob) -> None:
        self._manager.complete_store(job.slots)  # its chunks were dropped: this only frees their slots
        self._end_job(self._jobs.take_back(job.job_id))

    @property
    def has_pending_work(self) -> bool:
        """Whether a transfer between GPU and host is in flight."""
        return bool(self._jobs)

    def validate(self) -> None:
        """Check every invariant of scheduler and manager.

        Raises:
            InvariantError: one is broken; names it.
        """
        self._manager.validate()
        check_scheduler(self._records, self._jobs, self._fences, self._lookups.open_ids)
