"""One long prompt over its whole life, from its arrival to the step in which nothing is left to do: the worst call.

All of its chunks but the last few are below the host tier. They are found in the last tier of the search order, so
every tier is asked about every chunk. All tiers have been read before, so their speeds are known, and
load-or-recompute compares loading with computing. Loading is faster. The last chunks are computed, stored, and written
to every tier. Tiers and copies take simulated time, and the processor time of each call is measured. Python's garbage
collector is off: see ``engine_calls``. The limit shows the machine: the worst plain loop in the same steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.core.rig import BLOCK_TOKENS, PAGE_BYTES, BenchRequest, copies_of, random_hashes
from benchmarks.measure import Settings, progress
from benchmarks.rows import Row, Target
from benchmarks.stress.clocked_core import LIMIT_MS, PLAIN, CallCosts, ClockedCore, without_collector
from benchmarks.stress.simulated_tiers import Pace, local_tiers
from tierkv.manager.lower.read_speed import READINGS_MIN
from tierkv.reference.block_pool import Block, BlockPool
from tierkv.types.engine import EngineSpec, GroupKind, GroupSpec, ScheduledRequest, StepOutput
from tierkv.types.geometry import Geometry, cdiv
from tierkv.types.keys import Key, make_key

STEP_S = 0.02
STEPS_MAX = 20_000
PREFILL_TOKENS_PER_S = 4_000.0
"""Rate that the engine states: it computes a chunk in 4 ms, and a tier reads it in 0.25 ms on each thread."""
PACE = Pace(chunk_s=0.00025)
WARM_UP_CHUNKS = 64
NEW_CHUNKS = 32
"""Chunks behind those that are loaded."""
WINDOW_TOKENS = 1_024
FULL = (GroupSpec(BLOCK_TOKENS, (PAGE_BYTES,)),)
WINDOWS = (GroupSpec(BLOCK_TOKENS, (PAGE_BYTES,), GroupKind.SLIDING_WINDOW, WINDOW_TOKENS),) * 5


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, and what it meets.

    chunks: of the prompt. tiers: below the host tier. groups: of the engine. slots: of the host tier.
    """

    chunks: int
    tiers: int
    groups: tuple[GroupSpec, ...]
    slots: int

    @property
    def geometry(self) -> Geometry:
        """Sizes of its chunks."""
        return Geometry.of(EngineSpec("benchmark", "bfloat16", self.groups, BLOCK_TOKENS))


@dataclass(frozen=True, slots=True)
class Life:
    """Costs of one prompt's life, the steps until its answer and until its end, and its answer in tokens."""

    costs: CallCosts
    steps_to_answer: int
    steps: int
    tokens: int


