"""An engine with windowed groups that computes, stores, loads, and reuses what its windows leave behind: real bytes.

Every token that a computed one attends to is looked at. There are no tiers below the host, and nothing is damaged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from core_parts import Core, make_core
from core_pool import BedBlock, BedPool
from core_tiers import GARBAGE
from core_truth import TOKEN_BYTES, Audit, BedRequest
from core_worker import ScriptedWorker
from group_parts import attended, first_block, full, local, ssm, window

from tierkv.manager.contract import RequestContext, StoreGrant
from tierkv.scheduler.limits import SchedulerLimits, StorePlanName
from tierkv.types.engine import NULL_BLOCK_ID, GroupSpec, LoadReport, ScheduledRequest, StepOutput
from tierkv.types.geometry import cdiv

LAYOUTS: tuple[tuple[tuple[GroupSpec, ...], int], ...] = (
    ((full(), window(8)), 1),
    ((window(6),), 1),
    ((full(), window(10), ssm()), 2),
    ((full(8), window(4), local(8)), 1),
    ((window(4), full(8)), 3),
    ((full(), ssm(8)), 2),
)
"""Groups and blocks per chunk: windows alone and beside others, with and without an alignment filter."""

_MAX_BATCHED_TOKENS = 16


@dataclass(eq=False, slots=True)
class Row:
    """One running or waiting request. tables: what the engine holds; told: how much of them the core knows.

    load_end: tokens that a load in flight will have brought; 0 without one. lost: a load failed, so it starts over.
    """

    request: BedRequest
    new_tokens: int
    tables: list[list[int]] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    computed: int = 0
    runs: bool = False
    load_end: int = 0
    lost: bool = False


class StoreBench:
    """See the module's docstring. Every pick may point at nothing and then does nothing."""

    def __init__(
        self, layout: int, plan: StorePlanName, *, slots: int = 40, gpu_blocks: int = 30, holds: bool = False
    ) -> None:
        groups, factor = LAYOUTS[layout]
        if plan == "lazy":
            factor = 1
        limits = SchedulerLimits(store_plan=plan, num_workers=2, holds_blocks_of_finished=holds)
        self.core: Core = make_core(groups=groups, factor=factor, slots=slots, limits=limits, hash_block_tokens=2)
        self.audit = Audit()
        self.pool = BedPool(max(group.block_tokens for group in groups) * TOKEN_BYTES, gpu_blocks, caching=True)
        self.core.scheduler.register_free_queue(self.pool, _MAX_BATCHED_TOKENS)
        core = self.core
        self.worker = ScriptedWorker(core.geometry, core.truth, [GARBAGE] * slots, self.pool.memory, self.audit, 2)
        self.rows: list[Row] = []
        self.held: dict[str, Row] = {}
        self.orphans: dict[str, Row] = {}
        self.stored = self.loaded = 0
        self._groups = groups
        self._align = math.lcm(*(group.block_tokens for group in groups)) * factor
        self._blocker: StoreGrant | None = None
        self._count = 0

    # -- moves -------------------------------------------------------------------------------------------------------

    def arrive(self, family: int, shared: int, own: int, new: int) -> None:
        """A request arrives: ``shared`` tokens of a family, then ``own`` of its own; it will generate ``new``."""
        self._count += 1
        tokens = [family * 100 + i for i in range(shared)] + [self._count * 1000 + i for i in range(own)]
        if not tokens or len(self.rows) > 5 or self._blocks_of(len(tokens) + new) > self.pool.num_free + self._in_use():
            return
        request = BedRequest(f"r{self._count}", tokens, self.core.geometry.hash_block_tokens)
        self.core.truth.learn(request)
        self.core.scheduler.on_new_request(request)
        self.rows.append(Row(request, max(1, new)))

    def _blocks_of(self, tokens: int) -> int:
        return sum(cdiv(tokens, group.block_tokens) for group in self._groups)

    def _in_use(self) -> int:
        return sum(block_id != NULL_BLOCK_ID for row in self.rows for table in row.tables for block_id in table)

    def step(self, counts: Sequence[int], *, preempt: bool = False) -> None:
        """An engine step: the i-th request computes so many tokens, if there are that many and there is room."""
        self.core.begin(self.core.now + 0.5)
        preempted = [self._preempt(row) for row in self.rows if row.lost]
        if preempt and self.rows and self._can_lose(self.rows[-1]):
            preempted.append(self._preempt(self.rows[-1]))
        scheduled: list[tuple[Row, int]] = []
        budget = _MAX_BATCHED_TOKENS
        for row, wish in zip(list(self.rows), counts, strict=False):
            if row in preempted or row.load_end:
                continue
            count = min(wish, budget, row.request.num_tokens - self._start(row))
            if count > 0 and self._make_room(row, count, preempted):
                scheduled.append((row, count))
                budget -= count
        entries = tuple(self._entry(row, count) for row, count in scheduled)
        names = frozenset(row.request.request_id for row in preempted)
        meta = self.core.scheduler.build_connector_meta(StepOutput(entries, names))
        self.stored += len(meta.stores)
        self.loaded += len(meta.loads)
        self.worker.start_step(meta)
        for row, count in scheduled:
            self._forward(row, count)
        self.worker.queue_stores(meta)
        for row, _ in scheduled:
            self._sample(row)

    def transfer(self, pick: int, failing: Sequence[bool] = ()) -> None:
        """One store runs."""
        running = list(self.worker.running)
        if running:
            self.worker.run(running[pick % len(running)], failing)

    def report(self, reports_max: int = 1_000_000) -> None:
        """Workers' words reach the core, at most so many."""
        self._take(self.core.scheduler.update_connector_output(self.worker.get_finished(reports_max)))

    def abort(self, pick: int) -> None:
        """A request ends early."""
        if self.rows:
            self._finish(self.rows[pick % len(self.rows)])

    def reset(self) -> None:
        """The cache is emptied between two steps."""
        self.core.scheduler.reset_cache()
        self.unblock()

    def block(self, room: int) -> None:
        """Somebody holds all slots of the host tier but ``room``."""
        self.unblock()
        core = self.core
        self._count += 1
        taken = core.host.room - room
        if taken > 0:
            size = core.geometry.groups[0].chunk_tokens
            other = core.request([self._count * 1000 + 500 + i for i in range(taken * size)], "blocker")
            keys = [(key, 0) for key in core.truth.keys(other)]
            self._blocker = core.manager.prepare_store(keys, RequestContext("blocker"))

    def unblock(self) -> None:
        """Undo :meth:`block`."""
        if self._blocker is not None:
            self.core.manager.complete_store(self._blocker.slots, frozenset(self._blocker.keys))
            self._blocker = None

    def end(self) -> None:
        """Everything ends well; then nothing may be left anywhere (S121)."""
        self.unblock()
        for _ in range(500):
            if not self.rows and self.worker.is_idle and not self.core.scheduler.has_pending_work:
                break
            self.step([4] * 6)
            for job_id in list(self.worker.running):
                self.worker.run(job_id)
            self.report()
            self.check()
        core, scheduler = self.core, self.core.scheduler
        assert not self.rows
        assert not self.held
        assert not self.orphans
        assert not scheduler._lookups._open
        assert not scheduler._lookups._loading
        assert not scheduler._records
        assert not len(scheduler._jobs)
        assert not len(scheduler._fences)
        assert not len(scheduler._tables._windows)
        assert not scheduler.has_pending_work
        assert core.host.room == core.host.num_slots, "a slot is neither free nor evictable"
        assert all(chunk.holders == 0 for chunk in core.host.visible())
        assert self.pool.num_free == len(self.pool.memory)
        assert self.audit.is_quiet

    def check(self) -> None:
        """Everything that holds between any two moves."""
        self.core.scheduler.validate()

    # -- the engine --------------------------------------------------------------------------------------------------

    def _start(self, row: Row) -> int:
        """Tokens that a request has, or finds on the GPU when it is let in."""
        if not row.runs:
            row.computed = self._find(row)
        return row.computed

    def _find(self, row: Row) -> int:
        """The longest prefix that every group has the needed blocks of."""
        last = (row.request.num_tokens - 1) // self._align * self._align
        return next((end for end in range(last, 0, -self._align) if self._tables_at(row, end) is not None), 0)

    def _tables_at(self, row: Row, end: int) -> list[list[int]] | None:
        """Blocks for a prefix of ``end`` tokens, with placeholders for what no window needs."""
        tables = []
        for index, group in enumerate(self._groups):
            table: list[int] = []
            for i in range(end // group.block_tokens):
                if self._is_behind(group, i, end):
                    table.append(NULL_BLOCK_ID)
                    continue
                block_id = self.pool.find(index, self._hash(row.request, group, i))
                if block_id is None:
                    return None
                table.append(block_id)
            tables.append(table)
        return tables

    @staticmethod
    def _is_behind(group: GroupSpec, block: int, tokens: int) -> bool:
        """Whether a window has left a block behind when the next token is number ``tokens``."""
        return block < first_block(group, tokens)

    def _hash(self, request: BedRequest, group: GroupSpec, block: int) -> bytes:
        per_block = group.block_tokens // self.core.geometry.hash_block_tokens
        return request.block_hashes[per_block * (block + 1) - 1]

    def _make_room(self, row: Row, count: int, preempted: list[Row]) -> bool:
        """Take blocks from younger requests where there are not enough."""
        while not self._extend(row, count):
            younger = [other for other in self.rows[self.rows.index(row) + 1 :] if self._can_lose(other)]
            if not younger or not row.runs or row.load_end:
                return False
            preempted.append(self._preempt(younger[-1]))
        return True

    @staticmethod
    def _can_lose(row: Row) -> bool:
        return row.runs and not row.load_end

    def _extend(self, row: Row, count: int) -> bool:
        if not row.runs and (not self._admit(row) or row.load_end):
            return False
        for group, table in zip(self._groups, row.tables, strict=True):  # first, as engines do: give back
            for i, block_id in enumerate(table):
                if block_id != NULL_BLOCK_ID and self._is_behind(group, i, row.computed):
                    self.pool.release(block_id)
                    table[i] = NULL_BLOCK_ID
        needs = [cdiv(row.computed + count, group.block_tokens) for group in self._groups]
        missing = [max(0, need - len(table)) for need, table in zip(needs, row.tables, strict=True)]
        if sum(missing) > self.pool.num_free:
            return False
        for lack, table in zip(missing, row.tables, strict=True):
            table.extend(self.pool.take() for _ in range(lack))
        return True

    def _admit(self, row: Row) -> bool:
        """Let a request in, with what the GPU and the host tier have of it; False: it waits."""
        answer, _ = self.core.scheduler.get_num_new_matched_tokens(row.request, row.computed)
        if answer is None:
            return False
        tables = self._tables_at(row, row.computed)
        assert tables is not None
        end = row.computed + answer
        real = [
            [not self._is_behind(group, i, end) for i in range(len(table), cdiv(end, group.block_tokens))]
            for group, table in zip(self._groups, tables, strict=True)
        ]
        if answer and sum(map(sum, real)) > self.pool.num_free - sum(map(len, tables)):
            return False
        for table in tables:
            for block_id in table:
                if block_id != NULL_BLOCK_ID:
                    self.pool.hold(block_id)
        for table, news in zip(tables, real, strict=True):
            table.extend(self.pool.take() if is_real else NULL_BLOCK_ID for is_real in news)
        row.tables, row.told, row.runs, row.load_end = tables, [0] * len(tables), True, end if answer else 0
        views = [[self._view(block_id) for block_id in table] for table in tables]
        self.core.scheduler.update_state_after_alloc(row.request, views, answer)
        return True

    def _view(self, block_id: int) -> BedBlock:
        return BedBlock(NULL_BLOCK_ID, None, is_null=True) if block_id == NULL_BLOCK_ID else self.pool.view(block_id)

    def _entry(self, row: Row, count: int) -> ScheduledRequest:
        whole = not any(row.told)
        ids = tuple(tuple(table[told:]) for table, told in zip(row.tables, row.told, strict=True))
        row.told = [len(table) for table in row.tables]
        return ScheduledRequest(row.request.request_id, row.computed, count, ids, whole)

    def _forward(self, row: Row, count: int) -> None:
        stop = row.computed + count
        for index, (group, table) in enumerate(zip(self._groups, row.tables, strict=True)):
            size = group.block_tokens
            for token in attended(group, row.computed):
                place = token % size * TOKEN_BYTES
                found = bytes(self.pool.memory[table[token // size]][place : place + TOKEN_BYTES])
                assert found == row.request.kv(index, token, token + 1), f"{row.request.request_id}: token {token}"
            for i in range(row.computed // size, cdiv(stop, size)):
                begin, end = max(row.computed, i * size), min(stop, (i + 1) * size)
                new = row.request.kv(index, begin, end)
                place = slice((begin - i * size) * TOKEN_BYTES, (end - i * size) * TOKEN_BYTES)
                if self.pool.memory[table[i]][place] != new:  # a last token that was loaded is computed once more
                    self.audit.touch(("gpu", table[i]), f"forward of {row.request.request_id}")
                    self.pool.memory[table[i]][place] = new
                if end == (i + 1) * size:
                    self.pool.register(index, self._hash(row.request, group, i), table[i])
        row.computed = stop

    def _register(self, row: Row) -> None:
        """Whole blocks that were loaded can be found from now on. What a window does not need stays out."""
        for index, (group, table) in enumerate(zip(self._groups, row.tables, strict=True)):
            for i in range(first_block(group, row.computed), row.computed // group.block_tokens):
                self.pool.register(index, self._hash(row.request, group, i), table[i])

    def _sample(self, row: Row) -> None:
        if row.computed < row.request.num_tokens:
            return
        row.new_tokens -= 1
        row.request.extend([row.request.num_tokens])
        self.core.truth.learn(row.request)
        if not row.new_tokens:
            self._finish(row)

    def _finish(self, row: Row) -> None:
        self.rows.remove(row)
        hold, _ = self.core.scheduler.request_finished(row.request, row.tables)
        if row.load_end:
            self.orphans[row.request.request_id] = row
        elif hold:
            self.held[row.request.request_id] = row
        else:
            self._free(row)

    def _preempt(self, row: Row) -> Row:
        self._free(row)
        row.runs, row.computed, row.lost = False, 0, False
        return row

    def _free(self, row: Row) -> None:
        for table in row.tables:
            for block_id in reversed(table):
                if block_id != NULL_BLOCK_ID:
                    self.pool.release(block_id)
        row.tables, row.told = [], []

    def _take(self, report: LoadReport) -> None:
        for request_id in report.finished:
            orphan = self.orphans.pop(request_id, None)
            if orphan is not None:
                self._free(orphan)
                continue
            row = next(row for row in self.rows if row.request.request_id == request_id)
            row.lost = any(report.invalid_block_ids.intersection(table) for table in row.tables)
            row.computed, row.load_end = min(row.load_end, row.request.num_tokens - 1), 0
            if not row.lost:
                self._register(row)
        for request_id in report.finished_sending:
            self._free(self.held.pop(request_id))


def drive(bench: StoreBench, rng: Random, moves: int) -> None:
    """So many random moves, everything checked after each, then the end."""
    menu = [
        (
            4,
            lambda: bench.arrive(rng.randrange(3), rng.choice([8, 24, 40]), rng.randrange(6), rng.randrange(1, 20)),
        ),
        (14, lambda: bench.step([rng.choice([0, 1, 4, 16]) for _ in range(6)], preempt=rng.random() < 0.1)),
        (6, lambda: bench.transfer(rng.randrange(20), [rng.random() < 0.05 for _ in range(4)])),
        (5, lambda: bench.report(rng.choice([1, 2, 100]))),
        (1, lambda: bench.abort(rng.randrange(20))),
        (0.5, lambda: bench.block(rng.randrange(6))),
        (2, bench.unblock),
        (0.3, bench.reset),
    ]
    weights, actions = [weight for weight, _ in menu], [action for _, action in menu]
    for action in rng.choices(actions, weights, k=moves):
        action()
        bench.check()
    bench.end()
