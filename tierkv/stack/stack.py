"""A stack in service under our own scheduler: the calls that an engine makes.

What every stack does, whoever schedules, stands in :mod:`tierkv.stack.core`; how one is wired in
:mod:`tierkv.stack.opening`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from tierkv.errors import EngineProtocolError
from tierkv.manager.contract import ResetScope
from tierkv.recording.recorder import Recorder
from tierkv.recording.writer import RecordWriter
from tierkv.stack.core import StackBase, StackParts
from tierkv.types.account import RequestAccount
from tierkv.types.cache_events import CacheEvent
from tierkv.types.engine import BlockTables, FreeBlockQueue, LoadReport, Request, StepOutput
from tierkv.types.tier_ops import Completion, TierHealth, TierOp
from tierkv.types.transfers import ConnectorMeta, WorkerOutput


class Stack(StackBase):
    """An open stack. Scheduler calls belong to the engine's scheduler thread, each worker to that worker's thread.

    None of the calls waits for a tier, and none raises because of one: a broken tier is a miss, and counted. Errors of
    the kind EngineProtocolError mean that the engine called out of order.
    """

    def __init__(
        self,
        parts: StackParts,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(parts, clock, sleep)
        self._parts = parts
        self._scheduler = parts.scheduler
        self._pending_report: LoadReport | None = None  # what a flush has learnt, until the engine comes for its report

    def worker_lost(self, rank: int) -> LoadReport:
        """A worker's process has ended: whatever it had not reported has failed, and is reported here in its place.

        Call it only when the process is gone for good: slots that it wrote to may be used again at once.

        Raises:
            EngineProtocolError: there is no such rank, or a stack of one worker in this process, which cannot be lost.
        """
        if self._parts.rank_reports is None:
            raise EngineProtocolError("the only worker of this stack lives in its own process: it cannot be lost alone")
        return self.update_connector_output(self._parts.rank_reports.output_of_lost(rank))

    # -- what an engine calls ----------------------------------------------------------------------------------------

    def register_free_queue(self, queue: FreeBlockQueue, max_batched_tokens: int) -> None:
        """Show the engine's free blocks; see :meth:`OffloadScheduler.register_free_queue`."""
        self._scheduler.register_free_queue(queue, max_batched_tokens)

    def on_new_request(self, request: Request) -> None:
        """A request has arrived; see :meth:`OffloadScheduler.on_new_request`."""
        self._begin_step()
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How much can be loaded; see :meth:`OffloadScheduler.get_num_new_matched_tokens`."""
        self._begin_step()
        began_s = self._clock()
        answer = self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
        self._stats.looked_up(request.request_id, began_s, self._clock(), answered=answer[0] is not None)
        return answer

    def update_state_after_alloc(self, request: Request, blocks: BlockTables, num_external_tokens: int) -> None:
        """Blocks were allocated; see :meth:`OffloadScheduler.update_state_after_alloc`."""
        self._begin_step()
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, step: StepOutput) -> ConnectorMeta:
        """This step's instructions to the workers; see :meth:`OffloadScheduler.build_connector_meta`."""
        self._begin_step()
        meta = self._scheduler.build_connector_meta(step)
        self._in_step = False
        if self._parts.rank_reports is not None:
            self._parts.rank_reports.add_jobs(meta)
        self._hand_out()
        return meta

    def update_connector_output(self, output: WorkerOutput) -> LoadReport:
        """What a worker reported, or several; see :meth:`OffloadScheduler.update_connector_output`."""
        if output.transfers:
            self._stats.transferred(output.transfers)
        if self._parts.rank_reports is not None and not output.is_empty:
            output = self._parts.rank_reports.merge_output(output)
        report = self._scheduler.update_connector_output(output)
        if self._pending_report is not None:
            report, self._pending_report = _joined(self._pending_report, report), None
        if not output.is_empty:
            self._hand_out()
        return report

    def request_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, None]:
        """A request ended; see :meth:`OffloadScheduler.request_finished`."""
        self._stats.finished(request.request_id, self._clock())
        return self._scheduler.request_finished(request, block_ids)

    def request_account(self, request_id: str) -> RequestAccount | None:
        """Which tier served which tokens of a request, what it stored and what it waited for.

        Of a request that has ended it can be had until some thousands more have ended. None: unknown, or too long ago.
        """
        return self._scheduler.request_account(request_id)

    def reset_cache(self, scope: ResetScope = "host") -> None:
        """Empty the host tier, or with ``scope="all"`` every tier, between steps.

        Nothing of before is answered from now on. Lower tiers delete their chunks over the next steps, and take new
        ones when they have; flush and close wait for it. What a crash, or a detachment meanwhile, leaves undeleted is
        found again when the tier is opened: weights that have changed want another ``namespace.epoch`` instead.

        Raises:
            EngineProtocolError: inside a step; or with "all", where a tier is shared or read-only: nothing has changed.
        """
        self._scheduler.reset_cache(scope)
        self._hand_out()

    def has_pending_work(self) -> bool:
        """Whether the engine should go on stepping: transfers are in flight, or to come, or their end is to be told."""
        return self._scheduler.has_pending_work or self._pending_report is not None or self._parts.changes.pending

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """How fast the engine computes prompts, as it says or as measured; None: not known yet."""
        return self._scheduler.prefill_tokens_per_s

    # -- for the step loop -------------------------------------------------------------------------------------------

    def _step_began(self, now_s: float) -> None:
        self._scheduler.begin_step(now_s)

    def _check(self) -> None:
        self._scheduler.validate()

    def _take_in_reports(self) -> None:
        for worker in self.workers:
            worker.drain()
        output = WorkerOutput.aggregate(worker.get_finished() for worker in self.workers)
        report = self.update_connector_output(output)
        self._pending_report = None if report == LoadReport() else report

    def _take_last_step(self) -> None:
        """A request that has ended may have left stores to the next step's instructions, and no step will come."""
        if not self.workers or not self._scheduler.has_pending_work:
            return
        with suppress(EngineProtocolError):  # no KV tensors, or no queue, were ever registered: the jobs stay undone
            meta = self.build_connector_meta(StepOutput())
            for worker in self.workers:
                worker.start_step(meta)
                worker.queue_stores(meta)

    def _at_rest(self) -> bool:
        return not self._scheduler.has_transfers


