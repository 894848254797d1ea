"""Scheduler of one engine: per request, the chunks to load, the chunks to store, and when a lookup is deferred.

An engine calls it in the order of docs/how-to/drive-tierkv.md, on one thread. Manager and workers move the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count

from tierkv.errors import EngineProtocolError
from tierkv.manager.contract import ResetScope
from tierkv.manager.manager import OffloadManager
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.events.block_events import BlockEvents
from tierkv.scheduler.introspection import SchedulerView, check_scheduler
from tierkv.scheduler.jobs.block_tables import RequestTables
from tierkv.scheduler.jobs.completions import CompletionHandler
from tierkv.scheduler.jobs.jobs import Fences, JobTable
from tierkv.scheduler.limits import SchedulerLimits, store_policy
from tierkv.scheduler.load.loads import Loads
from tierkv.scheduler.lookup.load_or_recompute import LoadOrRecompute
from tierkv.scheduler.lookup.loads_in_flight import LoadsInFlight
from tierkv.scheduler.lookup.lookups import Lookups
from tierkv.scheduler.lookup.prefill_rate import PrefillRate
from tierkv.scheduler.lookup.read_ahead import ReadAhead
from tierkv.scheduler.requests import rules
from tierkv.scheduler.requests.accounting import Accounting
from tierkv.scheduler.requests.hint_reader import HintReader
from tierkv.scheduler.requests.observations import end_of
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.scheduler.requests.request_state import RequestEvent, RequestState
from tierkv.scheduler.running import RunningRequests
from tierkv.scheduler.store.plans import make_store_plan
from tierkv.scheduler.store.stores import Stores
from tierkv.types.engine import BlockTables, LoadReport, Request, StepOutput
from tierkv.types.geometry import Geometry
from tierkv.types.transfers import ConnectorMeta, WorkerOutput

_NO_INSTRUCTIONS = ConnectorMeta()


class OffloadScheduler:
    """Entry point of the scheduler. Every method belongs to the engine's scheduler thread.

    Args:
        manager: answers existence, grants slots.
        geometry: sizes of groups and chunks.
        limits: bounds and options.
        counters: for metrics.
        warn: called with a message for each fault in the parameters of a request.
        block_events: records tokens of stored chunks for events; None: events carry keys only.
    """

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
        self._manager = manager
        self._geometry = geometry
        self._limits = limits
        self._counters = counters
        self._hints = HintReader(lambda: manager.tier_names, counters, warn)
        self._prefill = PrefillRate(limits.prefill_tokens_per_s)
        choice = LoadOrRecompute(manager, geometry, limits, counters, self._prefill)
        in_flight = LoadsInFlight(manager.budget.share(), active=limits.gpu_prefix_caching)
        self._ahead = ReadAhead(manager, geometry, limits, counters, choice)
        self._lookups = Lookups(manager, limits.lookup_deadline_s, counters, choice, in_flight)
        self._accounting = Accounting(geometry, counters)
        self.request_account = self._accounting.account_of  # of a request so far; kept for a while after its end
        self._numbers = count(1)  # of the requests, since the stack opened
        self._records: dict[str, RequestRecord] = {}
        self._jobs = JobTable(limits.num_workers)
        self.view = SchedulerView(manager, self._records, self._jobs)
        self._fences = Fences()
        if block_events is None:
            block_events = BlockEvents(geometry, counters, warn, active=False)
        self._stores = Stores(manager, geometry, limits, counters, self._jobs, self._fences, block_events)
        self._plan = make_store_plan(manager, geometry, limits, self._stores)
        self.register_free_queue = self._plan.register_free_queue  # once, before the first step; for `lazy` only
        self._tables = RequestTables(geometry, self._fences, self._plan.on_overwritten)
        self._running = RunningRequests(
            self._records, self._tables, self._stores, self._plan, self._prefill, self._start
        )
        self.advance, self.decodes = self._running.advance, self._running.decodes
        self._loads = Loads(manager, geometry, limits, counters, self._jobs, self._lookups, in_flight, self._accounting)
        self._completions = CompletionHandler(
            manager, geometry, counters,
            self._records, self._jobs, self._fences, self._loads, self._accounting, block_events,
        )  # fmt: skip
        self._to_flush: set[int] = set()

    # -- step --------------------------------------------------------------------------------------------------------

    def begin_step(self, now_s: float) -> None:
        """Begin a step at ``now_s``, in seconds on the stack's clock; the time holds until the next call."""
        self._completions.end_stores()
        self._lookups.begin_step(now_s)
        self._ahead.begin_step()
        self._prefill.step_began(now_s)
        self._loads.begin_step()

    def may_rest(self) -> bool:
        """Whether requests run, and none waits for a tier: then a few steps may pass without :meth:`begin_step`."""
        return not (self._completions.has_stores or self._loads.has_streams) and self._running.may_rest()

    # -- requests ----------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Register a request that has arrived. May be repeated.

        Raises:
            EngineProtocolError: its id is no text or empty, or that of a live request with another prompt, or of a
                finished one whose end is not reported yet: of its load, or of its stores to an engine with
                ``delays_free_blocks``; or its lengths or hashes are of a wrong form.
        """
        rules.check_new_request("on_new_request", request)
        earlier = self._records.get(request.request_id)
        if earlier is not None and earlier.state is RequestState.FINISHED:
            self._free_request_id(earlier)
        self._record("on_new_request", request)

    def _free_request_id(self, record: RequestRecord) -> None:
        """Free the id of a finished request: its stores lose their owner, and fences guard their blocks."""
        if not record.is_loading and not record.held_for_stores:
            for job_id in record.store_jobs:
                self._jobs.disown(job_id)
            record.store_jobs.clear()
            self._completions.forget_if_done(record)

    def _record(self, call: str, request: Request) -> RequestRecord:
        record = rules.known(self._records, call, request)
        if record is None:
            rules.check_new_request(call, request)
            hints = self._hints.read_hints(request.request_id, request.kv_transfer_params)
            record = RequestRecord(request, self._geometry, hints, number=next(self._numbers))
            rules.check_hashes(record, rules.HASHES_CHECKED_MAX)
            self._records[request.request_id] = record
            record.stats = self._accounting.open_stats(request.request_id)
            record.resets = self._running.resets
            record.watcher = self.view.watcher
            self._ahead.arrived(record)
            record.store_policy = store_policy(record.ctx.kv_transfer_params, self._limits.store_policy)
        else:
            if request is not record.request or record.state is RequestState.FINISHED:
                rules.check_same_request(record, request)
            record.note_resets(self._running.resets)
        return record

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond ``num_computed_tokens`` that can be loaded, and whether the load is asynchronous.

        Idempotent while nothing changes. The chunks of an answer stay held until :meth:`update_state_after_alloc`. A
        running request counts as preempted from now on: its next entry in a step must give its whole table.

        Returns: (tokens, tokens > 0); or (None, False): ask again in the next step.

        Raises:
            EngineProtocolError: the request has finished and still has transfers in flight, or another prompt; its id
                is empty, its hashes break a rule, or the number of computed tokens is negative. Nothing has changed.
        """
        record = self._record("get_num_new_matched_tokens", request)
        rules.check_hashes(record, rules.HASHES_CHECKED_MAX)
        rules.check_computed(request, num_computed_tokens)
        self._counters.lookups += 1
        if record.state is RequestState.RUNNING:
            self._start_over(record)  # allocated and never scheduled, or preempted without a call
        if not (has_jobs := record.has_jobs):
            self._ahead.asked(record)
        if has_jobs or not record.extend_keys(self._geometry, self._lookups.share):
            self._counters.deferrals += 1
            self._accounting.note_deferred(record.stats, self._lookups.now_s)
            return None, False
        record.computed_tokens = num_computed_tokens
        tokens = self._lookups.answer(record, num_computed_tokens)
        self._note_answer(record, tokens)
        return tokens, bool(tokens)

    def _note_answer(self, record: RequestRecord, tokens: int | None) -> None:
        """Update the request's statistics, and report its arrival to policies with its first answer."""
        if tokens is None:
            self._accounting.note_deferred(record.stats, self._lookups.now_s)
            return
        self._ahead.ended(record, tokens)
        self._accounting.note_answered(record.stats, self._lookups.now_s, self._lookups.take_tier_s(record))
        record.stats.local_tokens = record.computed_tokens
        if not record.has_arrived:
            self._lookups.report_arrival(record, tokens)

    def update_state_after_alloc(self, request: Request, blocks: BlockTables, num_external_tokens: int) -> None:
        """Start the load of ``num_external_tokens`` into the allocated blocks.

        Args:
            request: the request.
            blocks: its block table per group, for the local and the external tokens.
            num_external_tokens: tokens to load; at most as many as were offered.

        Raises:
            EngineProtocolError: more tokens than were offered, a part of them where a group has a window, tables that
                cannot take them, or a load still runs. Nothing has changed then.
        """
        record = self._record("update_state_after_alloc", request)
        self._lookups.refresh(record)
        rules.check_allocation(record, self._geometry, blocks, num_external_tokens)
        if not num_external_tokens:
            if record.state is not RequestState.RUNNING:  # RUNNING: the engine repeats the call after the load
                self._ahead.allocated(record, self._tables.num_blocks)
                self._start(record, record.computed_tokens)
            return
        self._ahead.allocated(record, self._tables.num_blocks)
        self._loads.start_load(record, blocks, num_external_tokens)
        self._to_flush |= self._tables.overwrite_blocks(self._loads.take_written())

    def _close_lookup(self, record: RequestRecord) -> None:
        self._ahead.ended(record)
        tier_s = self._lookups.take_tier_s(record)
        self._manager.passages.release(record.ctx.request_id)
        self._lookups.close_lookup(record)
        self._accounting.note_answered(record.stats, self._lookups.now_s, tier_s)

    def _start(self, record: RequestRecord, computed_tokens: int) -> None:
        """Let a request run without a load, after ``computed_tokens`` that the engine has."""
        self._close_lookup(record)
        self._accounting.note_start(record.request.num_tokens, computed_tokens)
        record.apply(RequestEvent.SCHEDULED)

    def request_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, None]:  # noqa: ARG002 - contract
        """End a request, for whatever reason.

        The tables known from scheduling are used; ``block_ids`` is part of the contract that engines follow.

        Returns:
            (False, None): its blocks may be reused at once; fences guard transfers in flight. (True, None), only to an
                engine with ``delays_free_blocks``: its blocks may be reused when :class:`LoadReport` names the request.
        """
        record = rules.known(self._records, "request_finished", request)
        if record is None or record.state is RequestState.FINISHED:
            return False, None
        rules.check_hashes(record)
        record.note_resets(self._running.resets)
        if record.state is RequestState.RUNNING:
            self._plan.on_finished(record)
        else:
            self._close_lookup(record)
        return self._end(record), None

    def _end(self, record: RequestRecord) -> bool:
        """End a request. Returns whether the engine must keep its blocks."""
        self._ahead.allocated(record, self._tables.num_blocks)
        self._loads.stop_load(record)
        for job_id in self._job_ids(record):
            self._fences.fence_blocks(self._jobs.job(job_id))
        record.apply(RequestEvent.FINISHED)
        self._prefill.expect(record, 0)
        self._tables.clear_table(record)
        hold = self._limits.delays_free_blocks and record.has_jobs
        record.held_for_stores = hold and not record.is_loading
        for group in record.groups:
            self._manager.touch(group.useful_keys(record.computed_tokens))
        if self._manager.wants_observations:
            self._manager.observe_request(end_of(record, self._lookups.now_s))
        self._completions.forget_if_done(record)
        return hold

    def drop_request(self, request_id: str) -> None:
        """Stop to serve a request that broke a rule, while the engine goes on with it.

        Its transfers in flight are guarded as those of a finished request. Blocks of later entries count as written.
        All blocks of a load in flight will be reported as without valid data.
        """
        self._counters.requests_dropped += 1
        record = self._records.get(request_id)
        if record is not None and record.state is not RequestState.FINISHED:
            record.is_dropped = True
            if record.state is not RequestState.RUNNING:
                self._close_lookup(record)
            self._end(record)

    def _job_ids(self, record: RequestRecord) -> Iterable[int]:
        return {*self._loads.jobs_of(record), *record.store_jobs}

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens that the engine computes per second; None: not known yet."""
        return self._prefill.tokens_per_s

    # -- instructions ------------------------------------------------------------------------------------------------

    def build_connector_meta(self, step: StepOutput, *, rests: bool = False) -> ConnectorMeta:
        """Loads, stores and flushes of this step, for every worker. Called once per step, after scheduling.

        rests: the step only decodes and leaves the tiers alone; the chunks that it completes may wait.

        Raises:
            EngineProtocolError: a request is scheduled twice, or still loads; its hashes break a rule; its block table
                does not hold its tokens; or a block of its load is the null block. Nothing has changed then.
        """
        self._running.rests = rests
        if has_streams := self._loads.has_streams:
            self._loads.check_blocks()
        if step.scheduled or step.preempted:
            self._running.check(step.scheduled, step.preempted)
            for request_id in step.preempted:
                self._preempt(request_id)
            self._to_flush |= self._running.apply(step.scheduled)
        self._plan.end_step(rests=rests)
        if has_streams:
            self._loads.make_due_jobs()
            self._to_flush |= self._tables.overwrite_blocks(self._loads.take_written())
        if self._running.is_idle():
            self._to_flush |= self._jobs.oldest_ids(self._stores.job_chunks_max)  # perhaps no step follows (S81)
        if not (self._to_flush or self._loads.has_new_jobs or self._stores.new_jobs):
            return _NO_INSTRUCTIONS
        meta = ConnectorMeta(self._loads.take_jobs(), self._stores.take_jobs(), frozenset(self._to_flush))
        self._to_flush = set()
        return meta

    def _preempt(self, request_id: str) -> None:
        record = self._records.get(request_id)
        if record is not None and record.state is RequestState.RUNNING:
            self._plan.on_preempted(record)
            self._start_over(record)

    def _start_over(self, record: RequestRecord) -> None:
        """Preempt a running request. Jobs that still read its lost blocks must be flushed before these are written."""
        self._to_flush |= set(self._job_ids(record))
        record.apply(RequestEvent.PREEMPTED)
        self._tables.clear_table(record)

    # -- completions ---------------------------------------------------------------------------------------------------

    def update_connector_output(self, output: WorkerOutput, *, holds_stores: bool = False) -> LoadReport:
        """Handle worker reports. holds_stores: ended stores wait for the next :meth:`begin_step`.

        Returns:
            Ended loads, requests whose last store has ended, and blocks without valid data.
        """
        return self._completions.handle_output(output, holds_stores=holds_stores)

    def end_stores(self) -> None:
        """Take in all chunks of ended stores, whatever the budget. Not for a step."""
        self._completions.end_stores(whole=True)

    # -- whole cache -------------------------------------------------------------------------------------------------

    def reset_cache(self, scope: ResetScope = "host") -> None:
        """Forget all chunks of the host tier, or of all tiers; between steps only.

        Jobs in flight are flushed in the next step; stores that were not handed to workers are withdrawn.

        Raises:
            EngineProtocolError: called inside a step, with loads not yet handed out (S94); or a tier cannot be emptied.
        """
        if self._loads.has_new_jobs:
            raise EngineProtocolError(
                "reset_cache was called inside a step: call it before scheduling or after results"
            )
        self._manager.check_reset(scope)
        self._lookups.reset()
        self._loads.reset()
        self._manager.reset_cache(scope)
        for job in self._stores.take_jobs():
            self._manager.complete_store(job.slots)  # frees the slots; the chunks were dropped already
            self._completions.end_store(self._jobs.remove(job.job_id).job)
        self._jobs.mark_stale()
        self._to_flush |= self._jobs.live_ids()
        self._running.resets += 1
        self._plan.reset()

    @property
    def has_transfers(self) -> bool:
        """Whether a transfer between GPU and host is in flight, or the end of one is not reported yet."""
        return bool(self._jobs) or self._completions.has_pending_report

    @property
    def holds_chunks(self) -> bool:
        """Whether chunks that requests completed in a rest are still to be offered."""
        return self._plan.holds_chunks

    @property
    def has_pending_work(self) -> bool:
        """Whether transfers are in flight, chunks are held, or a load continues when its next chunks have arrived."""
        return self.has_transfers or self._loads.has_streams or self._plan.holds_chunks

    def validate(self) -> None:
        """Check every invariant of scheduler and manager.

        Raises:
            InvariantError: an invariant is broken; names it.
        """
        self._manager.validate()
        self._tables.validate()
        self._loads.validate()
        check_scheduler(self._records, self._jobs, self._fences, self._lookups.open_ids, self._loads.jobs_of)
