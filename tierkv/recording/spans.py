"""Spans of OpenTelemetry for the way of a request's chunks: asked, read from tiers, loaded, stored, written to tiers.

A *span* is a named period with attributes; spans of one request form a trace. The root is ``tierkv request``; below it
are ``tierkv lookup``, ``tierkv load``, ``tierkv store``, and the operations of tiers, such as ``tierkv tier read``. A
write to a tier belongs to the store that made the chunk, also after its request has ended. If several requests want
the chunks of one read, it is part of the first one's trace and links to the others.

Needs the extra ``otel``. The exporter has a bounded queue and a thread of its own; the engine never waits for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tierkv.scheduler.introspection import SchedulerView
from tierkv.types.account import RequestAccount
from tierkv.types.cache_events import CacheEvent
from tierkv.types.keys import Key
from tierkv.types.tier_ops import Completion, OutcomeKind, TierOp, TierReport
from tierkv.types.transfers import ConnectorMeta, TransferJob, WorkerOutput

KEYS_MAX = 65_536
"""Chunks whose span is remembered, for the operations of tiers about them; the oldest are forgotten."""
REQUESTS_MAX = 8192
"""Requests with an open span; the span of the oldest is ended. As many that have ended are remembered."""
LINKS_MAX = 16
_FINE = {OutcomeKind.OK, OutcomeKind.ABSENT}


@dataclass(slots=True)
class _Traced:
    """One request."""

    root: Span
    context: Context
    """With the root as its current span."""
    lookup: Span | None = None
    """Span of the lookup that is not answered yet."""


@dataclass(slots=True)
class SpanJournal:
    """Journal of one stack that makes spans (:class:`tierkv.stack.journal.StepJournal`). Engine's thread.

    Args:
        tracer: makes the spans.
        view: explains the scheduler's answers, and knows its requests and jobs.
        tier_names: lower tiers by number; may grow.
        shut_down: exports what is pending, within seconds.
    """

    tracer: Tracer
    view: SchedulerView
    tier_names: Sequence[str]
    shut_down: Callable[[float], None]
    is_kept: bool = True
    _requests: OrderedDict[str, _Traced] = field(default_factory=OrderedDict)
    _ended: OrderedDict[str, Context] = field(default_factory=OrderedDict)  # stores may follow the end of a request
    _owners: OrderedDict[Key, Context] = field(default_factory=OrderedDict)
    _ops: dict[int, Span] = field(default_factory=dict)
    _jobs: dict[int, Span] = field(default_factory=dict)

    # -- requests ----------------------------------------------------------------------------------------------------

    def _request(self, request_id: str) -> _Traced:
        traced = self._requests.get(request_id)
        if traced is None:
            outer = TraceContextTextMapPropagator().extract(self.view.trace_headers(request_id))
            root = self.tracer.start_span("tierkv request", outer, attributes={"tierkv_request": request_id})
            traced = self._requests[request_id] = _Traced(root, trace.set_span_in_context(root, outer))
            if len(self._requests) > REQUESTS_MAX:
                self._end_request(self._requests.popitem(last=False)[1])
        return traced

    def answered(self, request_id: str, local_tokens: int, tokens: int | None, *, expired: bool) -> None:
        """Begin the span of a lookup with its first answer, and end it with the last one."""
        traced = self._request(request_id)
        if traced.lookup is None:
            asked = {"tierkv_tokens_local": local_tokens}
            traced.lookup = self.tracer.start_span("tierkv lookup", traced.context, attributes=asked)
        note = self.view.explain_answer(request_id, tokens)
        self._own(note.wanted, trace.set_span_in_context(traced.lookup, traced.context))
        if tokens is None:
            return
        traced.lookup.set_attributes(
            {"tierkv_tokens_hit": tokens, "tierkv_reason": note.reason, "tierkv_deadline_passed": expired}
        )
        traced.lookup.end()
        traced.lookup = None

    def finished(self, request_id: str, account: RequestAccount | None, generated: int | None = None) -> None:  # noqa: ARG002 - a journal gets it
        """End the span of a request, with its account."""
        traced = self._requests.pop(request_id, None)
        if traced is None:
            return
        self._ended[request_id] = traced.context
        if len(self._ended) > REQUESTS_MAX:
            self._ended.popitem(last=False)
        if account is not None:
            traced.root.set_attributes(
                {
                    "tierkv_tokens_local": account.local_tokens,
                    "tierkv_tokens_stored": account.stored_tokens,
                    "tierkv_deferrals": account.deferrals,
                    "tierkv_deferred_tier_s": account.deferred_tier_s,
                    "tierkv_deferred_queue_s": max(0.0, account.deferred_s - account.deferred_tier_s),
                    **{f"tierkv_tokens_loaded_{tier}": count for tier, count in account.loaded_tokens.items()},
                }
            )
        self._end_request(traced)

    @staticmethod
    def _end_request(traced: _Traced) -> None:
        if traced.lookup is not None:
            traced.lookup.end()
        traced.root.end()

    # -- transfers ---------------------------------------------------------------------------------------------------

    def jobs_began(self, meta: ConnectorMeta) -> None:
        """Begin a span for each transfer between host and GPU."""
        for job in (*meta.loads, *meta.stores):
            self._jobs[job.job_id] = self._begin_job(job)

    def _begin_job(self, job: TransferJob) -> Span:
        traced = self._requests.get(job.request_id)
        context = traced.context if traced is not None else self._ended.get(job.request_id, Context())
        name = "tierkv store" if job.is_store else "tierkv load"
        span = self.tracer.start_span(name, context, attributes={"tierkv_chunks": len(job.keys)})
        if job.is_store:
            self._own(job.keys, trace.set_span_in_context(span, context))
        return span

    def jobs_ended(self, output: WorkerOutput) -> None:
        """End the spans of the transfers that all workers have ended."""
        for job_id in output.finished:
            if job_id in self._jobs and not self.view.has_job(job_id):
                _end(self._jobs.pop(job_id), len(output.failed_keys.get(job_id, ())))

    # -- tiers -------------------------------------------------------------------------------------------------------

    def _own(self, keys: Sequence[Key], context: Context) -> None:
        """Note the span that the next operations about some chunks belong to."""
        for key in keys:
            self._owners[key] = context
            self._owners.move_to_end(key)
        while len(self._owners) > KEYS_MAX:
            self._owners.popitem(last=False)

    def op_began(self, op: TierOp) -> None:
        """Begin the span of an instruction to a tier."""
        found = {id(context): context for context in map(self._owners.get, op.keys) if context is not None}
        contexts = list(found.values())
        links = [Link(trace.get_current_span(context).get_span_context()) for context in contexts[1:LINKS_MAX]]
        facts = {"tierkv_tier": self.tier_names[op.tier], "tierkv_chunks": len(op.keys)}
        parent = contexts[0] if contexts else Context()
        name = f"tierkv tier {op.verb.value}"
        self._ops[op.op_id] = self.tracer.start_span(name, parent, links=links, attributes=facts)

    def completion(self, completion: TierReport) -> None:
        """End the span of an instruction, or note that its deadline has passed."""
        if not isinstance(completion, Completion) or completion.op_id not in self._ops:
            return
        if not completion.ended:
            self._ops[completion.op_id].add_event("deadline passed")
            return
        span = self._ops.pop(completion.op_id)
        bad = [outcome for outcome in completion.outcomes if outcome.kind not in _FINE]
        _end(span, len(bad), next((str(outcome.error or outcome.kind.value) for outcome in bad), ""))

    # -- steps -------------------------------------------------------------------------------------------------------

    def step_began(self) -> None:
        """Do nothing."""

    def chunks(self, events: Sequence[CacheEvent]) -> None:
        """Do nothing."""

    def reset_began(self) -> None:
        """Do nothing."""

    def hand_over(self) -> None:
        """Do nothing."""

    def close(self, timeout_s: float) -> None:
        """End all spans, and export them within ``timeout_s``. Idempotent."""
        for traced in self._requests.values():
            self._end_request(traced)
        for span in (*self._jobs.values(), *self._ops.values()):
            span.end()
        for spans in (self._requests, self._jobs, self._ops):
            spans.clear()
        self.shut_down(timeout_s)


def _end(span: Span, failed: int, why: str = "") -> None:
    if failed:
        span.set_attribute("tierkv_failed", failed)
        span.set_status(Status(StatusCode.ERROR, why or f"{failed} chunks failed"))
    span.end()