def _joined(first: LoadReport, later: LoadReport) -> LoadReport:
    """Both reports as one."""
    return LoadReport(
        first.finished | later.finished,
        first.invalid_block_ids | later.invalid_block_ids,
        first.finished_sending | later.finished_sending,
    )


class RecordedStack(Stack):
    """The same stack, with each call's news passed to a recorder, and each step's entries to a writer."""

    def __init__(
        self,
        parts: StackParts,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        writer: RecordWriter,
    ) -> None:
        super().__init__(parts, clock, sleep)
        self._writer = writer
        self._recorder = Recorder(writer, parts.changes.names, clock)
        self._scheduler.view.watcher = self._recorder.request_changed
        self._passes_events_on = True

    def _begin_step(self) -> None:
        if not self._in_step:
            self._recorder.begin_step()
        super()._begin_step()

    def _on_news(self, completion: Completion | TierHealth) -> None:
        self._recorder.completion(completion)
        super()._on_news(completion)

    def _submit(self, op: TierOp) -> None:
        self._recorder.op_began(op)
        super()._submit(op)

    def _pass_on(self, events: Sequence[CacheEvent]) -> None:
        self._recorder.chunks(events)
        super()._pass_on(events)

    def _hand_out(self) -> None:
        super()._hand_out()
        self._recorder.hand_over()
        self.counters.entries_dropped = self._writer.dropped

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The same, and noted with its reason."""
        before = self.counters.deadlines_expired
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        note = self._scheduler.view.explain_answer(request.request_id, answer[0])
        expired = self.counters.deadlines_expired > before
        self._recorder.answered(request.request_id, num_computed_tokens, answer[0], note, expired=expired)
        return answer

    def build_connector_meta(self, step: StepOutput) -> ConnectorMeta:
        """The same, and noted."""
        meta = super().build_connector_meta(step)
        self._recorder.jobs_began(meta)
        return meta

    def update_connector_output(self, output: WorkerOutput) -> LoadReport:
        """The same, and noted."""
        report = super().update_connector_output(output)
        self._recorder.jobs_ended(output, lambda job_id: not self._scheduler.view.has_job(job_id))
        return report

    def request_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, None]:
        """The same, and noted with the request's account."""
        result = super().request_finished(request, block_ids)
        self._recorder.finished(request.request_id, self.request_account(request.request_id))
        return result

    def reset_cache(self, scope: ResetScope = "host") -> None:
        """The same, and noted."""
        self._recorder.reset()
        super().reset_cache(scope)

    def close(self, timeout_s: float = 30.0) -> bool:
        """The same; the record is complete then."""
        try:
            return super().close(timeout_s)
        finally:
            self._recorder.hand_over()
            self._writer.close(timeout_s)
