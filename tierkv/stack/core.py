"""What every open stack does, whoever schedules: the step loop's two ends, tiers that come and go, watching, the end.

The whole story of a chunk is three lines, once per engine step: take in what was completed; let scheduler and manager
turn it, and what the engine asks, into instructions; hand the instructions out. There is no policy here. How a stack
is wired stands in :mod:`tierkv.stack.opening`.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeVar

from tierkv.dispatch.copy_pool import CopyPool
from tierkv.dispatch.dispatcher import Dispatcher
from tierkv.errors import EngineProtocolError
from tierkv.manager.manager import OffloadManager
from tierkv.memory.arena import HostArena
from tierkv.memory.shared import SharedMemory
from tierkv.metrics.counters import CoreCounters
from tierkv.metrics.definitions import READ_SECONDS, WRITE_SECONDS
from tierkv.metrics.stack_stats import ConnectorStats, Series, StackStats
from tierkv.policies.quotas import usage_by_tier
from tierkv.scheduler.events.block_events import BlockEvents
from tierkv.scheduler.events.event_queue import EventQueue
from tierkv.scheduler.requests.hint_reader import HintReader
from tierkv.scheduler.scheduler import OffloadScheduler
from tierkv.scheduler.staged.staged_jobs import StagedJobs
from tierkv.scheduler.staged.staged_lookups import StagedLookups
from tierkv.stack.introspection import StackIntrospection
from tierkv.stack.observers import Observers
from tierkv.stack.remote_worker import WorkerSetup
from tierkv.stack.tier_lifecycle import TierChange, TierChanges
from tierkv.types.block_events import BlockEvent
from tierkv.types.cache_events import CacheEvent
from tierkv.types.geometry import Geometry
from tierkv.types.namespace import Namespace
from tierkv.types.tier_ops import Completion, TierHealth, TierOp, Verb
from tierkv.worker.completion_flags import CompletionFlags
from tierkv.worker.rank_reports import RankReports
from tierkv.worker.staged_seals import StagedSeals
from tierkv.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class BaseParts:
    """What every stack is made of.

    workers: those of this process, by rank, and copies: their threads; none where workers are other processes.
    shared: the arena's memory for those, and setup: what they need to know. block_events: what describes events.
    changes: tiers that come and go. completions_per_step_max: I/O results taken in per step; the rest waits.
    """

    manager: OffloadManager
    dispatcher: Dispatcher
    workers: tuple[Worker, ...]
    copies: tuple[CopyPool, ...]
    arena: HostArena
    shared: SharedMemory | None
    setup: WorkerSetup | None
    namespace: Namespace
    geometry: Geometry
    counters: CoreCounters
    observers: Observers
    block_events: BlockEvents
    events: EventQueue
    changes: TierChanges
    completions_per_step_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StackParts(BaseParts):
    """And a stack with our own scheduler. rank_reports: where workers are several, or other processes."""

    scheduler: OffloadScheduler
    rank_reports: RankReports | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedParts(BaseParts):
    """And a stack for an engine that schedules itself.

    completion_flags: table in which workers flag completed jobs.
    staged_seals: opens slots for stores, and seals them.
    group_ids: the number at the end of the keys of each group.
    """

    lookups: StagedLookups
    jobs: StagedJobs
    completion_flags: CompletionFlags
    staged_seals: StagedSeals
    hints: HintReader
    group_ids: tuple[int, ...]


VALIDATE = "TIERKV_VALIDATE"
"""Environment variable: 1 checks every invariant after every step (slow; for tests and for reports of bugs)."""

_POLL_S = 0.001
_T = TypeVar("_T")


class StackBase(ABC):
    """Manager, dispatch and what watches them; a subclass adds whoever decides what is stored and loaded.

    Everything belongs to the engine's scheduler thread, unless its description says otherwise. None of the calls of a
    step waits for a tier, and none raises because of one: a broken tier is a miss, and counted.
    """

    def __init__(
        self,
        parts: BaseParts,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.workers = parts.workers
        self.namespace = parts.namespace
        self.geometry = parts.geometry
        self._base = parts
        self._stats = StackStats()
        self._manager = parts.manager
        self._dispatcher = parts.dispatcher
        self._clock = clock
        self._sleep = sleep
        self._validate = os.environ.get(VALIDATE) == "1"
        self._passes_events_on = parts.observers.any or parts.events.needs_every_step
        self._in_step = False
        self._flushed_at_end: bool | None = None  # what the first close answered

    # -- for those who schedule --------------------------------------------------------------------------------------

    @abstractmethod
    def _step_began(self, now_s: float) -> None:
        """A step has begun: completions are taken in."""

    @abstractmethod
    def _check(self) -> None:
        """Check every invariant.

        Raises:
            InvariantError: one is broken; names it.
        """

    @abstractmethod
    def has_pending_work(self) -> bool:
        """Whether the engine should go on stepping."""

    @abstractmethod
    def _take_in_reports(self) -> None:
        """Before a flush: let the workers of this process finish, and take in what they report."""

    @abstractmethod
    def _take_last_step(self) -> None:
        """Before the stack closes: hand out what is still to be stored."""

    @abstractmethod
    def _at_rest(self) -> bool:
        """Whether no transfer between GPU and host is under way."""

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
        """What the process of that worker must know; it pickles. See :func:`tierkv.stack.remote_worker.open_worker`.

        Raises:
            EngineProtocolError: there is no such rank, or the workers live in this process.
        """
        setup = self._base.setup
        if setup is None:
            raise EngineProtocolError(
                "the workers of this stack live in its own process; an engine whose workers do not says so with "
                "EngineCapabilities(worker_processes=True)"
            )
        if not 0 <= rank < self.geometry.num_workers:
            raise EngineProtocolError(f"worker {rank}: this stack has workers 0 to {self.geometry.num_workers - 1}")
        return replace(setup, rank=rank)

    @property
    def introspection(self) -> StackIntrospection:
        """State of this stack, for tests and for debugging by hand."""
        return StackIntrospection(self._manager, self._dispatcher)

    # -- the step loop -----------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Once per step, before its first call: take in what tiers have completed."""
        if not self._in_step:
            self._in_step = True
            self._take_in()
            self._step_began(self._clock())

    def _take_in(self) -> None:
        self._manager.begin_step(self._clock())
        for completion in self._dispatcher.drain(self._base.completions_per_step_max):
            self._on_news(completion)
        self._base.changes.apply()

    def _on_news(self, completion: Completion | TierHealth) -> None:
        self._manager.on_completion(completion)

    def _submit(self, op: TierOp) -> None:
        self._dispatcher.submit(op)

    def _hand_out(self) -> None:
        """Give dispatch its instructions, and observers what happened."""
        for op in self._manager.take_ops():
            self._submit(op)
        if self._passes_events_on:
            self._observe()
        if self._validate:
            self._check()

    def _observe(self) -> None:
        """Pass events to observers and keep them for the engine."""
        self._pass_on(self._manager.take_events())

    def _pass_on(self, events: Sequence[CacheEvent]) -> None:
        self._base.events.put_events(events)
        self._base.observers.notify(events)

    # -- events ------------------------------------------------------------------------------------------------------

    def take_events(self) -> list[CacheEvent]:
        """What became available or left, in which tier, since the last call. Empty where events are disabled."""
        self._observe()
        return self._base.events.take_events()

    def take_block_events(self) -> list[BlockEvent]:
        """The same, described by hash blocks and tokens; what one of the two calls takes, the other does not get."""
        self._observe()
        return self._base.events.take_described_events()

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
        return self._base.changes.attach(table, before)

    def detach_tier(self, name: str, *, timeout_s: float = 30.0) -> TierChange:
        """Take a lower tier out of a stack in service; what it holds stays where it is. Any thread; does not wait.

        From the engine's next step on the tier has nothing and gets nothing. Chunks that still waited to be written to
        it are dropped from its queue and counted. When its running calls have ended, or after ``timeout_s``, its
        backend is closed: then the change is done. An unknown name is told by :meth:`TierChange.wait`.
        """
        return self._base.changes.detach(name, timeout_s)

    # -- watching ----------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> CoreCounters:
        """Counters of scheduler and manager."""
        return self._base.counters

    def tier_stats(self) -> dict[str, dict[str, int]]:
        """Counters of dispatch, per lower tier; see :class:`tierkv.dispatch.stats.TierStats`."""
        return {name: stats.as_dict() for name, stats in self._newest(self._dispatcher.stats.tiers).items()}

    def series(self) -> Iterator[Series]:
        """Histograms: delays of lookups, transfers, reads and writes per tier. Any thread."""
        yield from self._stats.series()
        for name, seconds in self._newest(self._dispatcher.stats.seconds).items():
            yield Series(READ_SECONDS, (name,), seconds[Verb.READ])
            yield Series(WRITE_SECONDS, (name,), seconds[Verb.WRITE])

    def _newest(self, by_tier: Mapping[int, _T]) -> dict[str, _T]:
        """By name. A tier that came may have the name of one that still hangs: no series may be there twice."""
        return {self._base.changes.names[index]: item for index, item in list(by_tier.items())}

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

        With the engine's prefill rate they decide what is worth loading (docs/explanation/load-or-recompute.md).
        """
        return self._manager.tier_speeds()

    # -- the end -----------------------------------------------------------------------------------------------------

    def has_waiting_writes(self) -> bool:
        """Whether chunks wait for a lower tier that takes no more at present: only a step hands them on.

        An engine that becomes idle, and wants them there soon, for others to find, steps until there are none. One that
        does not loses nothing but time: its next steps, a flush and a close bring them down.
        """
        return any(tier.has_backlog for tier in self._manager.tables)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Bring everything stored so far down to the tiers that take writes. Not for the engine's step path: it waits.

        A tier with ``write = "back"`` gets every chunk that the host tier has and it lacks; one with ``"on_reuse"``
        only what was used again. A reset of all tiers is brought to its end.

        Workers in other processes are the engine's to drain, and their reports its to hand in, before. Loads that end
        meanwhile are told by the next report.

        Returns:
            Whether all of it got there in time, and no chunk was dropped or failed on its way meanwhile.
        """
        deadline, lost = self._clock() + timeout_s, self.counters.lost_below
        self._take_in_reports()
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
        """Hand out what was still to be stored, flush, then release threads, files and memory. Idempotent.

        Workers in other processes get nothing more: an engine that wants to lose nothing steps, and hands in their
        reports, until :meth:`has_pending_work` is false.

        Returns:
            Whether everything that was stored, or was to be, reached its tiers. A second call repeats the answer.
        """
        if self._flushed_at_end is not None:
            return self._flushed_at_end
        self._flushed_at_end = False
        try:
            self._take_last_step()
            flushed = self.flush(timeout_s)
            self._flushed_at_end = flushed and self._at_rest()
        finally:
            parts = self._base
            for worker in self.workers:
                worker.shutdown()
            self._dispatcher.close(timeout_s)
            parts.changes.close()
            for copies in parts.copies:
                copies.close(timeout_s)
            parts.observers.finish(timeout_s)
            parts.arena.close()
            if parts.shared is not None:
                parts.shared.close()
        return self._flushed_at_end

    def __enter__(self) -> Self:
        """The open stack."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()
