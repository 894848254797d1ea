"""Batching engine: continuous batching over real bytes, driving a stack as docs/how-to/drive-tierkv.md says.

Only this one of the small engines checks every byte that a forward pass reads, while it preempts, refuses offers,
Of the small engines, only this one checks every byte that a forward pass reads, while it preempts, refuses offers,
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from simulation.checks.failure import demand
from simulation.engine.sequences import EngineSequence, R, TableKeeper, TableSetup, first_attended
from tierkv.types.engine import BlockTables, GroupKind, LoadReport, Request, ScheduledRequest, StepOutput
from tierkv.types.transfers import ConnectorMeta, WorkerOutput

R_contra = TypeVar("R_contra", contravariant=True)

PROTOCOL = "engine protocol"
"""Invariant: the calls' answers are as the contract of engines says."""


@dataclass(frozen=True, slots=True)
class EngineBehaviour:
    """What an engine does in one step, beside its duties."""

    asks: int = 100
    """Number of waiting requests that it considers."""
    accepts: float = 1.0
    """Share of an offer that it takes."""
    preempt: int = 0
    """Number of its youngest running requests that it preempts."""
    forward_s: float = 0.0
    """Duration of the forward pass in seconds; half of it before the engine writes."""
    shy: bool = False
    """Whether it leaves the first offer unused."""
    filling: int = 0xDD
    """Byte that new owners of blocks write first."""
    silent: frozenset[int] = frozenset()
    """Ranks of workers whose reports come later."""
    budget: int | None = None
    """Tokens of this step; None: as many as the engine's setup says."""


class EngineSetup(TableSetup, Protocol):
    """Fixed properties of an engine."""

    @property
    def token_budget(self) -> int:
        """Tokens per step."""

    @property
    def running_max(self) -> int:
        """Requests that hold blocks at once."""

    @property
    def frees_early(self) -> bool:
        """Whether it reuses the blocks of an aborted load at once, and trusts fences alone."""


class Driven(Protocol):
    """Calls of an engine: those of a stack, or of the scheduler alone."""

    def on_new_request(self, request: Request) -> None:
        """Announce a request."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Ask for tokens that can be loaded."""

    def update_state_after_alloc(self, request: Request, blocks: BlockTables, num_external_tokens: int) -> None:
        """Pass the blocks of a request."""

    def build_connector_meta(self, step: StepOutput) -> ConnectorMeta:
        """Get the step's instructions to workers."""

    def update_connector_output(self, output: WorkerOutput) -> LoadReport:
        """Pass the workers' reports."""

    def request_finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, None]:
        """End a request."""


class EngineWorker(Protocol):
    """Calls of an engine to one worker in a step."""

    def start_step(self, meta: ConnectorMeta) -> None:
        """Begin transfers, before the forward pass."""

    def queue_stores(self, meta: ConnectorMeta) -> None:
        """Queue stores, after the forward pass."""

    def get_finished(self) -> WorkerOutput:
        """Report what has ended."""


class Memory(Protocol[R_contra]):
    """KV memory of an engine, which knows the right bytes."""

    def learn(self, request: R_contra) -> None:
        """Compute the right bytes of a request's new chunks."""

    def garble(self, group: int, block_ids: Iterable[int], filling: int) -> None:
        """Overwrite blocks that have a new owner."""

    def verify(self, request: R_contra, group: int, table: Sequence[int], start: int, stop: int) -> None:
        """Read tokens ``start`` to ``stop`` as attention would, and raise for a wrong byte."""

    def compute(self, request: R_contra, group: int, table: Sequence[int], start: int, stop: int) -> None:
        """Write tokens ``start`` to ``stop``, as a forward pass does."""


class EngineObserver(Protocol[R]):
    """Observer of the calls between an engine and what it drives."""

    def answered(self, seat: EngineSequence[R], local: int, answer: int | None) -> None:
        """A lookup was answered."""

    def heard(self, report: LoadReport) -> None:
        """Loads were reported as ended."""

    def aborted(self, request_id: str) -> None:
        """A request was aborted during its load."""


