"""A small engine over the core: continuous batching with prefix caching and preemption, over real (small) bytes.

It follows the contract of docs/how-to/drive-tierkv.md and looks at every byte that a forward pass would read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from core_pool import BedPool
from core_tables import BedTables
from core_truth import TOKEN_BYTES, Audit, BedRequest, Truth
from core_worker import ScriptedWorker
from group_parts import attended

from tierkv.scheduler.scheduler import OffloadScheduler
from tierkv.types.engine import NULL_BLOCK_ID, GroupKind, GroupSpec, LoadReport, ScheduledRequest, StepOutput
from tierkv.types.geometry import cdiv
from tierkv.types.keys import Key


@dataclass(eq=False, slots=True)
class EngineSequence:
    """One request in the engine. computed: tokens whose KV is there. told: blocks per group that the core knows of.

    deferred_since_s: since when its lookup is unanswered, or None. offered: the chunks of its last offer.
    """

    request: BedRequest
    new_tokens: int
    arrival: int
    tables: list[list[int]] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    computed: int = 0
    generated: int = 0
    load_end: int = 0
    deferred_since_s: float | None = None
    offered: tuple[Key, ...] = ()


@dataclass(slots=True)
class EngineBehaviour:
    """What the engine feels like in one step.

    budget: tokens per step. asks: how many waiting requests it considers. accepts: share of the offered tokens that it
    accepts, in percent. preempt: how many of the youngest running requests it throws out.
    """

    budget: int = 16
    asks: int = 100
    accepts: int = 100
    preempt: int = 0


class BedEngine:
    """Drives scheduler and worker. ``on_answer`` sees each answer of a lookup before it is used."""

    def __init__(
        self,
        scheduler: OffloadScheduler,
        worker: ScriptedWorker,
        pool: BedPool,
        groups: Sequence[GroupSpec],
        hash_block_tokens: int,
        truth: Truth,
        audit: Audit,
        on_answer: Callable[[EngineSequence, int, int | None], None],
    ) -> None:
        self.waiting: list[EngineSequence] = []
        self.running: list[EngineSequence] = []
        self.loading: dict[str, EngineSequence] = {}
        self.orphans: dict[str, EngineSequence] = {}
        self.held: dict[str, EngineSequence] = {}
        self.done = 0
        self.tokens_computed = 0
        self.tokens_external = 0
        self._scheduler = scheduler
        self._worker = worker
        self._pool = pool
        self._tables = BedTables(pool, groups, hash_block_tokens)
        self._windows = any(group.window_chunks is not None for group in scheduler._geometry.groups)
        self._truth = truth
        self._audit = audit
        self._on_answer = on_answer
        self._arrivals = 0

    @property
    def seats(self) -> list[EngineSequence]:
        """All unfinished requests, oldest first."""
        return sorted([*self.waiting, *self.running, *self.loading.values()], key=lambda seat: seat.arrival)

    def add(self, request: BedRequest, new_tokens: int) -> None:
        """A request arrives that will generate ``new_tokens``."""
        self._truth.learn(request)
        self.waiting.append(EngineSequence(request, max(1, new_tokens), self._arrivals))
        self._arrivals += 1
        self._scheduler.on_new_request(request)

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
            self._scheduler.request_finished(seat.request, seat.tables)
            self.done += 1
            self.orphans[seat.request.request_id] = seat

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self, whims: EngineBehaviour, reports_max: int = 1_000_000) -> None:
        """Schedule, transfer, compute, report."""
        scheduled: dict[str, tuple[EngineSequence, int]] = {}
        preempted = [self._preempt() for _ in range(min(whims.preempt, len(self.running)))]
        budget = self._schedule_running(whims.budget, scheduled, preempted)
        if not preempted:
            self._admit(whims, budget, scheduled)
        meta = self._scheduler.build_connector_meta(
            StepOutput(
                tuple(self._entry(seat, count) for seat, count in scheduled.values()),
                frozenset(seat.request.request_id for seat in preempted),
            )
        )
        self._worker.start_step(meta)
        for seat, count in scheduled.values():
            self._forward(seat, count)
        self._worker.queue_stores(meta)
        for seat, _ in scheduled.values():
            self._sample(seat)
        self.take_reports(reports_max)

    def take_reports(self, reports_max: int = 1_000_000) -> None:
        """Hand the worker's report to the core, and its answer to the requests."""
        report = self._scheduler.update_connector_output(self._worker.get_finished(reports_max))
        self._end_loads(report)

    def _schedule_running(
        self, budget: int, scheduled: dict[str, tuple[EngineSequence, int]], preempted: list[EngineSequence]
    ) -> int:
        for seat in sorted(self.running, key=lambda s: s.arrival):
            count = min(budget, seat.request.num_tokens - seat.computed)
            if seat not in self.running or not count:
                continue
            self._tables.leave_behind(seat.tables, seat.computed)
            while not self._tables.extend(seat.tables, seat.computed + count):
                victim = self._preempt()
                preempted.append(victim)
                if victim is seat:
                    break
            else:
                scheduled[seat.request.request_id] = (seat, count)
                budget -= count
        for seat in preempted:
            if scheduled.pop(seat.request.request_id, None) is not None:
                raise AssertionError("the bed preempted what it had scheduled")
        return budget

    def _preempt(self) -> EngineSequence:
        seat = max(self.running, key=lambda s: s.arrival)
        self.running.remove(seat)
        self._free(seat)
        seat.computed = 0
        self.waiting.append(seat)
        self.waiting.sort(key=lambda s: s.arrival)
        return seat

    def _admit(self, whims: EngineBehaviour, budget: int, scheduled: dict[str, tuple[EngineSequence, int]]) -> None:
        for seat in self.waiting[: whims.asks]:
            if not budget:
                return
            request = seat.request
            prefix, local = self._tables.local_prefix(request)
            external, asynchronous = self._scheduler.get_num_new_matched_tokens(request, local)
            self._on_answer(seat, local, external)
            assert asynchronous == bool(external)
            if external is None:
                continue
            if external and whims.accepts < 100:
                external = self._accepted(local, external, whims.accepts)
            count = 0 if external else min(budget, request.num_tokens - local)
            opened = self._tables.open(prefix, local + external, local + external + count)
            if opened is None:
                return
            seat.tables, seat.told = opened, [0] * len(opened)
            self.waiting.remove(seat)
            seat.computed, seat.load_end = local, local + external
            tables = [[self._pool.view(block_id) for block_id in table] for table in seat.tables]
            self._scheduler.update_state_after_alloc(request, tables, external)
            self.tokens_external += external
            if external:
                self.loading[request.request_id] = seat
            else:
                self.running.append(seat)
                scheduled[request.request_id] = (seat, count)
                budget -= count

    def _accepted(self, local: int, external: int, percent: int) -> int:
        """A part of an offer; where there are windows, nothing: a shorter part would need an earlier window."""
        align = self._tables.align
        return 0 if self._windows else max(0, (local + external * percent // 100) // align * align - local)

    def _entry(self, seat: EngineSequence, count: int) -> ScheduledRequest:
        first_time = not any(seat.told)
        ids = tuple(tuple(table[told:]) for table, told in zip(seat.tables, seat.told, strict=True))
        seat.told = [len(table) for table in seat.tables]
        return ScheduledRequest(seat.request.request_id, seat.computed, count, ids, first_time)

    # -- compute -----------------------------------------------------------------------------------------------------

    def _forward(self, seat: EngineSequence, count: int) -> None:
        """Read every earlier token's bytes as attention would, and write those of the scheduled ones."""
        request, start, stop = seat.request, seat.computed, seat.computed + count
        for index, (group, table) in enumerate(zip(self._tables.groups, seat.tables, strict=True)):
            size, seen = group.block_tokens, attended(group, start)
            for i in range(seen.start // size, cdiv(stop, size)):
                first = i * size
                self._read(request, index, table[i], first, range(max(seen.start, first), min(start, first + size)))
                self._write(request, index, table[i], first, range(max(start, first), min(stop, first + size)))
        seat.computed = stop
        self.tokens_computed += count
        self._tables.register(request, seat.tables, stop)

    def _read(self, request: BedRequest, index: int, block_id: int, first: int, tokens: range) -> None:
        """Read the bytes of some tokens out of the block that begins with token ``first``."""
        if not tokens:
            return
        assert block_id != NULL_BLOCK_ID, "the engine freed a block that it needs"
        self._audit.begin_read(("gpu", block_id), "forward")
        place, right = self._bytes_of(request, index, first, tokens)
        assert bytes(self._pool.memory[block_id][place]) == right, (
            f"{request.request_id} computes from wrong bytes: group {index}, {tokens}, block {block_id}"
        )
        self._audit.end_read(("gpu", block_id), "forward")

    def _write(self, request: BedRequest, index: int, block_id: int, first: int, tokens: range) -> None:
        if not tokens:
            return
        place, new = self._bytes_of(request, index, first, tokens)
        memory = self._pool.memory[block_id]
        if memory[place] != new:  # computing a loaded last token again changes nothing
            self._audit.touch(("gpu", block_id), f"forward of {request.request_id}")
            memory[place] = new

    def _bytes_of(self, request: BedRequest, index: int, first: int, tokens: range) -> tuple[slice, bytes]:
        """Where in its block, and what, the bytes of these tokens are; of a state, the last one's in all of it."""
        group = self._tables.groups[index]
        if group.kind is GroupKind.SSM:
            size = group.block_tokens
            return slice(0, size * TOKEN_BYTES), request.state(index, tokens.stop, size)
        place = slice((tokens.start - first) * TOKEN_BYTES, (tokens.stop - first) * TOKEN_BYTES)
        return place, request.kv(index, tokens.start, tokens.stop)

    def _sample(self, seat: EngineSequence) -> None:
        request = seat.request
        if seat.computed < request.num_tokens:
            return
        seat.generated += 1
        if seat.generated < seat.new_tokens:
            request.extend([request.num_tokens])
            self._truth.learn(request)
            return
        self.running.remove(seat)
        self._finish(seat)

    def _finish(self, seat: EngineSequence) -> None:
        """The request is over; its blocks are free at once, or when the core says that its stores have ended."""
        self.done += 1
        hold, _ = self._scheduler.request_finished(seat.request, seat.tables)
        if hold:
            self.held[seat.request.request_id] = seat
        else:
            self._free(seat)

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _free(self, seat: EngineSequence) -> None:
        if seat.tables:  # one that only waited has none
            self._tables.cut(seat.tables, 0)
        seat.tables, seat.told = [], []

    def _end_loads(self, report: LoadReport) -> None:
        for request_id in report.finished_sending:
            self._free(self.held.pop(request_id))
        for request_id in report.finished:
            orphan = self.orphans.pop(request_id, None)
            if orphan is not None:
                self._free(orphan)
                continue
            seat = self.loading.pop(request_id)
            valid = self._tables.usable_tokens(seat.tables, seat.load_end, report.invalid_block_ids)
            self._tables.cut(seat.tables, valid)  # where a window had no blocks, some are needed now
            self._tables.register(seat.request, seat.tables, valid)
            seat.computed = min(valid, seat.request.num_tokens - 1)
            self.running.append(seat)
