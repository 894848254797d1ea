"""Stack whose every call is counted by itself."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

import tierkv
from benchmarks.call_meters import Calls, CallTimes
from benchmarks.core.rig import BLOCK_TOKENS, BenchRequest, random_hashes
from tierkv.reference.block_pool import Block, BlockPool
from tierkv.types.engine import EngineCapabilities, EngineSpec, GroupSpec, ScheduledRequest, StepOutput

BLOCKS_PER_CHUNK = 8
CHUNK_TOKENS = BLOCKS_PER_CHUNK * BLOCK_TOKENS
PAGE_BYTES = 4096
TENSORS = 2
CHUNK_BYTES = PAGE_BYTES * BLOCKS_PER_CHUNK * TENSORS
NUM_BLOCKS = 512
SETTLE_S = 0.05
"""Time, not watched, in which a tier ends what it has in flight."""
ENGINE = EngineSpec(
    "benchmark",
    "uint64",
    (GroupSpec(BLOCK_TOKENS, (PAGE_BYTES,) * TENSORS),),
    BLOCK_TOKENS,
    capabilities=EngineCapabilities(prefill_tokens_per_s=1.0),
)
"""An engine that computes slowly, so that every chunk that is found is worth loading."""

Meter = TypeVar("Meter", Calls, CallTimes)


class CountedStack:
    """Stack whose calls are made one by one, so that each part of a step can be counted.

    It is no engine: it computes nothing and checks no byte.

    Attributes:
        settle_s: duration of :meth:`settle`.
    """

    def __init__(self, stack: tierkv.Stack) -> None:
        self.stack = stack
        self.settle_s = SETTLE_S
        self._pool = BlockPool(NUM_BLOCKS)
        self._blocks: dict[str, list[Block]] = {}
        self._numbers = itertools.count()
        pages = [np.zeros((NUM_BLOCKS, PAGE_BYTES // 8), np.uint64) for _ in range(TENSORS)]
        stack.worker.register_kv_caches([pages])

    def new_prompt(self, chunks: int, seed: int | None = None) -> BenchRequest:
        """Prompt under a request id of its own. Equal seeds give equal prompts; without one, it was never stored."""
        number = next(self._numbers)
        hashes = random_hashes(chunks * BLOCKS_PER_CHUNK, 1_000_000 + number if seed is None else seed)
        return BenchRequest(f"request-{number}", hashes)

    def allocate(self, prompt: BenchRequest, count: int, loaded_tokens: int) -> None:
        """Give a prompt its blocks."""
        blocks = self._blocks[prompt.request_id] = self._pool.allocate(count)
        self.stack.update_state_after_alloc(prompt, [blocks], loaded_tokens)

    def grow(self, prompt: BenchRequest) -> int:
        """Give a prompt one more block. Returns its id."""
        (block,) = self._pool.allocate(1)
        self._blocks[prompt.request_id].append(block)
        return block.block_id

    def begin(self, prompt: BenchRequest) -> ScheduledRequest:
        """Entry of the step that computes a whole prompt."""
        return ScheduledRequest(
            prompt.request_id, 0, prompt.num_tokens, (self._block_ids(prompt),), replaces_table=True
        )

    def _block_ids(self, prompt: BenchRequest) -> tuple[int, ...]:
        return tuple(block.block_id for block in self._blocks.get(prompt.request_id, ()))

    def step(self, scheduled: Sequence[ScheduledRequest] = ()) -> Calls:
        """Make one whole step, counted. Copies that it began have ended before the call of ``get_finished``."""
        return self.metered_step(scheduled, Calls())

    def metered_step(self, scheduled: Sequence[ScheduledRequest], calls: Meter) -> Meter:
        """Make one whole step, and add its cost. Returns the meter."""
        worker = self.stack.worker
        meta = calls.of(self.stack.build_connector_meta, StepOutput(tuple(scheduled)))
        calls.of(worker.start_step, meta)
        if not meta.stores:  # this step's own stores are for the next one: drain would begin them now
            worker.drain()
        calls.of(worker.queue_stores, meta)
        output = calls.of(worker.get_finished)
        report = calls.of(self.stack.update_connector_output, output)
        if report.invalid_block_ids:
            raise RuntimeError(f"blocks {sorted(report.invalid_block_ids)} could not be loaded")
        return calls

    def finish(self, prompt: BenchRequest) -> None:
        """End a request, and step until nothing is in flight, in tiers either."""
        self.stack.request_finished(prompt, [self._block_ids(prompt)])
        self._pool.release(self._blocks.pop(prompt.request_id, ()))
        while self.stack.has_pending_work():
            self.step()
        self.stack.flush()

    def settle(self) -> None:
        """Wait, not watched, until the tiers have ended what is in flight."""
        time.sleep(self.settle_s)

    def keys_done(self) -> int:
        """Number of keys that the tiers have read or written, as far as the stack has taken in their completions."""
        return sum(stats["keys"] for stats in self.stack.tiers.stats().values())