def run(settings: Settings) -> Iterator[Row]:
    """Measure one row per case."""
    chunks = settings.pick(8_192, 128)
    roomy = 2 * chunks
    cases = {f"{tiers} tiers" if tiers > 1 else "1 tier": Case(chunks, tiers, FULL, roomy) for tiers in (1, 3, 10, 50)}
    cases["1 tier, host tier for an eighth of it"] = Case(chunks, 1, FULL, chunks // 8)
    for tiers in (1, 10):
        windows = Case(chunks, tiers, FULL + WINDOWS, roomy)
        cases[f"full attention and five windows, {tiers} tier{'s' * (tiers > 1)}"] = windows
    for what, case in cases.items():
        with without_collector():
            rounds = [live(case) for _ in range(settings.rounds)]
        progress(f"long_prompt: {what}, {max(life.costs.worst[1] for life in rounds) * 1e3:.1f} ms")
        yield _row(f"{chunks:,} chunks, {what}", rounds, chunks)


def live(case: Case) -> Life:
    """Take a prompt through its life, with tiers whose speed is known."""
    geometry = case.geometry
    hashes = random_hashes(case.chunks + NEW_CHUNKS, seed=1)
    last = case.tiers - 1
    warm = [random_hashes(WARM_UP_CHUNKS, seed=2 + number) for number in range(READINGS_MIN * case.tiers)]
    stored: list[list[Key]] = [[] for _ in range(case.tiers)]
    for number, prompt in enumerate(warm):  # a speed is known after a few reads, and a read has many chunks
        stored[number % case.tiers] += _keys(geometry, prompt)
    stored[last] += _keys(geometry, hashes[: case.chunks])
    lower = local_tiers(geometry.payload_bytes_max, stored)
    paces = [PACE] * case.tiers
    clocked = ClockedCore(geometry, case.slots, lower, paces, prefill_tokens_per_s=PREFILL_TOKENS_PER_S)
    for number, prompt in enumerate(warm):
        _whole_life(clocked, BenchRequest(f"warm-up-{number}", prompt))
    speeds = clocked.core.manager.read_costs.speeds()
    if len(speeds) != case.tiers:
        raise RuntimeError(f"the speed of {len(speeds)} tiers is known after the warm-up, not of {case.tiers}")
    clocked.costs = CallCosts()
    return _whole_life(clocked, BenchRequest("request", copies_of(hashes)))


def _keys(geometry: Geometry, hashes: Sequence[bytes]) -> list[Key]:
    return [make_key(chunk_hash, group.index) for group in geometry.groups for chunk_hash in hashes]


def _whole_life(clocked: ClockedCore, request: BenchRequest) -> Life:
    """Ask, allocate, load, compute and store the rest, end.

    Raises:
        RuntimeError: there is no end, or nothing is offered.
    """
    began = clocked.num_steps
    groups = len(clocked.core.geometry.groups)
    clocked.on_new_request(request)
    while (tokens := clocked.ask(request)) is None:
        clocked.end_step(StepOutput(), STEP_S)
        _check_steps(clocked, began)
    steps_to_answer = clocked.num_steps - began
    if not tokens:
        raise RuntimeError(f"{request.request_id}: its chunks are in a tier, and none is offered")
    pool = BlockPool(1 + groups * len(request.block_hashes))
    tables = _tables(clocked.core.geometry, pool, tokens)
    clocked.allocate(request, tables, tokens)
    ended = False
    while not ended:
        ended = request.request_id in clocked.end_step(StepOutput(), STEP_S).finished
        _check_steps(clocked, began)
    for table in tables:
        table.extend(pool.allocate(len(request.block_hashes) - len(table)))
    ids = tuple(tuple(block.block_id for block in table) for table in tables)
    scheduled = ScheduledRequest(request.request_id, tokens, request.num_tokens - tokens, ids, replaces_table=True)
    clocked.end_step(StepOutput((scheduled,)), STEP_S)
    clocked.finish(request)
    while clocked.core.scheduler.has_pending_work or clocked.core.manager.has_pending_changes:
        clocked.end_step(StepOutput(), STEP_S)
        _check_steps(clocked, began)
    for _ in range(clocked.core.geometry.blocks_per_chunk + request.num_tokens // (64 * BLOCK_TOKENS)):
        clocked.end_step(StepOutput(), STEP_S)  # what was held is released in steps
    return Life(clocked.costs, steps_to_answer, clocked.num_steps - began, tokens)


def _check_steps(clocked: ClockedCore, began: int) -> None:
    if clocked.num_steps - began > STEPS_MAX:
        raise RuntimeError(f"a prompt is not loaded after {STEPS_MAX:,} steps")


def _tables(geometry: Geometry, pool: BlockPool, tokens: int) -> list[list[Block]]:
    """Block table of each group: a window has the null block before the tokens that the next one attends to."""
    tables = []
    for group in geometry.groups:
        blocks = cdiv(tokens, BLOCK_TOKENS)
        held = blocks if group.window_chunks is None else min(blocks, group.window_chunks)
        tables.append([pool.null_block] * (blocks - held) + pool.allocate(held))
    return tables


def _row(what: str, rounds: Sequence[Life], chunks: int) -> Row:
    worst = {
        name: statistics.median(life.costs.worst_s[name] for life in rounds) * 1e3 for name in rounds[0].costs.worst_s
    }
    plain = worst.pop(PLAIN)
    steps = statistics.median(max(life.costs.steps_s) for life in rounds) * 1e3
    life = rounds[0]
    return Row(
        what,
        "ms of processor time",
        max(worst.values()),
        "worst of a plain loop in the same steps",
        plain,
        target=Target("measured", "<=", LIMIT_MS),
        extra={f"worst {name}, ms": took for name, took in sorted(worst.items(), key=lambda item: -item[1])}
        | {
            "worst step, all calls together, ms": steps,
            "all of its calls, ms": statistics.median(sum(life.costs.steps_s) for life in rounds) * 1e3,
            "steps until the answer": life.steps_to_answer,
            "steps until its end": life.steps,
            "tokens offered, %": 100 * life.tokens / (BLOCK_TOKENS * chunks),
        },
    )
