"""A process with its own stack: the smallest engine that drives one, with one order per line.

``python fsspec_engine.py CONFIG`` reads prompts from its standard input, a name per line, serves each to its end, and
answers with a line of JSON: the number of tokens loaded from the tier. Each loaded page is compared with the expected
content.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import dataclass, field

import numpy as np

import tierkv
from tierkv.types.engine import EngineCapabilities, EngineSpec, GroupSpec, ScheduledRequest, StepOutput

BLOCK_TOKENS = 16
PAGE_BYTES = 4096
BLOCKS_PER_CHUNK = 2
PROMPT_BLOCKS = 12
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_TOKENS
STEP_S = 0.005
STEPS_MAX = 4000


@dataclass(frozen=True, slots=True)
class Block:
    """A block that is not filled yet."""

    block_id: int
    block_hash: None = None
    is_null: bool = False


@dataclass(slots=True)
class Prompt:
    """Prompts of one name are equal."""

    request_id: str
    name: str
    kv_transfer_params: None = None
    block_hashes: list[bytes] = field(init=False)
    num_tokens: int = PROMPT_TOKENS
    num_prompt_tokens: int = PROMPT_TOKENS

    def __post_init__(self) -> None:
        """Name every block."""
        words = [f"{self.name} {number}".encode() for number in range(PROMPT_BLOCKS)]
        self.block_hashes = [hashlib.blake2b(word, digest_size=32).digest() for word in words]

    def content(self, block: int) -> np.uint64:
        """Expected value of every word of a block's page."""
        return np.uint64(int.from_bytes(self.block_hashes[block][:8], "little"))


class Engine:
    """Engine for one prompt at a time; its memory keeps nothing of a previous prompt."""

    def __init__(self, config: dict[str, object]) -> None:
        group = GroupSpec(BLOCK_TOKENS, (PAGE_BYTES,))
        capabilities = EngineCapabilities(prefix_caching=False)
        spec = EngineSpec("shared", "uint64", (group,), BLOCK_TOKENS, capabilities=capabilities)
        self.stack = tierkv.open_stack(config, spec)
        self._pages = np.zeros((PROMPT_BLOCKS + 1, PAGE_BYTES // 8), np.uint64)
        self._served = 0
        self.stack.worker.register_kv_caches([[self._pages]])

    def serve(self, name: str) -> int:
        """Serve a prompt and wait until its blocks are stored. Returns the number of loaded tokens."""
        self._served += 1
        self._pages[:] = 0
        prompt = Prompt(f"{name}-{self._served}", name)
        blocks = list(range(1, PROMPT_BLOCKS + 1))
        stack = self.stack
        stack.on_new_request(prompt)
        tokens, _ = stack.get_num_new_matched_tokens(prompt, 0)
        for _ in range(STEPS_MAX):
            if tokens is not None:
                break
            self._step()
            tokens, _ = stack.get_num_new_matched_tokens(prompt, 0)
        assert tokens is not None, "no answer"
        stack.update_state_after_alloc(prompt, [[Block(number) for number in blocks]], tokens)
        finished = set() if tokens else {prompt.request_id}
        while prompt.request_id not in finished:
            finished |= self._step()
        loaded = tokens // BLOCK_TOKENS
        for number in range(loaded):
            assert (self._pages[blocks[number]] == prompt.content(number)).all(), f"{name}: block {number} is wrong"
        work = ScheduledRequest(
            prompt.request_id, tokens, PROMPT_TOKENS - tokens, (tuple(blocks),), replaces_table=True
        )
        meta = stack.build_connector_meta(StepOutput((work,)))
        stack.worker.start_step(meta)
        for number in range(loaded, PROMPT_BLOCKS):
            self._pages[blocks[number]] = prompt.content(number)
        stack.worker.queue_stores(meta)
        stack.update_connector_output(stack.worker.get_finished())
        stack.request_finished(prompt, [blocks])
        while stack.has_pending_work():
            self._step()
        stack.flush()
        return tokens

    def _step(self) -> set[str]:
        meta = self.stack.build_connector_meta(StepOutput(()))
        self.stack.worker.start_step(meta)
        time.sleep(STEP_S)
        self.stack.worker.queue_stores(meta)
        report = self.stack.update_connector_output(self.stack.worker.get_finished())
        assert not report.invalid_block_ids
        return set(report.finished)


def main() -> None:
    """Serve prompts until the input ends."""
    engine = Engine(json.loads(sys.argv[1]))
    for line in sys.stdin:
        sys.stdout.write(json.dumps({"loaded": engine.serve(line.strip())}) + "\n")
        sys.stdout.flush()
    engine.stack.close(timeout_s=5.0)


if __name__ == "__main__":
    main()
