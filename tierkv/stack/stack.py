"""Stack in service under tierkv's own scheduler: the calls that an engine makes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from tierkv.errors import EngineProtocolError
from tierkv.manager.contract import ResetScope
from tierkv.metrics.stack_stats import StackStats
from tierkv.scheduler.requests import rules
from tierkv.scheduler.requests.record import keys_of
from tierkv.scheduler.scheduler import OffloadScheduler
from tierkv.stack.core import StackCore, check_scope
from tierkv.stack.journal import StepJournal
from tierkv.stack.remote_worker import WorkerSetup, setup_of_rank
from tierkv.stack.views.events import StackEvents
from tierkv.stack.views.introspection import StackIntrospection
from tierkv.stack.views.measurements import StackMetrics
from tierkv.stack.views.tiers import StackTiers
from tierkv.stack.wiring import StackWiring
from tierkv.types.account import RequestAccount
from tierkv.types.engine import BlockTables, FreeBlockQueue, LoadReport, Request, StepOutput
from tierkv.types.geometry import Geometry
from tierkv.types.namespace import Namespace
from tierkv.types.transfers import ConnectorMeta, WorkerOutput
from tierkv.worker.rank_reports import RankReports
from tierkv.worker.worker import Worker


class Stack:
    """An open stack. Scheduler calls belong to the engine's scheduler thread, each worker to that worker's thread.

    None of the calls of a step waits for a tier, and none raises because of one: a broken tier is a miss, and counted.
    EngineProtocolError means that the engine called out of order, or gave a foreign value: it names value and rule.
    """

    advance: Callable[[str, int, int], bool]
    """Count the tokens of a running request that gets no block, if the step does nothing else for it: its id, tokens
    computed before this step, tokens computed in it. To be called before :meth:`build_connector_meta`. True: leave the
    request out of the step. False: nothing was counted, and the request belongs in the step. It is the scheduler's own
    method, because one is called per request and step."""
    workers: tuple[Worker, ...]
    """Workers of this process, by rank; empty where the workers are other processes."""
    namespace: Namespace
    """Identity of the engine's KV bytes: equal namespaces have interchangeable chunks."""
    geometry: Geometry
    """Sizes of groups and chunks."""
    tiers: StackTiers
    """Lower tiers: attach, detach, watch."""
    events: StackEvents
    """Cache events."""
    metrics: StackMetrics
    """Counters and histograms."""
    introspection: StackIntrospection
    """State of this stack, for tests and for debugging by hand."""

    def __init__(  # noqa: PLR0913, PLR0917 - the composition root hands everything in
        self,
        wiring: StackWiring,
        scheduler: OffloadScheduler,
        rank_reports: RankReports | None,
        journal: StepJournal,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Wire a stack; :func:`tierkv.open_stack` does it.

        Args:
            wiring: the collaborators.
            scheduler: decides what is loaded and stored.
            rank_reports: joins the reports of several workers, or of workers in other processes; None: one worker here.
            journal: records the steps.
            clock: seconds, monotonic.
            sleep: waits on the engine's thread, in :meth:`flush` only.
        """
        core = StackCore(wiring, scheduler.begin_step, scheduler.may_rest, scheduler.validate, journal, clock, sleep)
        stats = StackStats()
        self.advance = scheduler.advance
        self._decodes = scheduler.decodes
        self.workers = wiring.workers
        self.namespace = wiring.namespace
        self.geometry = wiring.geometry
        self.tiers = StackTiers(wiring.manager, wiring.dispatcher, wiring.changes, wiring.arena)
        self.events = core.events
        self.metrics = StackMetrics(wiring, stats, lambda: scheduler.prefill_tokens_per_s)
        self.introspection = StackIntrospection(wiring.manager, wiring.dispatcher)
        self._core = core
        self._scheduler = scheduler
        self._rank_reports = rank_reports
        self._counters = wiring.counters
        self._watch = core.watch
        self._forgetting = wiring.manager.forgetting
        self._stats = stats
        self._journal = journal
        self._is_recorded = journal.is_kept
        self._clock = clock
        self._begin_step = core.begin_step
        self._pending_report: LoadReport | None = None  # collected by a flush, for the next report to the engine

    # -- workers -----------------------------------------------------------------------------------------------------

    @property
    def worker(self) -> Worker:
        """The worker of rank 0, or the only one.

        Raises:
            EngineProtocolError: the workers are other processes.
        """
        if not self.workers:
            raise EngineProtocolError(
                "this stack has no worker in its own process: the engine said worker_processes=True. Give "
                "stack.worker_setup(rank) to each worker's process and call open_worker with it there"
            )
        return self.workers[0]

    def worker_setup(self, rank: int) -> WorkerSetup:
        """Everything that the process of a worker needs for ``open_worker``; it pickles.

        Raises:
            EngineProtocolError: there is no such rank, or the workers live in this process.
        """
        return setup_of_rank(self._core.wiring.setup, rank)

    def worker_lost(self, rank: int) -> LoadReport:
        """Report every pending transfer of a worker as failed, because its process has ended.

        Call it only when the process has exited for good: slots that it wrote to may be reused at once.

        Raises:
            EngineProtocolError: there is no such rank, or the stack has one worker in this process, which cannot be
                lost alone.
        """
        if self._rank_reports is None:
            raise EngineProtocolError("the only worker of this stack lives in its own process: it cannot be lost alone")
        return self.update_connector_output(self._rank_reports.output_of_lost(rank))

    # -- step --------------------------------------------------------------------------------------------------------

    def register_free_queue(self, queue: FreeBlockQueue, max_batched_tokens: int) -> None:
        """Register the engine's queue of free blocks; once, before the first step. ``store.plan = "lazy"`` needs it.

        Args:
            queue: the engine's free blocks, the next one to be allocated first.
            max_batched_tokens: tokens that the engine computes in one step at most.
        """
        self._scheduler.register_free_queue(queue, max_batched_tokens)

    def on_new_request(self, request: Request) -> None:
        """Register a request. A repeated call has no effect.

        Raises:
            EngineProtocolError: its id is empty, or belongs to a finished request with a pending report.
        """
        self._begin_step()
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of tokens beyond ``num_computed_tokens`` that can be loaded. Idempotent within a step.

        The offered chunks stay reserved until :meth:`update_state_after_alloc`.

        Returns:
            (tokens, tokens > 0); the load is asynchronous. (None, False): deferred, ask again next step.

        Raises:
            EngineProtocolError: the request has finished and still has transfers in flight, or its id is empty.
        """
        expired = self._counters.deadlines_expired
        self._begin_step()
        began_s = self._clock()
        answer = self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
        answered_s = self._clock()
        self._stats.looked_up(request.request_id, began_s, answered_s, answered=answer[0] is not None)
        self._watch.answered(request.request_id, expired)
        if self._is_recorded:
            has_expired = self._counters.deadlines_expired > expired
            self._journal.answered(request.request_id, num_computed_tokens, answer[0], expired=has_expired)
        return answer

    def update_state_after_alloc(self, request: Request, blocks: BlockTables, num_external_tokens: int) -> None:
        """Start the load of ``num_external_tokens`` tokens into allocated blocks; 0: load nothing.

        Raises:
            EngineProtocolError: more tokens than were offered, a part of them where a group has a window, tables too
                short for them, or a load still runs. The state is unchanged then.
        """
        self._begin_step()
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, step: StepOutput) -> ConnectorMeta:
        """Return this step's instructions to all workers. Call it exactly once per step, after scheduling.

        Raises:
            EngineProtocolError: a scheduled request still loads, or its block table is too short.
        """
        core, decodes = self._core, self._decodes(step)
        rests = decodes and not core.in_step and core.rests.take_step()
        if not rests:
            core.begin_step()
        meta = self._scheduler.build_connector_meta(step, rests=rests)
        if self._rank_reports is not None:
            self._rank_reports.add_jobs(meta)
        core.end_step(decodes=decodes)
        if self._is_recorded:
            self._journal.jobs_began(meta)
        return meta

    def update_connector_output(self, output: WorkerOutput) -> LoadReport:
        """Process the report of one worker or several.

        Returns:
            Requests whose load or last store has ended, and blocks without valid data.

        Raises:
            EngineProtocolError: it is no report of a worker, or names more workers than there are. Nothing has changed.
        """
        reported = output
        if output.__class__ is not WorkerOutput or output.finished != {} or output.transfers:  # most steps have none
            rules.check_report(output)
        if output.transfers:
            self._stats.transferred(output.transfers)
        if self._rank_reports is not None and not output.is_empty:
            output = self._rank_reports.merge_output(output)
        rests = self._core.rests.left > 0
        if not (output.is_empty or rests):
            self._core.update_time()
        report = self._scheduler.update_connector_output(output, holds_stores=rests)
        if self._pending_report is not None:
            report, self._pending_report = self._pending_report.joined(report), None
        if not (output.is_empty or rests):
            self._core.submit_ops()
        if self._is_recorded:
            self._journal.jobs_ended(reported)
        return report

    def request_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, None]:
        """End a request, for whatever reason.

        Returns:
            (False, None): its blocks may be reused at once. (True, None), only for engines with
            ``delays_free_blocks``: its blocks may be reused when a :class:`LoadReport` names the request.
        """
        result = self._scheduler.request_finished(request, block_ids)
        self._stats.finished(request.request_id, self._clock())
        if self._is_recorded:
            account, generated = (
                self.request_account(request.request_id),
                request.num_tokens - request.num_prompt_tokens,
            )
            self._journal.finished(request.request_id, account, generated)
        return result

    def drop_request(self, request_id: str) -> None:
        """Stop to serve a request, while the engine goes on with it: a call about it was refused.

        Nothing more is looked up or stored for it. Entries of later steps may name it: the blocks that they give to it
        count as written, so transfers that use them are flushed.
        """
        rules.check_id("drop_request", request_id)
        self._stats.finished(request_id, self._clock())
        self._scheduler.drop_request(request_id)
        if self._is_recorded:
            self._journal.finished(request_id, self.request_account(request_id))

    def request_account(self, request_id: str) -> RequestAccount | None:
        """Return a request's hit tokens by tier, stored tokens and waiting times.

        The account of an ended request is kept until some thousands more have ended. None: unknown, or no longer kept.
        """
        rules.check_id("request_account", request_id)
        return self._scheduler.request_account(request_id)

    def reset_cache(self, scope: ResetScope = "host") -> None:
        """Empty the host tier, or with ``scope="all"`` every tier, between steps.

        No chunk stored before is found from now on. Lower tiers delete their chunks over the next steps, and accept new
        ones afterwards; flush and close wait for it. Chunks that a crash, or a detachment meanwhile, keeps from being
        deleted are found again when the tier is opened: changed weights need another ``namespace.epoch`` instead.

        Raises:
            EngineProtocolError: inside a step; another scope; "all", where a tier is shared or read-only. Nothing has
                changed.
        """
        check_scope(scope)
        self._journal.reset_began()
        self._scheduler.reset_cache(scope)
        self._core.cache_was_reset(scope)

    def forget(self, request: Request) -> int:
        """Remove the chunks of a request's tokens from every tier, between steps; also those that others share with it.

        None of them is found from now on. Later steps delete them; :attr:`num_forgetting` counts those that are left.
        Of more than eight chunks for each key of ``step.keys_max``, a model without full attention may find those
        behind for some steps. A crash before that, or a shared tier that fails meanwhile, keeps them.

        Returns:
            The number of chunks that the tokens have, stored or not.

        Raises:
            EngineProtocolError: a tier is read-only. Nothing has changed.
        """
        rules.check_hashes_now("forget", request)
        keys, count = keys_of(request, self.geometry)
        self._forgetting.forget(keys, count)
        return count

    @property
    def num_forgetting(self) -> int:
        """Number of chunks of :meth:`forget` that a tier may still hold."""
        return self._forgetting.num_pending

    def has_pending_work(self) -> bool:
        """Whether the engine should keep stepping: transfers, reports, events or changes of tiers are pending."""
        if self._scheduler.has_pending_work or self._pending_report is not None:
            return True
        return self._core.wiring.changes.pending or self.events.has_announcements

    # -- the end -----------------------------------------------------------------------------------------------------

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Write everything stored so far to the tiers that accept writes. Not for the engine's step path: it waits.

        A tier with ``write = "back"`` gets every host chunk that it lacks; one with ``"on_reuse"`` only reused chunks.
        A reset of all tiers is completed.

        Where workers are other processes, the engine drains them and hands in their reports before the call. Loads that
        end meanwhile are part of the next report.

        Returns:
            Whether all chunks were written in time, and none was dropped or failed meanwhile.
        """
        return self._core.flush(timeout_s, self._collect_reports)

    def _drain_workers(self, timeout_s: float) -> bool:
        """Wait for the workers' copies. Returns whether all have ended in time."""
        deadline_s = self._clock() + timeout_s
        late = [worker for worker in self.workers if not worker.drain(max(0.0, deadline_s - self._clock()))]
        return not late

    def _collect_reports(self, timeout_s: float) -> None:
        if self._scheduler.holds_chunks and not self._core.in_step:
            self._take_last_step()
        self._drain_workers(timeout_s)
        output = WorkerOutput.aggregate(worker.get_finished() for worker in self.workers)
        report = self.update_connector_output(output)
        self._scheduler.end_stores()
        self._pending_report = None if report == LoadReport() else report

    def close(self, timeout_s: float = 30.0) -> bool:
        """Hand out pending stores, flush, then release threads, files and memory. Idempotent.

        Workers in other processes get no further instructions. To lose nothing, such an engine steps and hands in their
        reports until :meth:`has_pending_work` is false. Calls that begin a step raise afterwards.

        It ends within ``timeout_s``, never ``inf``, and 7 seconds, however many tiers, or copies of workers, hang.

        Returns:
            Whether everything that the host tier has, and everything pending, reached its tiers. Chunks that it has
            evicted before are only counted, as dropped. A second call repeats the answer.
        """
        return self._core.close(timeout_s, self._write_back)

    def _write_back(self, timeout_s: float) -> bool:
        deadline_s = self._clock() + timeout_s
        try:
            drained = self._drain_workers(timeout_s)
        except EngineProtocolError:  # no KV tensors were ever registered: its transfers cannot be done
            return False
        if drained:  # otherwise a step could wait for a copy that hangs
            self._take_last_step()
        return self.flush(max(0.0, deadline_s - self._clock())) and not self._scheduler.has_transfers

    def _take_last_step(self) -> None:
        """Hand out the stores that were meant for the next step's instructions."""
        if not self.workers or not self._scheduler.has_pending_work:
            return
        with suppress(EngineProtocolError):  # no KV tensors, or no queue, were ever registered: the jobs stay undone
            meta = self.build_connector_meta(StepOutput())
            for worker in self.workers:
                worker.start_step(meta)
                worker.queue_stores(meta)

    def __enter__(self) -> Self:
        """Return the open stack."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()