class BatchingEngine(Generic[R]):
    """Drives ``stack`` with ``workers``; ``watch`` observes every answer.

    Args:
        setup: fixed properties.
        stack: what it drives.
        workers: one per rank.
        memory: the KV memory, with the right bytes.
        watch: the observer.
        pass_time: called with the seconds that a forward pass takes.

    Attributes:
        waiting, running, loading: sequences, oldest first. orphans: aborted while a load still filled their blocks.
        held: ended while stores still read their blocks.
        finished: requests that were computed to their end, in order. done: number of requests that ended, aborts
            included.
        tokens_computed, tokens_loaded, tokens_external: tokens run, loaded, and accepted for a load.
    """

    def __init__(
        self,
        setup: EngineSetup,
        stack: Driven,
        workers: Sequence[EngineWorker],
        memory: Memory[R],
        watch: EngineObserver[R],
        pass_time: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.waiting: list[EngineSequence[R]] = []
        self.running: list[EngineSequence[R]] = []
        self.loading: dict[str, EngineSequence[R]] = {}
        self.orphans: dict[str, EngineSequence[R]] = {}
        self.held: dict[str, EngineSequence[R]] = {}
        self.finished: list[R] = []
        self.done = 0
        self.tokens_computed = 0
        self.tokens_loaded = 0
        self.tokens_external = 0
        self.tables: TableKeeper[R] = TableKeeper(setup)
        self.memory = memory
        self.workers = workers
        self._stack = stack
        self._setup = setup
        self._watch = watch
        self._windows = any(group.kind is not GroupKind.FULL_ATTENTION for group in setup.engine.groups)
        self._arrivals = 0
        self._pass_time = pass_time

    @property
    def seats(self) -> list[EngineSequence[R]]:
        """All unfinished requests, oldest first."""
        return sorted([*self.waiting, *self.running, *self.loading.values()], key=lambda seat: seat.arrival)

    def add(self, request: R, new_tokens: int, step: int = 0) -> None:
        """A request arrives that will generate ``new_tokens``."""
        self._arrivals += 1
        self.memory.learn(request)
        self.waiting.append(EngineSequence(request, new_tokens, self._arrivals, step))
        self._stack.on_new_request(request)

    def abort(self, seat: EngineSequence[R]) -> None:
        """End a request in whatever state it is."""
        if seat in self.waiting:
            self.waiting.remove(seat)
            self._finish(seat)
        elif seat in self.running:
            self.running.remove(seat)
            self._finish(seat)
        else:
            del self.loading[seat.request.request_id]
            self.done += 1
            self._watch.aborted(seat.request.request_id)
            self._stack.request_finished(seat.request, seat.tables)
            if self._setup.frees_early:
                self.tables.free(seat)
            else:
                self.orphans[seat.request.request_id] = seat

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self, whims: EngineBehaviour) -> None:
        """Schedule, transfer, compute, report."""
        scheduled: list[tuple[EngineSequence[R], int]] = []
        preempted = [self._preempt() for _ in range(min(whims.preempt, len(self.running)))]
        budget = self._setup.token_budget if whims.budget is None else whims.budget
        budget = self._schedule_running(budget, scheduled, preempted)
        if not preempted:
            self._admit(whims, budget, scheduled)
        entries = tuple(self._entry(seat, count) for seat, count in scheduled)
        meta = self._stack.build_connector_meta(
            StepOutput(entries, frozenset(seat.request.request_id for seat in preempted))
        )
        for worker in self.workers:
            worker.start_step(meta)
        self._pass_time(whims.forward_s / 2)
        for seat, count in scheduled:
            self._forward(seat, count, whims.filling)
        self._pass_time(whims.forward_s / 2)
        for worker in self.workers:
            worker.queue_stores(meta)
        for seat, _ in scheduled:
            self._sample(seat)
        self.take_reports(whims.silent)

    def take_reports(self, silent: Collection[int] = ()) -> None:
        """Hand the workers' reports to the stack, and its answer to the requests. Ranks in ``silent`` say nothing."""
        heard = [worker for rank, worker in enumerate(self.workers) if rank not in silent]
        output = WorkerOutput.aggregate([worker.get_finished() for worker in heard])
        report = self._stack.update_connector_output(output)
        self._watch.heard(report)
        self._end_loads(report)

    def _schedule_running(
        self, budget: int, scheduled: list[tuple[EngineSequence[R], int]], preempted: list[EngineSequence[R]]
    ) -> int:
        for seat in list(self.running):
            count = min(budget, seat.request.num_tokens - seat.computed)
            if seat not in self.running or not count:
                continue
            self.tables.leave_behind(seat)
            while not self.tables.extend(seat, seat.computed + count):
                victim = self._preempt()
                preempted.append(victim)
                if victim is seat:
                    break
            else:
                scheduled.append((seat, count))
                budget -= count
        return budget

    def _preempt(self) -> EngineSequence[R]:
        seat = self.running.pop()
        self.tables.free(seat)
        seat.computed = 0
        _insert(self.waiting, seat)
        return seat

    def _admit(self, whims: EngineBehaviour, budget: int, scheduled: list[tuple[EngineSequence[R], int]]) -> None:
        shy = whims.shy
        for seat in self.waiting[: whims.asks]:
            if not budget or len(self.running) + len(self.loading) >= self._setup.running_max:
                return
            request = seat.request
            prefix, local = self.tables.local_prefix(request)
            external, asynchronous = self._stack.get_num_new_matched_tokens(request, local)
            self._watch.answered(seat, local, external)
            demand(asynchronous == bool(external), PROTOCOL, f"answered ({external}, {asynchronous})")
            if external is None:
                continue
            if external and shy:
                shy = False
                continue
            if external and whims.accepts < 1:
                external = self._accepted(local, external, whims.accepts)
            count = 0 if external else min(budget, request.num_tokens - local)
            if not self.tables.open(seat, prefix, local + external, local + external + count):
                return
            self.waiting.remove(seat)
            seat.computed, seat.load_end = local, local + external
            self._stack.update_state_after_alloc(request, self.tables.views(seat), external)
            self.tokens_external += external
            if external:
                seat.fresh.clear()  # the load fills them
                self.loading[request.request_id] = seat
            else:
                _insert(self.running, seat)
                scheduled.append((seat, count))
                budget -= count

    def _accepted(self, local: int, external: int, share: float) -> int:
        """A part of an offer. Where there are windows, nothing: a shorter part would need an earlier window."""
        align = self.tables.align_tokens
        return 0 if self._windows else max(0, int(local + external * share) // align * align - local)

    @staticmethod
    def _entry(seat: EngineSequence[R], count: int) -> ScheduledRequest:
        ids = tuple(tuple(table[reported:]) for table, reported in zip(seat.tables, seat.reported, strict=True))
        first_time = not any(seat.reported)
        seat.reported = [len(table) for table in seat.tables]
        return ScheduledRequest(seat.request.request_id, seat.computed, count, ids, first_time)

    # -- compute -----------------------------------------------------------------------------------------------------

    def _forward(self, seat: EngineSequence[R], count: int, filling: int) -> None:
        """Read every earlier token's bytes as attention would, and write those of the scheduled ones."""
        start, stop = seat.computed, seat.computed + count
        for group, block_id in seat.fresh:
            self.memory.garble(group, (block_id,), filling)
        seat.fresh.clear()
        for group, (spec, table) in enumerate(zip(self.tables.groups, seat.tables, strict=True)):
            self.memory.verify(seat.request, group, table, first_attended(spec, start), start)
            self.memory.compute(seat.request, group, table, start, stop)
        seat.computed = stop
        self.tokens_computed += count
        self.tables.register(seat, stop)

    def _sample(self, seat: EngineSequence[R]) -> None:
        request = seat.request
        if seat.computed < request.num_tokens:
            return
        seat.generated += 1
        if seat.generated < seat.new_tokens:
            hashes = len(request.block_hashes)
            request.extend([request.next_token()])
            if len(request.block_hashes) > hashes:
                self.memory.learn(request)
            return
        self.running.remove(seat)
        self._finish(seat)
        self.finished.append(request)

    def _finish(self, seat: EngineSequence[R]) -> None:
        """The request is over; its blocks are free at once, or when the stack says that its stores have ended."""
        self.done += 1
        hold, _ = self._stack.request_finished(seat.request, seat.tables)
        if hold:
            demand(self._setup.engine.capabilities.delays_free_blocks, PROTOCOL, "blocks shall be held")
            self.held[seat.request.request_id] = seat
        else:
            self.tables.free(seat)

    def _end_loads(self, report: LoadReport) -> None:
        for request_id in sorted(report.finished_sending):
            demand(request_id in self.held, PROTOCOL, f"{request_id} is said to have sent, nobody waits for that")
            self.tables.free(self.held.pop(request_id))
        for request_id in sorted(report.finished):
            orphan = self.orphans.pop(request_id, None)
            if orphan is not None:
                self.tables.free(orphan)
            seat = self.loading.pop(request_id, None)
            if seat is None:
                continue
            valid = self.tables.usable_tokens(seat, seat.load_end, report.invalid_block_ids)
            self.tables.cut(seat, valid)  # where a window had no blocks, some are needed now
            self.tables.register(seat, valid)
            self.tokens_loaded += max(0, valid - seat.computed)
            seat.computed = min(valid, seat.request.num_tokens - 1)
            _insert(self.running, seat)


def _insert(seats: list[EngineSequence[R]], seat: EngineSequence[R]) -> None:
    """Keep seats in order of arrival."""
    seats.append(seat)
    seats.sort(key=lambda other: other.arrival)
