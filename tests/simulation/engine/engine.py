"""Batching engine: continuous batching over real bytes, driving a stack as docs/how-to/drive-tierkv.md says.

Of the small engines, only this one checks every byte that a forward pass reads, while it preempts, refuses offers and
aborts.
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

PREEMPTIONS_MAX = 10
"""Preemptions of a request after which no younger one is admitted before its end."""

PROTOCOL = "engine protocol"
"""Invariant: the calls' answers are as the contract of engines says."""


@dataclass(frozen=True, slots=True)
class EngineBehaviour:
    """Behaviour of an engine in one step."""

    asks: int = 100
    """Number of waiting requests that it considers."""
    accepts: float = 1.0
    """Share of an offer that it takes."""
    preempt: int = 0
    """Number of its youngest running requests that it preempts."""
    forward_s: float = 0.0
    """Duration of the forward pass in seconds; half of it before the engine writes."""
    refuses_first: bool = False
    """Whether it refuses the first offer."""
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

    def answered(self, sequence: EngineSequence[R], local: int, answer: int | None) -> None:
        """A lookup was answered."""

    def loads_ended(self, report: LoadReport) -> None:
        """Loads were reported as ended."""

    def aborted(self, request_id: str) -> None:
        """A request was aborted during its load."""


class BatchingEngine(Generic[R]):
    """Drives ``stack`` with ``workers``; ``monitor`` observes every answer.

    Args:
        setup: fixed properties.
        stack: what it drives.
        workers: one per rank.
        memory: the KV memory, with the right bytes.
        monitor: the observer.
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
        monitor: EngineObserver[R],
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
        self._monitor = monitor
        self._windows = any(group.kind is not GroupKind.FULL_ATTENTION for group in setup.engine.groups)
        self._arrivals = 0
        self._pass_time = pass_time

    @property
    def sequences(self) -> list[EngineSequence[R]]:
        """All unfinished requests, oldest first."""
        return sorted([*self.waiting, *self.running, *self.loading.values()], key=lambda sequence: sequence.arrival)

    def add(self, request: R, new_tokens: int, step: int = 0) -> None:
        """A request arrives that will generate ``new_tokens``."""
        self._arrivals += 1
        self.memory.learn(request)
        self.waiting.append(EngineSequence(request, new_tokens, self._arrivals, step))
        self._stack.on_new_request(request)

    def abort(self, sequence: EngineSequence[R]) -> None:
        """End a request in whatever state it is."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            self._finish(sequence)
        elif sequence in self.running:
            self.running.remove(sequence)
            self._finish(sequence)
        else:
            del self.loading[sequence.request.request_id]
            self.done += 1
            self._monitor.aborted(sequence.request.request_id)
            self._stack.request_finished(sequence.request, sequence.tables)
            if self._setup.frees_early:
                self.tables.free(sequence)
            else:
                self.orphans[sequence.request.request_id] = sequence

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self, behaviour: EngineBehaviour) -> None:
        """Schedule, transfer, compute, report."""
        scheduled: list[tuple[EngineSequence[R], int]] = []
        preempted = [self._preempt() for _ in range(min(behaviour.preempt, len(self.running)))]
        budget = self._setup.token_budget if behaviour.budget is None else behaviour.budget
        budget = self._schedule_running(budget, scheduled, preempted)
        if not preempted:
            self._admit(behaviour, budget, scheduled)
        entries = tuple(self._entry(sequence, count) for sequence, count in scheduled)
        meta = self._stack.build_connector_meta(
            StepOutput(entries, frozenset(sequence.request.request_id for sequence in preempted))
        )
        for worker in self.workers:
            worker.start_step(meta)
        self._pass_time(behaviour.forward_s / 2)
        for sequence, count in scheduled:
            self._forward(sequence, count, behaviour.filling)
        self._pass_time(behaviour.forward_s / 2)
        for worker in self.workers:
            worker.queue_stores(meta)
        for sequence, _ in scheduled:
            self._sample(sequence)
        self.take_reports(behaviour.silent)

    def take_reports(self, silent: Collection[int] = ()) -> None:
        """Pass the workers' reports to the stack, and its answer to the requests. Ranks in ``silent`` report later."""
        reporting = [worker for rank, worker in enumerate(self.workers) if rank not in silent]
        output = WorkerOutput.aggregate([worker.get_finished() for worker in reporting])
        report = self._stack.update_connector_output(output)
        self._monitor.loads_ended(report)
        self._end_loads(report)

    def _schedule_running(
        self, budget: int, scheduled: list[tuple[EngineSequence[R], int]], preempted: list[EngineSequence[R]]
    ) -> int:
        for sequence in list(self.running):
            count = min(budget, sequence.request.num_tokens - sequence.computed)
            if sequence not in self.running or not count:
                continue
            self.tables.leave_behind(sequence)
            while not self.tables.extend(sequence, sequence.computed + count):
                if self._waits_for_loads(sequence):
                    break
                victim = self._preempt()
                preempted.append(victim)
                if victim is sequence:
                    break
            else:
                scheduled.append((sequence, count))
                budget -= count
        return budget

    def _waits_for_loads(self, sequence: EngineSequence[R]) -> bool:
        """Whether the youngest running request keeps its blocks, and waits, because younger ones are loading.

        No preemption takes their blocks before their loads have ended. If it gave up its own, others would take those,
        and it would load anew: requests could take each other's blocks in turns, dozens of steps each.
        """
        is_youngest = self.running[-1] is sequence
        return is_youngest and any(other.arrival > sequence.arrival for other in self.loading.values())

    def _preempt(self) -> EngineSequence[R]:
        sequence = self.running.pop()
        self.tables.free(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        _insert(self.waiting, sequence)
        return sequence

    def _admit(self, behaviour: EngineBehaviour, budget: int, scheduled: list[tuple[EngineSequence[R], int]]) -> None:
        refuses_first = behaviour.refuses_first
        losers = [sequence.arrival for sequence in self.sequences if sequence.preemptions >= PREEMPTIONS_MAX]
        for sequence in self.waiting[: behaviour.asks]:
            if losers and sequence.arrival > min(losers):
                return  # otherwise two requests could take each other's blocks in turns, for ever
            if not budget or len(self.running) + len(self.loading) >= self._setup.running_max:
                return
            request = sequence.request
            prefix, local = self.tables.local_prefix(request)
            external, asynchronous = self._stack.get_num_new_matched_tokens(request, local)
            self._monitor.answered(sequence, local, external)
            demand(asynchronous == bool(external), PROTOCOL, f"answered ({external}, {asynchronous})")
            if external is None:
                continue
            if external and refuses_first:
                refuses_first = False
                continue
            if external and behaviour.accepts < 1:
                external = self._accepted(local, external, behaviour.accepts)
            count = 0 if external else min(budget, request.num_tokens - local)
            if not self.tables.open(sequence, prefix, local + external, local + external + count):
                return
            self.waiting.remove(sequence)
            sequence.computed, sequence.load_end = local, local + external
            self._stack.update_state_after_alloc(request, self.tables.views(sequence), external)
            self.tokens_external += external
            if external:
                sequence.fresh.clear()  # the load fills them
                self.loading[request.request_id] = sequence
            else:
                _insert(self.running, sequence)
                scheduled.append((sequence, count))
                budget -= count

    def _accepted(self, local: int, external: int, share: float) -> int:
        """Part of an offer; 0 where there are windows: a shorter part would need an earlier window."""
        align = self.tables.align_tokens
        return 0 if self._windows else max(0, int(local + external * share) // align * align - local)

    @staticmethod
    def _entry(sequence: EngineSequence[R], count: int) -> ScheduledRequest:
        ids = tuple(tuple(table[reported:]) for table, reported in zip(sequence.tables, sequence.reported, strict=True))
        first_time = not any(sequence.reported)
        sequence.reported = [len(table) for table in sequence.tables]
        return ScheduledRequest(sequence.request.request_id, sequence.computed, count, ids, first_time)

    # -- compute -----------------------------------------------------------------------------------------------------

    def _forward(self, sequence: EngineSequence[R], count: int, filling: int) -> None:
        """Read every earlier token's bytes as attention would, and write those of the scheduled ones."""
        start, stop = sequence.computed, sequence.computed + count
        for group, block_id in sequence.fresh:
            self.memory.garble(group, (block_id,), filling)
        sequence.fresh.clear()
        for group, (spec, table) in enumerate(zip(self.tables.groups, sequence.tables, strict=True)):
            self.memory.verify(sequence.request, group, table, first_attended(spec, start), start)
            self.memory.compute(sequence.request, group, table, start, stop)
        sequence.computed = stop
        self.tokens_computed += count
        self.tables.register(sequence, stop)

    def _sample(self, sequence: EngineSequence[R]) -> None:
        request = sequence.request
        if sequence.computed < request.num_tokens:
            return
        sequence.generated += 1
        if sequence.generated < sequence.new_tokens:
            hashes = len(request.block_hashes)
            request.extend([request.next_token()])
            if len(request.block_hashes) > hashes:
                self.memory.learn(request)
            return
        self.running.remove(sequence)
        self._finish(sequence)
        self.finished.append(request)

    def _finish(self, sequence: EngineSequence[R]) -> None:
        """End a request; its blocks are free at once, or when the stack reports the end of its stores."""
        self.done += 1
        hold, _ = self._stack.request_finished(sequence.request, sequence.tables)
        if hold:
            demand(self._setup.engine.capabilities.delays_free_blocks, PROTOCOL, "blocks must be held")
            self.held[sequence.request.request_id] = sequence
        else:
            self.tables.free(sequence)

    def _end_loads(self, report: LoadReport) -> None:
        for request_id in sorted(report.finished_sending):
            demand(request_id in self.held, PROTOCOL, f"{request_id} is reported as sent, and was not held")
            self.tables.free(self.held.pop(request_id))
        for request_id in sorted(report.finished):
            orphan = self.orphans.pop(request_id, None)
            if orphan is not None:
                self.tables.free(orphan)
            sequence = self.loading.pop(request_id, None)
            if sequence is None:
                continue
            valid = self.tables.usable_tokens(sequence, sequence.load_end, report.invalid_block_ids)
            self.tables.cut(sequence, valid)  # where a window had no blocks, some are needed now
            self.tables.register(sequence, valid)
            self.tokens_loaded += max(0, valid - sequence.computed)
            sequence.computed = min(valid, sequence.request.num_tokens - 1)
            _insert(self.running, sequence)


def _insert(sequences: list[EngineSequence[R]], sequence: EngineSequence[R]) -> None:
    """Keep sequences in order of arrival."""
    sequences.append(sequence)
    sequences.sort(key=lambda other: other.arrival)
