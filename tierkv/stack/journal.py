"""Journals of a stack: the interface through which a recorder observes each step, and all of them as one.

A stack asks :attr:`StepJournal.is_kept` once, when it is constructed, and calls the methods of a step only where it is
true. A stack without a record therefore makes no call for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tierkv.types.account import RequestAccount
from tierkv.types.cache_events import CacheEvent
from tierkv.types.tier_ops import TierOp, TierReport
from tierkv.types.transfers import ConnectorMeta, WorkerOutput


class StepJournal(Protocol):
    """Receiver of everything that happens in a stack, in order. Engine's thread; no method may wait.

    ``reset_began`` and ``close`` are called on every journal, the other methods only where ``is_kept`` is true.
    """

    @property
    def is_kept(self) -> bool:
        """Whether anything is recorded. Constant."""

    def step_began(self) -> None:
        """Note that an engine step has begun."""

    def completion(self, completion: TierReport) -> None:
        """Note a result or a change of health that dispatch reported."""

    def op_began(self, op: TierOp) -> None:
        """Note an instruction to a tier."""

    def chunks(self, events: Sequence[CacheEvent]) -> None:
        """Note chunks that became available or were removed."""

    def answered(self, request_id: str, local_tokens: int, tokens: int | None, *, expired: bool) -> None:
        """Note the answer to a lookup; None: deferred. expired: a lookup deadline passed during the call."""

    def jobs_began(self, meta: ConnectorMeta) -> None:
        """Note the transfers of a step's instructions to the workers."""

    def jobs_ended(self, output: WorkerOutput) -> None:
        """Note a report of the workers, after the scheduler has processed it."""

    def finished(self, request_id: str, account: RequestAccount | None, generated: int | None = None) -> None:
        """Note the end of a request, with its account and its number of generated tokens, if known."""

    def reset_began(self) -> None:
        """Note that the host tier is about to be emptied."""

    def hand_over(self) -> None:
        """Pass the noted entries to the writer."""

    def close(self, timeout_s: float) -> None:
        """Write what is pending, within ``timeout_s``. Idempotent."""


class Journals:
    """Any number of journals as one :class:`StepJournal`; without any, nothing is kept."""

    def __init__(self, *journals: StepJournal) -> None:
        self._all = journals

    @property
    def is_kept(self) -> bool:
        """Whether there is a journal."""
        return bool(self._all)

    def step_began(self) -> None:
        """Pass it on, as all methods."""
        for journal in self._all:
            journal.step_began()

    def completion(self, completion: TierReport) -> None:
        """Pass it on."""
        for journal in self._all:
            journal.completion(completion)

    def op_began(self, op: TierOp) -> None:
        """Pass it on."""
        for journal in self._all:
            journal.op_began(op)

    def chunks(self, events: Sequence[CacheEvent]) -> None:
        """Pass it on."""
        for journal in self._all:
            journal.chunks(events)

    def answered(self, request_id: str, local_tokens: int, tokens: int | None, *, expired: bool) -> None:
        """Pass it on."""
        for journal in self._all:
            journal.answered(request_id, local_tokens, tokens, expired=expired)

    def jobs_began(self, meta: ConnectorMeta) -> None:
        """Pass it on."""
        for journal in self._all:
            journal.jobs_began(meta)

    def jobs_ended(self, output: WorkerOutput) -> None:
        """Pass it on."""
        for journal in self._all:
            journal.jobs_ended(output)

    def finished(self, request_id: str, account: RequestAccount | None, generated: int | None = None) -> None:
        """Pass it on."""
        for journal in self._all:
            journal.finished(request_id, account, generated)

    def reset_began(self) -> None:
        """Pass it on."""
        for journal in self._all:
            journal.reset_began()

    def hand_over(self) -> None:
        """Pass it on."""
        for journal in self._all:
            journal.hand_over()

    def close(self, timeout_s: float) -> None:
        """Close all within ``timeout_s`` each."""
        for journal in self._all:
            journal.close(timeout_s)
