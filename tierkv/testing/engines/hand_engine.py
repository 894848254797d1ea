"""An engine driven by hand: real pages in numpy arrays, requests that compute or load, every byte checked.

It calls a stack as docs/how-to/drive-tierkv.md says. A prompt is a number and a length in chunks; what its pages must
hold follows from both.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tierkv.stack.stack import Stack
from tierkv.testing.frames import make_frame
from tierkv.types.engine import EngineSpec, GroupSpec, LoadReport, ScheduledRequest, StepOutput
from tierkv.types.keys import Key, make_key

BLOCK_TOKENS = 16
PAYLOAD_BYTES = 28 * 1024
SLOT_BYTES = 32 * 1024
"""A chunk with its header page."""

PATIENCE_S = 60.0
"""How long real threads may take before a test fails. No verdict about speed."""

NUM_BLOCKS = 257


@dataclass(frozen=True, slots=True)
class Prompt:
    """So many chunks of the text of that number."""

    number: int
    chunks: int = 4

    @property
    def hashes(self) -> list[bytes]:
        """One per chunk, and chained in so far as the number is in each."""
        return [hashlib.blake2b(b"%d/%d" % (self.number, i), digest_size=32).digest() for i in range(self.chunks)]

    @property
    def keys(self) -> list[Key]:
        """Its chunks' keys."""
        return [make_key(chunk_hash, 0) for chunk_hash in self.hashes]

    def first(self, chunks: int) -> Prompt:
        """The beginning of it."""
        return Prompt(self.number, chunks)


@dataclass
class HandRequest:
    """What a stack reads of a request. One token more than its chunks have: that one is always computed."""

    request_id: str
    prompt: Prompt
    kv_transfer_params: Mapping[str, Any] | None = None
    block_hashes: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.block_hashes = self.prompt.hashes

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return self.prompt.chunks * BLOCK_TOKENS + 1

    @property
    def num_prompt_tokens(self) -> int:
        """The same: nothing is generated."""
        return self.num_tokens


@dataclass(frozen=True, slots=True)
class HandBlock:
    """What a stack reads of a GPU block."""

    block_id: int
    block_hash: bytes | None = None
    is_null: bool = False


def engine_spec(model: str = "conformance", payload_bytes: int = PAYLOAD_BYTES) -> EngineSpec:
    """One group of full attention, one tensor, a chunk per block."""
    return EngineSpec(model, "uint8", (GroupSpec(BLOCK_TOKENS, (payload_bytes,)),), BLOCK_TOKENS)


class HandEngine:
    """Drives ``stack``. One request at a time owns all blocks."""

    def __init__(self, stack: Stack, payload_bytes: int = PAYLOAD_BYTES) -> None:
        self.stack = stack
        self._payload_bytes = payload_bytes
        self._pages = np.zeros((NUM_BLOCKS, payload_bytes), np.uint8)
        self._ids = itertools.count()
        stack.worker.register_kv_caches([[self._pages]])

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self, output: StepOutput | None = None, forward: Callable[[], None] = lambda: None) -> LoadReport:
        """One engine step."""
        meta = self.stack.build_connector_meta(output or StepOutput())
        self.stack.worker.start_step(meta)
        forward()
        self.stack.worker.queue_stores(meta)
        return self.stack.update_connector_output(self.stack.worker.get_finished())

    def step_until(self, condition: Callable[[], object], what: str) -> None:
        """Step until it is so.

        Raises:
            AssertionError: it does not come about.
        """
        give_up_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < give_up_s, f"waited in vain for {what}"
            time.sleep(0.001)
            self.step()

    # -- requests ----------------------------------------------------------------------------------------------------

    def arrive(self, prompt: Prompt) -> HandRequest:
        """A new request; end it with :meth:`end`."""
        request = HandRequest(f"request-{next(self._ids)}", prompt)
        self.stack.on_new_request(request)
        return request

    def ask(self, request: HandRequest) -> int | None:
        """One lookup: chunks that can be loaded, or None: not known yet."""
        tokens, is_asynchronous = self.stack.get_num_new_matched_tokens(request, 0)
        assert is_asynchronous == bool(tokens)
        return None if tokens is None else tokens // BLOCK_TOKENS

    def end(self, request: HandRequest) -> None:
        """The request is over, its blocks are free."""
        self.stack.request_finished(request, [self._block_ids(request.prompt)])

    def store(self, prompt: Prompt) -> None:
        """Compute all of a prompt, whatever could be loaded of it, and let its chunks go to the host tier."""
        request = self.arrive(prompt)
        self.lookup(request)
        ids = self._block_ids(prompt)
        self.stack.update_state_after_alloc(request, [[HandBlock(block_id) for block_id in ids]], 0)
        scheduled = ScheduledRequest(request.request_id, 0, request.num_tokens, (tuple(ids),), replaces_table=True)
        self.step(StepOutput((scheduled,)), lambda: self._compute(prompt))
        self.end(request)
        self.step_until(lambda: not self.stack.has_pending_work(), "the end of a store")

    def load(self, prompt: Prompt) -> int:
        """Load what a lookup finds. Returns how many chunks came, from the front; each of them is checked.

        Raises:
            AssertionError: a chunk was said to have come, and its bytes are wrong.
        """
        request = self.arrive(prompt)
        try:
            return self.load_for(request, self.lookup(request))
        finally:
            self.end(request)

    def load_for(self, request: HandRequest, chunks: int) -> int:
        """The same for a request whose lookup was answered with ``chunks``."""
        ids = self._block_ids(request.prompt)
        self._pages[ids] = 0xDB
        self.stack.update_state_after_alloc(request, [[HandBlock(block_id) for block_id in ids]], chunks * BLOCK_TOKENS)
        if not chunks:
            return 0
        invalid: set[int] = set()
        finished: set[str] = set()
        give_up_s = time.monotonic() + PATIENCE_S
        while request.request_id not in finished:
            assert time.monotonic() < give_up_s, "a load does not end"
            report = self.step()
            finished |= report.finished
            invalid |= report.invalid_block_ids
            time.sleep(0.0005)
        return self._check(request.prompt, ids[:chunks], invalid)

    def lookup(self, request: HandRequest) -> int:
        """Ask until there is an answer, in chunks."""
        chunks: list[int] = []

        def answered() -> bool:
            answer = self.ask(request)
            chunks.extend([] if answer is None else [answer])
            return bool(chunks)

        self.step_until(answered, "the answer to a lookup")
        return chunks[0]

    def _compute(self, prompt: Prompt) -> None:
        for block_id, chunk_hash in zip(self._block_ids(prompt), prompt.hashes, strict=False):
            self._pages[block_id] = np.frombuffer(make_frame(chunk_hash, 0, self._payload_bytes), np.uint8)

    def _check(self, prompt: Prompt, ids: list[int], invalid: set[int]) -> int:
        for number, (block_id, chunk_hash) in enumerate(zip(ids, prompt.hashes, strict=False)):
            if block_id in invalid:
                return number
            right = make_frame(chunk_hash, 0, self._payload_bytes)
            assert self._pages[block_id].tobytes() == right, f"wrong bytes: chunk {number} of {prompt}"
        return len(ids)

    @staticmethod
    def _block_ids(prompt: Prompt) -> list[int]:
        """A block per chunk, and one for the token behind them."""
        return list(range(1, prompt.chunks + 2))
