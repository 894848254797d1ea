"""Recorder of a stack: turns what happens in it into entries, once per step. Engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Protocol, TypeVar

from tierkv.metrics.counters import CoreCounters
from tierkv.metrics.deltas import Deltas, empty_delta
from tierkv.metrics.gauges import gauges
from tierkv.metrics.watched import Watched
from tierkv.recording.entries import KEYS_PER_LINE, Entry, runs, short_key
from tierkv.scheduler.introspection import SchedulerView
from tierkv.scheduler.requests.request_state import RequestEvent, RequestState
from tierkv.types.account import RequestAccount
from tierkv.types.cache_events import CacheEvent
from tierkv.types.hints import HINTS, NO_HINTS, RequestHints, params_of
from tierkv.types.keys import NO_SCOPE, Key, scope_of_key
from tierkv.types.tier_ops import OutcomeKind, TierHealth, TierListing, TierOp, TierReport
from tierkv.types.transfers import ConnectorMeta, WorkerOutput

_T = TypeVar("_T")

MEASURED_EVERY_S = 5.0
"""Seconds between two entries of the metrics, in a stack that makes steps."""


class Sink(Protocol):
    """Receiver of entries."""

    @property
    def dropped(self) -> int:
        """Entries that were not written."""

    def put(self, entries: Sequence[Entry]) -> None:
        """Take over a step's entries; must not wait."""

    def close(self, timeout_s: float) -> None:
        """Write what is pending, within ``timeout_s``."""


def _grown(changes: Mapping[str, Mapping[str, _T]], has_grown: Callable[[_T], bool]) -> dict[str, dict[str, _T]]:
    """Return the changes without zeros; a reader takes what is missing as zero."""
    kept = {name: {label: value for label, value in row.items() if has_grown(value)} for name, row in changes.items()}
    return {name: row for name, row in kept.items() if row}


