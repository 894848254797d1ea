"""A small engine over the core: continuous batching with prefix caching and preemption, over real (small) bytes.

It follows the contract of docs/how-to/drive-tierkv.md and looks at every byte that a forward pass would read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from core_pool import BedPool
from core_truth import TOKEN_BYTES, Audit, BedRequest, Truth
from core_worker import ScriptedWorker

from tierkv.scheduler.scheduler import OffloadScheduler
from tierkv.types.engine import LoadReport, ScheduledRequest, StepOutput
from tierkv.types.geometry import Geometry, cdiv


@dataclass(eq=False, slots=True)
class Seat:
    """One request in the engine. computed: tokens whose KV is there. told: blocks per group that the core knows of.

    deferred_since_s: since when its lookup is unanswered, or None.
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


@dataclass(slots=True)
class Whims:
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
        geometry: Geometry,
        truth: Truth,
        audit: Audit,
        on_answer: Callable[[Seat, int, int | None], None],
    ) -> None:
        self.waiting: list[Seat] = []
        self.running: list[Seat] = []
        self.loading: dict[str, Seat] = {}
        self.orphans: dict[str, Seat] = {}
        self.done = 0
        self.tokens_computed = 0
        self.tokens_external = 0
        self._scheduler = scheduler
        self._worker = worker
        self._pool = pool
        self._geometry = geometry
        self._truth = truth
        self._audit = audit
        self._on_answer = on_answer
        self._arrivals = 0
        self._align = math.lcm(*(group.block_tokens for group in geometry.groups))

    @property
    def seats(self) -> list[Seat]:
        """All unfinished requests, oldest first."""
        return sorted([*self.waiting, *self.running, *self.loading.values()], key=lambda seat: seat.arrival)

    def add(self, request: BedRequest, new_tokens: int) -> None:
        """A request arrives that will generate ``new_tokens``."""
        self._truth.learn(request)
        self.waiting.append(Seat(request, max(1, new_tokens), self._arrivals))
        self._arrivals += 1
        self._scheduler.on_new_request(request)

    def abort(self, seat: Seat) -> None:
        """End a request in whatever state it is."""
        if seat in self.waiting:
            self.waiting.remove(seat)
            self._finish(seat)
        elif seat in self.running:
            self.running.remove(seat)
            self._finish(seat)
            self._free(seat)
        else:
            del self.loading[seat.request.request_id]
            self._finish(seat)
            self.orphans[seat.request.request_id] = seat

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self, whims: Whims, reports_max: int = 1_000_000) -> None:
        """Schedule, transfer, compute, report."""
        scheduled: dict[str, tuple[Seat, int]] = {}
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

    def _schedule_running(self, budget: int, scheduled: dict[str, tuple[Seat, int]], preempted: list[Seat]) -> int:
        for seat in sorted(self.running, key=lambda s: s.arrival):
            count = min(budget, seat.request.num_tokens - seat.computed)
            if seat not in self.running or not count:
                continue
            while not self._extend(seat, seat.computed + count):
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

    def _preempt(self) -> Seat:
        seat = max(self.running, key=lambda s: s.arrival)
        self.running.remove(seat)
        self._free(seat)
        seat.computed = 0
        self.waiting.append(seat)
        self.waiting.sort(key=lambda s: s.arrival)
        return seat

    def _admit(self, whims: Whims, budget: int, scheduled: dict[str, tuple[Seat, int]]) -> None:
        for seat in self.waiting[: whims.asks]:
            if not budget:
                return
            request = seat.request
            prefix, local = self._local_prefix(seat)
            external, asynchronous = self._scheduler.get_num_new_matched_tokens(request, local)
            self._on_answer(seat, local, external)
            assert asynchronous == bool(external)
            if external is None:
                continue
            if external and whims.accepts < 100:
                external = max(0, (local + external * whims.accepts // 100) // self._align * self._align - local)
            count = 0 if external else min(budget, request.num_tokens - local)
            if not self._open(seat, prefix, local + external + count):
                return
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

    def _entry(self, seat: Seat, count: int) -> ScheduledRequest:
        first_time = not any(seat.told)
        ids = tuple(tuple(table[told:]) for table, told in zip(seat.tables, seat.told, strict=True))
        seat.told = [len(table) for table in seat.tables]
        return ScheduledRequest(seat.request.request_id, seat.computed, count, ids, first_time)

    # -- compute -----------------------------------------------------------------------------------------------------

    def _forward(self, seat: Seat, count: int) -> None:
        """Read every earlier token's bytes as attention would, and write those of the scheduled ones."""
        request, start, stop = seat.request, seat.computed, seat.computed + count
        for group, table in zip(self._geometry.groups, seat.tables, strict=True):
            size = group.block_tokens
            for i in range(cdiv(stop, size)):
                block_id = table[i]
                memory = self._pool.memory[block_id]
                first = i * size
                known = min(start, first + size) - first
                if known > 0:
                    self._audit.begin_read(("gpu", block_id), "forward")
                    right = request.kv(group.index, first, first + known)
                    assert bytes(memory[: len(right)]) == right, (
                        f"{request.request_id} computes from wrong bytes: group {group.index}, block {i}, id {block_id}"
                    )
                    self._audit.end_read(("gpu", block_id), "forward")
                begin, end = max(start, first), min(stop, first + size)
                place = slice((begin - first) * TOKEN_BYTES, (end - first) * TOKEN_BYTES)
                new = request.kv(group.index, begin, end) if begin < end else b""
                if new and memory[place] != new:  # computing a loaded last token again changes nothing
                    self._audit.touch(("gpu", block_id), f"forward of {request.request_id}")
                    memory[place] = new
        seat.computed = stop
        self.tokens_computed += count
        self._register(seat, stop)

    def _sample(self, seat: Seat) -> None:
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
        self._free(seat)

    def _finish(self, seat: Seat) -> None:
        self.done += 1
        result = self._scheduler.request_finished(seat.request, seat.tables)
        assert result == (False, None)

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _local_prefix(self, seat: Seat) -> tuple[list[list[int]], int]:
        """Blocks that the GPU still has, and the tokens they cover in all groups: at least one token is computed."""
        request = seat.request
        found: list[list[int]] = []
        tokens = request.num_tokens - 1
        for group in self._geometry.groups:
            size = group.block_tokens
            table: list[int] = []
            for i in range(tokens // size):
                block_id = self._pool.find(group.index, self._block_hash(request, group.index, i))
                if block_id is None:
                    break
                table.append(block_id)
            tokens = min(tokens, len(table) * size)
            found.append(table)
        tokens = tokens // self._align * self._align
        sizes = [group.block_tokens for group in self._geometry.groups]
        return [table[: tokens // size] for table, size in zip(found, sizes, strict=True)], tokens

    def _block_hash(self, request: BedRequest, group: int, index: int) -> bytes:
        per_block = self._geometry.groups[group].block_tokens // self._geometry.hash_block_tokens
        return request.block_hashes[per_block * (index + 1) - 1]

    def _open(self, seat: Seat, prefix: list[list[int]], tokens: int) -> bool:
        for table in prefix:
            for block_id in table:
                self._pool.hold(block_id)
        seat.tables = [list(table) for table in prefix]
        seat.told = [0] * len(prefix)
        if self._extend(seat, tokens):
            return True
        self._free(seat)
        return False

    def _extend(self, seat: Seat, tokens: int) -> bool:
        needs = [cdiv(tokens, group.block_tokens) for group in self._geometry.groups]
        missing = [max(0, need - len(table)) for need, table in zip(needs, seat.tables, strict=True)]
        if sum(missing) > self._pool.num_free:
            return False
        for count, table in zip(missing, seat.tables, strict=True):
            table.extend(self._pool.take() for _ in range(count))
        return True

    def _free(self, seat: Seat) -> None:
        for table in seat.tables:
            for block_id in reversed(table):
                self._pool.release(block_id)
        seat.tables, seat.told = [], []

    def _register(self, seat: Seat, tokens: int) -> None:
        for group, table in zip(self._geometry.groups, seat.tables, strict=True):
            for i in range(tokens // group.block_tokens):
                self._pool.register(group.index, self._block_hash(seat.request, group.index, i), table[i])

    def _end_loads(self, report: LoadReport) -> None:
        for request_id in report.finished:
            orphan = self.orphans.pop(request_id, None)
            if orphan is not None:
                self._free(orphan)
                continue
            seat = self.loading.pop(request_id)
            valid = seat.load_end
            for group, table in zip(self._geometry.groups, seat.tables, strict=True):
                bad = (i for i, block_id in enumerate(table) if block_id in report.invalid_block_ids)
                valid = min(valid, next(bad, len(table)) * group.block_tokens)
            self._register(seat, valid)
            seat.computed = min(valid, seat.request.num_tokens - 1)
            self.running.append(seat)
