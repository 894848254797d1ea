"""The simulated engine: continuous batching over real bytes, driving a stack as docs/how-to/drive-tierkv.md says.

It is deliberately capricious: it preempts, changes its mind about offers, accepts a part of them, stops asking.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from simulation.checks.failure import demand
from simulation.checks.probe import workers_of
from simulation.drawing.run_spec import RunSpec
from simulation.engine.expected_bytes import SimRequest, Truth
from simulation.engine.kv_memory import KvMemory
from simulation.engine.sequences import EngineSequence, TableKeeper, first_attended
from tierkv.stack.stack import Stack
from tierkv.types.engine import GroupKind, LoadReport, ScheduledRequest, StepOutput
from tierkv.types.transfers import WorkerOutput

PROTOCOL = "engine protocol"
"""What an engine was promised about the calls' answers."""


@dataclass(frozen=True, slots=True)
class EngineBehaviour:
    """What the engine feels like in one step.

    asks: how many waiting requests it considers. accepts: share of an offer that it takes. preempt: how many of its
    youngest requests it throws out. shy: whether it leaves the first offer unused. filling: byte that new owners of
    blocks write first. forward_s: how long the forward pass takes, half of it before it writes.
    silent: ranks of workers whose reports come later.
    """

    asks: int = 100
    accepts: float = 1.0
    preempt: int = 0
    forward_s: float = 0.0
    shy: bool = False
    filling: int = 0xDD
    silent: frozenset[int] = frozenset()


class Monitor(Protocol):
    """Who looks on."""

    def answered(self, seat: EngineSequence, local: int, answer: int | None) -> None:
        """A lookup was answered."""

    def heard(self, report: LoadReport) -> None:
        """The stack told of loads that ended."""

    def aborted(self, request_id: str) -> None:
        """A request ended while it was loaded."""


class SimEngine:
    """Drives ``stack``; ``watch`` sees every word that passes between the two. ``pass_time``: the GPU computes.

    Attributes:
        waiting, running, loading: seats, oldest first. orphans: aborted while a load still filled their blocks.
        held: ended while stores still read their blocks.
        finished: requests that came to their end, in order.
    """

    def __init__(
        self, setup: RunSpec, stack: Stack, truth: Truth, watch: Monitor, pass_time: Callable[[float], None]
    ) -> None:
        self.waiting: list[EngineSequence] = []
        self.running: list[EngineSequence] = []
        self.loading: dict[str, EngineSequence] = {}
        self.orphans: dict[str, EngineSequence] = {}
        self.held: dict[str, EngineSequence] = {}
        self.finished: list[SimRequest] = []
        self.tokens_computed = 0
        self.tokens_loaded = 0
        self.tables = TableKeeper(setup)
        self.memory = KvMemory(setup.engine, truth, setup.gpu_blocks)
        self.workers = workers_of(stack)
        self._stack = stack
        self._setup = setup
        self._truth = truth
        self._watch = watch
        self._windows = any(group.kind is not GroupKind.FULL_ATTENTION for group in setup.engine.groups)
        self._arrivals = 0
        self._pass_time = pass_time
        for index, worker in enumerate(self.workers):
            worker.register_kv_caches(self.memory.caches(index))

    @property
    def seats(self) -> list[EngineSequence]:
        """All unfinished requests, oldest first."""
        return sorted([*self.waiting, *self.running, *self.loading.values()], key=lambda seat: seat.arrival)

    def add(self, request: SimRequest, new_tokens: int, step: int) -> None:
        """A request arrives that will generate ``new_tokens``."""
        self._arrivals += 1
        self._truth.learn(request)
        self.waiting.append(EngineSequence(request, new_tokens, self._arrivals, step))
        self._stack.on_new_request(request)

    def abort(self, seat: EngineSequence) -> None:
        """End a request in whatever state it is."""
        if seat in self.waiting:
            self.waiting.remove(seat)
            self._finish(seat)
        elif seat in self.running:
            self.running.remove(seat)
            self._finish(seat)
        else:
            del self.loading[seat.request.request_id]
            self._watch.aborted(seat.request.request_id)
            self._stack.request_finished(seat.request, seat.tables)
            if self._setup.frees_early:
                self.tables.free(seat)
            else:
                self.orphans[seat.request.request_id] = seat

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self, whims: EngineBehaviour) -> None:
        """Schedule, transfer, compute, report."""
        scheduled: list[tuple[EngineSequence, int]] = []
        preempted = [self._preempt() for _ in range(min(whims.preempt, len(self.running)))]
        budget = self._schedule_running(scheduled, preempted)
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

    def _schedule_running(self, scheduled: list[tuple[EngineSequence, int]], preempted: list[EngineSequence]) -> int:
        budget = self._setup.token_budget
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

    def _preempt(self) -> EngineSequence:
        seat = self.running.pop()
        self.tables.free(seat)
        seat.computed = 0
        _insert(self.waiting, seat)
        return seat

    def _admit(self, whims: EngineBehaviour, budget: int, scheduled: list[tuple[EngineSequence, int]]) -> None:
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
    def _entry(seat: EngineSequence, count: int) -> ScheduledRequest:
        ids = tuple(tuple(table[told:]) for table, told in zip(seat.tables, seat.told, strict=True))
        first_time = not any(seat.told)
        seat.told = [len(table) for table in seat.tables]
        return ScheduledRequest(seat.request.request_id, seat.computed, count, ids, first_time)

    # -- compute -----------------------------------------------------------------------------------------------------

    def _forward(self, seat: EngineSequence, count: int, filling: int) -> None:
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

    def _sample(self, seat: EngineSequence) -> None:
        request = seat.request
        if seat.computed < request.num_tokens:
            return
        seat.generated += 1
        if seat.generated < seat.new_tokens:
            hashes = len(request.block_hashes)
            request.extend([request.next_token()])
            if len(request.block_hashes) > hashes:
                self._truth.learn(request)
            return
        self.running.remove(seat)
        self._finish(seat)
        self.finished.append(request)

    def _finish(self, seat: EngineSequence) -> None:
        """The request is over; its blocks are free at once, or when the stack says that its stores have ended."""
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


def _insert(seats: list[EngineSequence], seat: EngineSequence) -> None:
    """Keep seats in order of arrival."""
    seats.append(seat)
    seats.sort(key=lambda other: other.arrival)