class Recorder:
    """Journal of one stack that makes entries (:class:`tierkv.stack.journal.StepJournal`).

    Args:
        sink: takes the entries of each step.
        view: explains the scheduler's answers and knows its jobs.
        counters: of the stack; ``entries_dropped`` is kept up to date.
        tier_names: lower tiers by number; may grow.
        clock: the stack's clock.
    """

    is_kept = True

    def __init__(
        self,
        sink: Sink,
        view: SchedulerView,
        counters: CoreCounters,
        tier_names: Sequence[str],
        clock: Callable[[], float],
    ) -> None:
        self._sink = sink
        self._view = view
        self._counters = counters
        self._tier_names = tier_names
        self._clock = clock
        self._opened_s = clock()
        self._step = 0
        self._batch: list[Entry] = []
        self._ops: dict[int, TierOp] = {}
        self._jobs: dict[int, tuple[str, bool, set[Key]]] = {}
        self._answers: dict[str, tuple[object, ...]] = {}
        self._asked_s: dict[str, float] = {}  # time of the first lookup of requests whose prompt is not noted yet
        self._watched: tuple[Watched, Deltas] | None = None
        self._measure_s = self._opened_s

    def watch(self, stack: Watched) -> None:
        """Record the metrics of the stack from now on."""
        self._watched = stack, Deltas(stack)

    def _measure(self) -> None:
        """Note the increments of all counters since the previous such entry, and each gauge.

        A file begins anew when the previous one is full, so a reader may know no earlier gauge.
        """
        if self._watched is None:
            return
        stack, deltas = self._watched
        delta = deltas.take() or empty_delta()
        for metric, values in gauges(stack):
            delta["gauges"][metric.name] = {label: round(value, 6) for label, value in values.items()}
        self._add(
            "metrics",
            counters=_grown(delta["counters"], bool),
            gauges=delta["gauges"],
            histograms=_grown(delta["histograms"], any),
        )

    def _add(self, kind: str, **fields: object) -> None:
        now_s = round(self._clock() - self._opened_s, 6)
        self._batch.append({"is": kind, "step": self._step, "t": now_s, **fields})

    def step_began(self) -> None:
        """Count a new step of the engine, and note the metrics when it is time to."""
        self._step += 1
        if self._clock() >= self._measure_s:
            self._measure_s = self._clock() + MEASURED_EVERY_S
            self._measure()

    def hand_over(self) -> None:
        """Pass the noted entries to the sink."""
        self._pass_batch()
        self._counters.entries_dropped = self._sink.dropped

    def _pass_batch(self) -> None:
        if self._batch:
            self._sink.put(self._batch)
            self._batch = []

    def close(self, timeout_s: float) -> None:
        """Write what is pending, within ``timeout_s``; the record is complete then. Idempotent."""
        self._measure()
        self._watched = None
        self._pass_batch()
        self._sink.close(timeout_s)

    # -- requests ----------------------------------------------------------------------------------------------------

    def request_changed(self, request_id: str, event: RequestEvent, before: RequestState, after: RequestState) -> None:
        """Note a change of a request's state, and its chunks that were never stored when it ends.

        Events that change nothing are left out.
        """
        if before is not after:
            self._add("request", r=request_id, event=event.value, before=before.value, after=after.value)
        if event is RequestEvent.FINISHED and (chunks := self._view.not_stored(request_id)):
            for keys in runs(chunks):
                self._add("not stored", r=request_id, keys=keys)

    def answered(self, request_id: str, local_tokens: int, tokens: int | None, *, expired: bool) -> None:
        """Note an answer to a lookup with its reason; a repeated answer is noted once. The first one has the prompt."""
        if request_id not in self._answers:
            self._asked_s[request_id] = self._clock() - self._opened_s
        if tokens is not None and request_id in self._asked_s:
            self._note_prompt(request_id, self._asked_s.pop(request_id))
        note = self._view.explain_answer(request_id, tokens)
        # The answer to a repeated question may be old, and chunks that were missing have come since.
        answer = (local_tokens, tokens, (note.wanted, note.ready) if tokens else note)
        if self._answers.get(request_id) == answer:
            return
        self._answers[request_id] = answer
        missing = {} if note.missing is None else {"missing": note.missing}
        self._add(
            "answer",
            r=request_id,
            local=local_tokens,
            tokens=tokens,
            why=note.reason,
            chunks=len(note.wanted),
            ready=note.ready,
            wanted=note.wanted[:KEYS_PER_LINE],
            expired=expired,
            **missing,
        )

    def _note_prompt(self, request_id: str, asked_s: float) -> None:
        prompt = self._view.prompt_of(request_id)
        scope = scope_of_key(prompt.keys[0]) if prompt.keys else NO_SCOPE
        fields: dict[str, object] = {"asked": round(asked_s, 6), "tokens": prompt.tokens}
        if scope.tenant:
            fields["tenant"] = scope.tenant.hex()
        if scope.adapter:
            fields["adapter"] = scope.adapter.hex()
        if prompt.hints != NO_HINTS:
            fields["hints"] = _as_json(prompt.hints)
        for number, keys in enumerate(runs(prompt.keys)):
            self._add("prompt", r=request_id, at=number * KEYS_PER_LINE, keys=keys, **(fields if not number else {}))

    def finished(self, request_id: str, account: RequestAccount | None, generated: int | None = None) -> None:
        """Note the end of a request, with its account and its number of generated tokens, if known."""
        self._answers.pop(request_id, None)
        self._asked_s.pop(request_id, None)
        known = {} if generated is None else {"generated": generated}
        self._add("finished", r=request_id, account={} if account is None else asdict(account), **known)

    # -- transfers ---------------------------------------------------------------------------------------------------

    def jobs_began(self, meta: ConnectorMeta) -> None:
        """Note the transfers that the workers are instructed to make."""
        for job in (*meta.loads, *meta.stores):
            self._jobs[job.job_id] = (job.request_id, job.is_store, set())
            for keys in runs(job.keys):
                self._add("job", r=job.request_id, job=job.job_id, store=job.is_store, keys=keys)

    def jobs_ended(self, output: WorkerOutput) -> None:
        """Note the jobs of a report that the scheduler has processed, once all workers have reported them."""
        for job_id in output.finished:
            if job_id not in self._jobs:
                continue
            request_id, store, failed = self._jobs[job_id]
            failed |= output.failed_keys.get(job_id, frozenset())
            if self._view.has_job(job_id):
                continue
            del self._jobs[job_id]
            for keys in runs(sorted(failed)):
                self._add("job end", r=request_id, job=job_id, store=store, failed=keys)

    # -- tiers -------------------------------------------------------------------------------------------------------

    def op_began(self, op: TierOp) -> None:
        """Note an instruction to a tier."""
        self._ops[op.op_id] = op
        for keys in runs(op.keys):
            self._add("op", op=op.op_id, tier=self._tier_names[op.tier], verb=op.verb.value, keys=keys)

    def completion(self, completion: TierReport) -> None:
        """Note a result or a change of health that dispatch reported."""
        if isinstance(completion, TierHealth):
            self._add("health", tier=self._tier_names[completion.tier], usable=completion.usable, why=completion.reason)
            return
        if isinstance(completion, TierListing):
            return  # its chunks are noted as they become available
        op = self._ops.get(completion.op_id)
        if op is None:
            return
        if completion.ended:
            del self._ops[completion.op_id]
        bad = [
            (short_key(key), outcome.kind.value + (f": {outcome.error}" if outcome.error else ""))
            for key, outcome in zip(op.keys, completion.outcomes, strict=True)
            if outcome.kind is not OutcomeKind.OK
        ]
        for i in range(0, max(1, len(bad)), KEYS_PER_LINE):
            self._add(
                "op end",
                op=op.op_id,
                tier=self._tier_names[op.tier],
                verb=op.verb.value,
                ok=len(op.keys) - len(bad),
                bad=dict(bad[i : i + KEYS_PER_LINE]),
                late=not completion.ended,
            )

    def chunks(self, events: Sequence[CacheEvent]) -> None:
        """Note chunks that became available or were removed."""
        for event in events:
            for keys in runs(event.keys):
                self._add("chunks", tier=event.tier, event=event.kind.value, keys=keys)

    def reset_began(self) -> None:
        """Note that the host tier is about to be emptied."""
        self._add("reset")


def _as_json(hints: RequestHints) -> dict[str, object]:
    given = params_of(hints)[HINTS]
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in given.items()}
