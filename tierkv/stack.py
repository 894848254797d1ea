"""A stack in service: the calls an engine makes, and the step loop that drives scheduler, manager and dispatch.

The whole story of a chunk is three lines, once per engine step: take in what was completed; let scheduler and manager
turn it, and what the engine asks, into instructions; hand the instructions out. There is no policy here. How a stack
is wired stands in :mod:`tierkv.assembly`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, Self, TypeVar

from tierkv.errors import EngineProtocolError
from tierkv.manager.contract import ResetScope
from tierkv.manager.tenants import usage_by_tier
from tierkv.metrics.counters import CoreCounters
from tierkv.metrics.definitions import READ_SECONDS, WRITE_SECONDS
from tierkv.metrics.stack_stats import ConnectorStats, Series, StackStats
from tierkv.stack_parts import StackParts
from tierkv.tier_changes import TierChange
from tierkv.types.account import RequestAccount
from tierkv.types.block_events import BlockEvent
from tierkv.types.cache_events import CacheEvent
from tierkv.types.engine import BlockTables, FreeBlockQueue, LoadReport, Request, StepOutput
from tierkv.types.tier_ops import Completion, TierHealth, TierOp, Verb
from tierkv.types.transfers import ConnectorMeta, WorkerOutput
from tierkv.worker.worker import Worker
from tierkv.worker_setup import WorkerSetup

VALIDATE = "TIERKV_VALIDATE"
"""Environment variable: 1 checks every invariant after every step (slow; for tests and for reports of bugs)."""

_POLL_S = 0.001
_T = TypeVar("_T")


class Stack:
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
        self.workers = parts.workers
        self.namespace = parts.namespace
        self.geometry = parts.geometry
        self._parts = parts
        self._stats = StackStats()
        self._scheduler = parts.scheduler
        self._manager = parts.manager
        self._dispatcher = parts.dispatcher
        self._clock = clock
        self._sleep = sleep
        self._validate = os.environ.get(VALIDATE) == "1"
        self._passes_events_on = parts.observers.any or parts.events.needs_every_step
        self._in_step = False
        self._untold = LoadReport()  # what a flush has learnt, until the engine comes for its report
        self._flushed_at_end: bool | None = None  # what the first close answered

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
        """What the process of that worker must know; it pickles. See :func:`tierkv.worker_setup.open_worker`.

        Raises:
            EngineProtocolError: there is no such rank, or the workers live in this process.
        """
        setup = self._parts.setup
        if setup is None:
            raise EngineProtocolError(
                "the workers of this stack live in its own process; an engine whose workers do not says so with "
                "EngineCapabilities(worker_processes=True)"
            )
        if not 0 <= rank < self.geometry.num_workers:
            raise EngineProtocolError(f"worker {rank}: this stack has workers 0 to {self.geometry.num_workers - 1}")
        return replace(setup, rank=rank)

    def worker_lost(self, rank: int) -> LoadReport:
        """A worker's process has ended: whatever it had not reported has failed, and is reported here in its place.

        Call it only when the process is gone for good: slots that it wrote to may be used again at once.

        Raises:
            EngineProtocolError: there is no such rank, or a stack of one worker in this process, which cannot be lost.
        """
        if self._parts.part_book is None:
            raise EngineProtocolError("the only worker of this stack lives in its own process: it cannot be lost alone")
        return self.update_connector_output(self._parts.part_book.report_of_lost(rank))

    # -- the step loop -----------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Once per step, before its first call: take in what tiers have completed."""
        if not self._in_step:
            self._in_step = True
            self._take_in()
            self._scheduler.begin_step(self._clock())

    def _take_in(self) -> None:
        self._manager.begin_step(self._clock())
        for news in self._dispatcher.drain(self._parts.completions_per_step_max):
            self._on_news(news)
        self._parts.changes.apply()

    def _on_news(self, news: Completion | TierHealth) -> None:
        self._manager.on_completion(news)

    def _submit(self, op: TierOp) -> None:
        self._dispatcher.submit(op)

    def _hand_out(self) -> None:
        """Give dispatch its instructions, and observers what happened."""
        for op in self._manager.take_ops():
            self._submit(op)
        if self._passes_events_on:
            self._observe()
        if self._validate:
            self._scheduler.validate()

    def _observe(self) -> None:
        """Pass events to observers and keep them for the engine."""
        self._pass_on(self._scheduler.take_events())

    def _pass_on(self, events: Sequence[CacheEvent]) -> None:
        self._parts.events.put(events)
        self._parts.observers.notify(events)

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
        if self._parts.part_book is not None:
            self._parts.part_book.hand_out(meta)
        self._hand_out()
        return meta

    def update_connector_output(self, output: WorkerOutput) -> LoadReport:
        """What a worker reported, or several; see :meth:`OffloadScheduler.update_connector_output`."""
        self._stats.transferred(output.transfers)
        if self._parts.part_book is not None:
            output = self._parts.part_book.take_in(output)
        report = _joined(self._untold, self._scheduler.update_connector_output(output))
        self._untold = LoadReport()
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

    def take_events(self) -> list[CacheEvent]:
        """What became available or left, in which tier, since the last call. Empty where events are disabled."""
        self._observe()
        return self._parts.events.take()

    def take_block_events(self) -> list[BlockEvent]:
        """The same, described by hash blocks and tokens; what one of the two calls takes, the other does not get."""
        self._observe()
        return self._parts.events.take_described()

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
        return self._scheduler.has_pending_work or self._untold != LoadReport() or self._parts.changes.pending

    # -- tiers that come and go --------------------------------------------------------------------------------------

    @property
    def tier_names(self) -> tuple[str, ...]:
        """The lower tiers in service, in the order in which they are asked."""
        return self._manager.tier_names[1:]

    def attach_tier(self, table: Mapping[str, Any], *, before: str | None = None) -> TierChange:
        """Add a lower tier to a stack in service. Any thread but the engine's: it waits until the backend is open.

        The engine's next step puts it in service, with everything it holds. It gets what is stored from then on.

        Args:
            table: as a ``[[tiers]]`` table of a stack's description.
            before: the tier that is to be asked after it; None: it comes last.

        Raises:
            ConfigError: the table is wrong.
            BackendError: the tier cannot be opened, or cannot tell what it holds.
            PluginError: a plugin that it names is missing or broken.
            EngineProtocolError: its name is taken, or there is no tier ``before``.
        """
        return self._parts.changes.attach(table, before)

    def detach_tier(self, name: str, *, timeout_s: float = 30.0) -> TierChange:
        """Take a lower tier out of a stack in service; what it holds stays where it is. Any thread; does not wait.

        From the engine's next step on the tier has nothing and gets nothing. Chunks that still waited to be written to
        it are dropped from its queue and counted. When its running calls have ended, or after ``timeout_s``, its
        backend is closed: then the change is done. An unknown name is told by :meth:`TierChange.wait`.
        """
        return self._parts.changes.detach(name, timeout_s)

    # -- watching ----------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> CoreCounters:
        """Counters of scheduler and manager."""
        return self._parts.counters

    def tier_stats(self) -> dict[str, dict[str, int]]:
        """Counters of dispatch, per lower tier; see :class:`tierkv.dispatch.stats.TierStats`."""
        return {name: asdict(stats) for name, stats in self._newest(self._dispatcher.stats.tiers).items()}

    def series(self) -> Iterator[Series]:
        """Histograms: delays of lookups, transfers, reads and writes per tier. Any thread."""
        yield from self._stats.series()
        for name, seconds in self._newest(self._dispatcher.stats.seconds).items():
            yield Series(READ_SECONDS, (name,), seconds[Verb.READ])
            yield Series(WRITE_SECONDS, (name,), seconds[Verb.WRITE])

    def _newest(self, by_tier: Mapping[int, _T]) -> dict[str, _T]:
        """By name. A tier that came may have the name of one that still hangs: no series may be there twice."""
        return {self._parts.changes.names[index]: item for index, item in list(by_tier.items())}

    def take_stats(self) -> ConnectorStats | None:
        """Samples since the last call, for an engine that exports or logs them itself; None if there are none."""
        return self._stats.take(self.counters.stores_refused)

    def tenant_usage(self) -> dict[str, dict[str, int]]:
        """Bytes by tenant, in each tier with quotas; a tenant is named by the digest of its salt in hex.

        ``""`` are requests without one. See :func:`tierkv.types.keys.tenant_of_salt`.
        """
        return usage_by_tier(self._manager.policies)

    def tier_speeds(self) -> dict[str, dict[str, float]]:
        """``latency_s`` and ``bytes_per_s`` of each lower tier's reads, as far as they are measured.

        With :attr:`prefill_tokens_per_s` they decide what is worth loading (docs/explanation/load-or-recompute.md).
        """
        return self._manager.tier_speeds()

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """How fast the engine computes prompts, as it says or as measured; None: not known yet."""
        return self._scheduler.prefill_tokens_per_s

    # -- the end -----------------------------------------------------------------------------------------------------

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Bring everything stored so far down to the tiers that take writes. Not for the engine's step path: it waits.

        A tier with ``write = "back"`` gets every chunk that the host tier has and it lacks; one with ``"on_reuse"``
        only what was used again. A reset of all tiers is brought to its end.

        Workers in other processes are the engine's to drain, and their reports its to hand in, before. Loads that end
        meanwhile are told by the next :meth:`update_connector_output`.

        Returns:
            Whether all of it got there in time, and no chunk was dropped or failed on its way meanwhile.
        """
        deadline, lost = self._clock() + timeout_s, self.counters.lost_below
        for worker in self.workers:
            worker.drain()
        output = WorkerOutput.aggregate(worker.get_finished() for worker in self.workers)
        self._untold = self.update_connector_output(output)
        self._manager.flush()
        while True:
            self._take_in()
            self._hand_out()
            if not self._manager.has_pending_changes:
                return self.counters.lost_below == lost
            if self._clock() >= deadline:
                return False
            self._sleep(_POLL_S)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Hand out what the scheduler still wanted stored, flush, then release threads, files and memory. Idempotent.

        Workers in other processes get nothing more: an engine that wants to lose nothing steps, and hands in their
        reports, until :meth:`has_pending_work` is false.

        Returns:
            Whether everything that was stored, or was to be, reached its tiers. A second call repeats the answer.
        """
        if self._flushed_at_end is not None:
            return self._flushed_at_end
        self._flushed_at_end = False
        try:
            if self.workers and self._scheduler.has_pending_work:
                self._take_last_step()
            flushed = self.flush(timeout_s)
            self._flushed_at_end = flushed and not self._scheduler.has_transfers
        finally:
            for worker in self.workers:
                worker.shutdown()
            self._dispatcher.close(timeout_s)
            self._parts.changes.close()
            for copies in self._parts.copies:
                copies.close(timeout_s)
            self._parts.observers.finish(timeout_s)
            self._parts.arena.close()
            if self._parts.shared is not None:
                self._parts.shared.close()
        return self._flushed_at_end

    def _take_last_step(self) -> None:
        """A request that has ended may have left stores to the next step's instructions, and no step will come."""
        with suppress(EngineProtocolError):  # no KV tensors, or no queue, were ever registered: the jobs stay undone
            meta = self.build_connector_meta(StepOutput())
            for worker in self.workers:
                worker.start_step(meta)
                worker.queue_stores(meta)

    def __enter__(self) -> Self:
        """The open stack."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


def _joined(first: LoadReport, later: LoadReport) -> LoadReport:
    """Both reports as one."""
    return LoadReport(
        first.finished | later.finished,
        first.invalid_block_ids | later.invalid_block_ids,
        first.finished_sending | later.finished_sending,
    )
