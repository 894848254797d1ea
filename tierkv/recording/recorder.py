"""Turns what happens in a stack into entries, once per step. Engine's thread; costs nothing where it is not used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Protocol

from tierkv.recording.entries import KEYS_PER_LINE, Entry, runs, short_key
from tierkv.scheduler.introspection import AnswerNote
from tierkv.scheduler.requests.request_state import RequestEvent, RequestState
from tierkv.types.account import RequestAccount
from tierkv.types.cache_events import CacheEvent
from tierkv.types.keys import Key
from tierkv.types.tier_ops import Completion, OutcomeKind, TierHealth, TierOp
from tierkv.types.transfers import ConnectorMeta, WorkerOutput


class Sink(Protocol):
    """Where entries go."""

    def put(self, entries: Sequence[Entry]) -> None:
        """Take a step's entries over; must not wait."""


class Recorder:
    """One per stack.

    Args:
        sink: takes the entries of each step.
        tier_names: lower tiers by number; may grow.
        clock: the stack's clock.
    """

    def __init__(self, sink: Sink, tier_names: Sequence[str], clock: Callable[[], float]) -> None:
        self._sink = sink
        self._tier_names = tier_names
        self._clock = clock
        self._opened_s = clock()
        self._step = 0
        self._batch: list[Entry] = []
        self._ops: dict[int, TierOp] = {}
        self._jobs: dict[int, tuple[str, bool, set[Key]]] = {}
        self._answers: dict[str, tuple[object, ...]] = {}

    def _add(self, kind: str, **fields: object) -> None:
        now_s = round(self._clock() - self._opened_s, 6)
        self._batch.append({"is": kind, "step": self._step, "t": now_s, **fields})

    def begin_step(self) -> None:
        """A new step of the engine begins."""
        self._step += 1

    def hand_over(self) -> None:
        """Give what was noted to the sink."""
        if self._batch:
            self._sink.put(self._batch)
            self._batch = []

    # -- requests ----------------------------------------------------------------------------------------------------

    def request_changed(self, request_id: str, event: RequestEvent, before: RequestState, after: RequestState) -> None:
        """A request changed its state; events that change nothing are not told."""
        if before is not after:
            self._add("request", r=request_id, event=event.value, before=before.value, after=after.value)

    def answered(
        self, request_id: str, local_tokens: int, tokens: int | None, note: AnswerNote, *, expired: bool
    ) -> None:
        """A lookup was answered, perhaps because its deadline had passed. An answer that repeats is told once."""
        answer = (local_tokens, tokens, note)
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

    def finished(self, request_id: str, account: RequestAccount | None) -> None:
        """A request is over."""
        self._answers.pop(request_id, None)
        self._add("finished", r=request_id, account={} if account is None else asdict(account))

    # -- transfers ---------------------------------------------------------------------------------------------------

    def jobs_began(self, meta: ConnectorMeta) -> None:
        """The workers are handed these jobs."""
        for job in (*meta.loads, *meta.stores):
            self._jobs[job.job_id] = (job.request_id, job.is_store, set())
            for keys in runs(job.keys):
                self._add("job", r=job.request_id, job=job.job_id, store=job.is_store, keys=keys)

    def jobs_ended(self, output: WorkerOutput, is_over: Callable[[int], bool]) -> None:
        """Workers reported; ``is_over`` tells whether all of them have reported a job."""
        for job_id in output.finished:
            if job_id not in self._jobs:
                continue
            request_id, store, failed = self._jobs[job_id]
            failed |= output.failed_keys.get(job_id, frozenset())
            if not is_over(job_id):
                continue
            del self._jobs[job_id]
            for keys in runs(sorted(failed)):
                self._add("job end", r=request_id, job=job_id, store=store, failed=keys)

    # -- tiers -------------------------------------------------------------------------------------------------------

    def op_began(self, op: TierOp) -> None:
        """A tier is asked to do something."""
        self._ops[op.op_id] = op
        for keys in runs(op.keys):
            self._add("op", op=op.op_id, tier=self._tier_names[op.tier], verb=op.verb.value, keys=keys)

    def completion(self, completion: Completion | TierHealth) -> None:
        """Dispatch reported something."""
        if isinstance(completion, TierHealth):
            self._add("health", tier=self._tier_names[completion.tier], usable=completion.usable, why=completion.reason)
            return
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

    def chunks(self, events: Iterable[CacheEvent]) -> None:
        """Chunks became available or left."""
        for event in events:
            for keys in runs(event.keys):
                self._add("chunks", tier=event.tier, event=event.kind.value, keys=keys)

    def reset(self) -> None:
        """The host tier is emptied."""
        self._add("reset")
