"""Processor time of the engine's thread per chunk: stored, loaded, looked up, over 32 prompts of 8k to 128k tokens.

Scheduler and manager do the work; tiers and copies take simulated time. Prompts are computed in pieces of 8,192 tokens,
as engines do. Each prompt is stored, and then looked up and loaded under another request's id, with hashes in new
objects: from the host tier, and with a tier below once more from there, when the host tier is empty again. The limit of
the lookup is a plain loop that makes the same keys and finds them in a dict.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.core.rig import BLOCK_TOKENS, PAGE_BYTES, BenchRequest, copies_of, random_hashes
from benchmarks.measure import Settings, progress
from benchmarks.rows import Row, Target
from benchmarks.stress.clocked_core import BEGIN, PLAIN, CallCosts, ClockedCore, without_collector
from benchmarks.stress.simulated_tiers import Pace, local_tiers
from tierkv.reference.block_pool import Block, BlockPool
from tierkv.types.engine import EngineSpec, GroupSpec, ScheduledRequest, StepOutput
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key, make_keys

PROMPTS, TOKENS_MIN, TOKENS_MAX = 32, 8_192, 131_072
BATCH_TOKENS = 8_192
"""Prompt tokens that a step computes."""
STEP_S = 0.05
CHUNK_S = 0.00002
"""Seconds in which the tier below reads or writes a chunk: it is faster than the engine."""
STEPS_MAX = 100_000
STORE = ("build_connector_meta", "take_ops", "update_connector_output", BEGIN)
LOAD = ("update_state_after_alloc", *STORE)
READ = ("get_num_new_matched_tokens", *LOAD)
TARGETS_US = {"stored": 2.5, "loaded": 1.2}
LOOKUP_RATIO = 1.5
SPEC = EngineSpec("benchmark", "bfloat16", (GroupSpec(BLOCK_TOKENS, (PAGE_BYTES,)),), BLOCK_TOKENS)


@dataclass(slots=True)
class ChunkCosts:
    """Microseconds per chunk of one run, by part. read: loaded from the tier below; ``dict_us``: of the plain loop."""

    stored: dict[str, float]
    loaded: dict[str, float]
    read: dict[str, float]
    lookup_us: float
    dict_us: float


def run(settings: Settings) -> Iterator[Row]:
    """Measure chunks of 16 and of 256 tokens, without a lower tier and with one that gets every chunk."""
    rounds = settings.pick(3, 1)
    lengths = prompt_tokens(settings.pick(PROMPTS, 2), settings.pick(TOKENS_MAX, TOKENS_MIN))
    for chunk_tokens in (16, 256):
        for num_tiers in (0, 1):
            with without_collector():
                runs = [play_prompts(chunk_tokens, num_tiers, lengths) for _ in range(rounds)]
            below = "one tier below" if num_tiers else "no tier below"
            progress(f"chunk_costs: {chunk_tokens} tokens, {below}")
            yield from _rows(f"chunks of {chunk_tokens} tokens, {below}", runs)


def prompt_tokens(count: int, tokens_max: int) -> list[int]:
    """Lengths from the shortest to the longest prompt, each by the same factor longer, in whole chunks of 256."""
    factor = (tokens_max / TOKENS_MIN) ** (1 / max(1, count - 1))
    return [round(TOKENS_MIN * factor**number / 256) * 256 for number in range(count)]


class _Player:
    """Plays prompts one after the other, and sums what the engine's calls cost."""

    def __init__(self, chunk_tokens: int, num_tiers: int, lengths: Sequence[int]) -> None:
        self.geometry = Geometry.of(SPEC, tokens=chunk_tokens)
        slots = sum(lengths) // chunk_tokens + 1
        lower = local_tiers(self.geometry.payload_bytes_max, [[] for _ in range(num_tiers)])
        paces = [Pace(chunk_s=CHUNK_S)] * num_tiers
        self.clocked = ClockedCore(self.geometry, slots, lower, paces, prefill_tokens_per_s=1.0)
        self._pool = BlockPool(1 + max(lengths) // BLOCK_TOKENS)

    def take(self) -> CallCosts:
        """Costs since the last call."""
        costs, self.clocked.costs = self.clocked.costs, CallCosts()
        return costs

    def store(self, request: BenchRequest) -> None:
        """Compute a prompt of which nothing is stored, and wait until its chunks are."""
        blocks = self._begin(request, 0)
        for start in range(0, request.num_tokens, BATCH_TOKENS):
            stop = min(start + BATCH_TOKENS, request.num_tokens)
            ids = tuple(block.block_id for block in blocks[start // BLOCK_TOKENS : stop // BLOCK_TOKENS])
            entry = ScheduledRequest(request.request_id, start, stop - start, (ids,), replaces_table=not start)
            self.clocked.end_step(StepOutput((entry,)), STEP_S)
        self._end(request, blocks)

    def load(self, request: BenchRequest) -> None:
        """Load a prompt that is all in the host tier."""
        blocks = self._begin(request, request.num_tokens)
        while request.request_id not in self.clocked.end_step(StepOutput(), STEP_S).finished:
            self._check()
        self._end(request, blocks)

    def empty_host(self) -> None:
        """Empty the host tier, and step until its slots are free."""
        self.clocked.core.scheduler.reset_cache("host")
        while self.clocked.core.host.slots.unswept or self.clocked.core.host.free < self.clocked.core.host.num_slots:
            self.clocked.end_step(StepOutput(), STEP_S)
            self._check()

    def _begin(self, request: BenchRequest, wanted: int) -> list[Block]:
        self.clocked.on_new_request(request)
        while (tokens := self.clocked.ask(request)) is None:
            self.clocked.end_step(StepOutput(), STEP_S)
            self._check()
        if tokens != wanted:
            raise RuntimeError(f"{request.request_id}: {tokens} tokens are offered, and {wanted} are stored")
        blocks = self._pool.allocate(request.num_tokens // BLOCK_TOKENS)
        self.clocked.allocate(request, [blocks], tokens)
        return blocks

    def _end(self, request: BenchRequest, blocks: Sequence[Block]) -> None:
        self.clocked.finish(request)
        self._pool.release(blocks)
        core = self.clocked.core
        while core.scheduler.has_pending_work or core.manager.has_pending_changes or not core.manager.can_wait():
            self.clocked.end_step(StepOutput(), STEP_S)
            self._check()

    def _check(self) -> None:
        if self.clocked.num_steps > STEPS_MAX:
            raise RuntimeError(f"a prompt is not done after {STEPS_MAX:,} steps")


def play_prompts(chunk_tokens: int, num_tiers: int, lengths: Sequence[int]) -> ChunkCosts:
    """Store, look up and load a prompt of each length, over ``num_tiers`` lower tiers."""
    player = _Player(chunk_tokens, num_tiers, lengths)
    chunks = sum(lengths) // chunk_tokens
    prompts = [random_hashes(tokens // BLOCK_TOKENS, seed=number) for number, tokens in enumerate(lengths)]
    player.take()
    for number, hashes in enumerate(prompts):
        player.store(BenchRequest(f"first {number}", copies_of(hashes)))
    stored = _per_chunk(player.take(), chunks)
    for number, hashes in enumerate(prompts):
        player.load(BenchRequest(f"again {number}", copies_of(hashes)))
    loaded = _per_chunk(player.take(), chunks)
    read: dict[str, float] = {}
    if num_tiers:
        player.empty_host()
        player.take()
        for number, hashes in enumerate(prompts):
            player.load(BenchRequest(f"below {number}", copies_of(hashes)))
        read = _per_chunk(player.take(), chunks)
        if player.clocked.tiers.chunks_read != chunks:
            raise RuntimeError(f"{player.clocked.tiers.chunks_read} chunks of {chunks} were read from the tier below")
    resident = dict.fromkeys(key for hashes in prompts for key in _keys(hashes, chunk_tokens))
    plain_us = sum(_dict_us(resident, copies_of(hashes), chunk_tokens) for hashes in prompts) / chunks
    return ChunkCosts(stored, loaded, read, loaded["get_num_new_matched_tokens"], plain_us)


def _keys(hashes: Sequence[bytes], chunk_tokens: int) -> list[Key]:
    per_chunk = chunk_tokens // BLOCK_TOKENS
    return make_keys(hashes[per_chunk - 1 :: per_chunk], 0)


def _dict_us(resident: dict[Key, None], hashes: Sequence[bytes], chunk_tokens: int) -> float:
    """Microseconds of a plain loop that makes the keys of a prompt and finds each of them."""
    began_s = time.thread_time()
    for key in _keys(hashes, chunk_tokens):
        if key not in resident:
            break
    return 1e6 * (time.thread_time() - began_s)


def _per_chunk(costs: CallCosts, chunks: int) -> dict[str, float]:
    return {name: 1e6 * total_s / chunks for name, total_s in costs.total_s.items() if name != PLAIN}


def _rows(what: str, runs: Sequence[ChunkCosts]) -> Iterator[Row]:
    for kind, calls in (("stored", STORE), ("loaded", LOAD), ("read", READ)):
        parts = [getattr(one, kind) for one in runs]
        if not parts[0]:
            continue
        of_calls = [sum(part.get(call, 0.0) for call in calls) for part in parts]
        plain = statistics.median(one.dict_us for one in runs)
        extra = {f"{name}, us": statistics.median(part.get(name, 0.0) for part in parts) for name in sorted(parts[0])}
        target = Target("measured", "<=", TARGETS_US[kind]) if kind in TARGETS_US else None
        name = "a chunk loaded from there" if kind == "read" else f"a {kind} chunk"
        yield Row(f"{name}, {what}", "us", statistics.median(of_calls), "dict loop", plain, (), target, extra)
    yield Row(
        f"the lookup of a chunk, {what}",
        "us",
        statistics.median(one.lookup_us for one in runs),
        "loop that makes its key and finds it in a dict",
        statistics.median(one.dict_us for one in runs),
        [one.lookup_us / one.dict_us for one in runs],
        Target("ratio", "<=", LOOKUP_RATIO),
    )
