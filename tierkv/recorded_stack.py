"""A stack that keeps a record of what it does (config section ``record``). A stack without one is another class."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tierkv.manager.contract import ResetScope
from tierkv.recording.recorder import Recorder
from tierkv.recording.writer import RecordWriter
from tierkv.stack import Stack
from tierkv.stack_parts import StackParts
from tierkv.types.cache_events import CacheEvent
from tierkv.types.engine import LoadReport, Request, StepOutput
from tierkv.types.tier_ops import Completion, TierHealth, TierOp
from tierkv.types.transfers import ConnectorMeta, WorkerOutput


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

    def _on_news(self, news: Completion | TierHealth) -> None:
        self._recorder.news(news)
        super()._on_news(news)

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
