"""The least engine that drives a stack: numpy pages for a GPU, and a forward pass that writes recognisable numbers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tierkv.stack.stack import Stack
from tierkv.types.engine import EngineCapabilities, EngineSpec, GroupSpec, ScheduledRequest, StepOutput

BLOCK_TOKENS = 16
TENSORS = 2
BLOCKS_PER_CHUNK = 8
CHUNK_TOKENS = BLOCKS_PER_CHUNK * BLOCK_TOKENS
STEPS_MAX = 2000


def engine_spec(page_bytes: int) -> EngineSpec:
    """One group; the engine keeps no prefix cache of its own, so everything comes from the tiers."""
    group = GroupSpec(BLOCK_TOKENS, (page_bytes,) * TENSORS)
    capabilities = EngineCapabilities(prefix_caching=False)
    return EngineSpec("benchmark", "uint64", (group,), BLOCK_TOKENS, capabilities=capabilities)


@dataclass(frozen=True, slots=True)
class EngineBlock:
    """A block that is not filled yet."""

    block_id: int
    block_hash: None = None
    is_null: bool = False


@dataclass(slots=True)
class Prompt:
    """A request for the KV of so many chunks; prompts of one name are the same prompt."""

    request_id: str
    name: str
    chunks: int
    kv_transfer_params: None = None
    block_hashes: list[bytes] = field(init=False)
    num_tokens: int = field(init=False)
    num_prompt_tokens: int = field(init=False)
    blocks: list[int] = field(default_factory=list)
    loaded_tokens: int = 0

    def __post_init__(self) -> None:
        """Name every block of the prompt."""
        count = self.chunks * BLOCKS_PER_CHUNK
        self.block_hashes = [
            hashlib.blake2b(f"{self.name} {i}".encode(), digest_size=32).digest() for i in range(count)
        ]
        self.num_tokens = self.num_prompt_tokens = count * BLOCK_TOKENS

    def content(self, block: int) -> np.uint64:
        """What every word of a block's pages must be."""
        return np.uint64(int.from_bytes(self.block_hashes[block][:8], "little"))


@dataclass(frozen=True, slots=True)
class Served:
    """What serving took. verified_bytes: of loaded pages, each compared with what was computed once."""

    deferrals: int
    steps: int
    loaded_tokens: int
    verified_bytes: int


class SmallEngine:
    """Serves prompts from first token to last, all at once, in steps of a given length."""

    def __init__(self, stack: Stack, page_bytes: int, num_blocks: int, step_s: float) -> None:
        self._stack = stack
        self._step_s = step_s
        self._pages = [np.zeros((num_blocks, page_bytes // 8), np.uint64) for _ in range(TENSORS)]
        self._free = list(range(1, num_blocks))
        self._verified_bytes = 0
        stack.worker.register_kv_caches([self._pages])

    def serve(self, prompts: Sequence[Prompt]) -> Served:
        """Until all are done and nothing is in flight.

        Raises:
            RuntimeError: a loaded page is not what was computed, or there is no end.
        """
        waiting, loading, ready = list(prompts), dict[str, Prompt](), list[Prompt]()
        deferrals = steps = 0
        for prompt in prompts:
            self._stack.on_new_request(prompt)
        while waiting or loading or ready or self._stack.has_pending_work():
            steps += 1
            if steps > STEPS_MAX:
                raise RuntimeError(f"no end after {steps} steps: {[prompt.request_id for prompt in waiting]} wait")
            for prompt in list(waiting):
                tokens, _ = self._stack.get_num_new_matched_tokens(prompt, 0)
                if tokens is None:
                    deferrals += 1
                    continue
                waiting.remove(prompt)
                self._allocate(prompt, tokens)
                if tokens:
                    loading[prompt.request_id] = prompt
                else:
                    ready.append(prompt)
            finished = self._step(ready)
            ready = [loading.pop(request_id) for request_id in finished]
            for prompt in ready:
                self._verify(prompt)
        loaded = sum(prompt.loaded_tokens for prompt in prompts)
        return Served(deferrals, steps, loaded, self._verified_bytes)

    def _allocate(self, prompt: Prompt, tokens: int) -> None:
        prompt.blocks = [self._free.pop() for _ in prompt.block_hashes]
        prompt.loaded_tokens = tokens
        self._stack.update_state_after_alloc(prompt, [[EngineBlock(block) for block in prompt.blocks]], tokens)

    def _step(self, ready: Sequence[Prompt]) -> list[str]:
        """One forward pass over the prompts that are ready; they are done after it. Returns whose load has ended."""
        scheduled = tuple(
            ScheduledRequest(
                prompt.request_id,
                prompt.loaded_tokens,
                prompt.num_tokens - prompt.loaded_tokens,
                (tuple(prompt.blocks),),
                replaces_table=True,
            )
            for prompt in ready
        )
        meta = self._stack.build_connector_meta(StepOutput(scheduled))
        self._stack.worker.start_step(meta)
        for prompt in ready:
            for block in range(prompt.loaded_tokens // BLOCK_TOKENS, len(prompt.blocks)):
                for pages in self._pages:
                    pages[prompt.blocks[block]] = prompt.content(block)
        time.sleep(self._step_s)
        self._stack.worker.queue_stores(meta)
        report = self._stack.update_connector_output(self._stack.worker.get_finished())
        if report.invalid_block_ids:
            raise RuntimeError(f"blocks {sorted(report.invalid_block_ids)} could not be loaded")
        for prompt in ready:
            self._stack.request_finished(prompt, [prompt.blocks])
            self._free += prompt.blocks
        return sorted(report.finished)

    def _verify(self, prompt: Prompt) -> None:
        for block in range(prompt.loaded_tokens // BLOCK_TOKENS):
            for pages in self._pages:
                page = pages[prompt.blocks[block]]
                if not (page == prompt.content(block)).all():
                    raise RuntimeError(f"{prompt.request_id}: block {block} does not hold what was computed")
                self._verified_bytes += page.nbytes
