"""Hand engine: real pages in numpy arrays, and requests that the caller moves on call by call.

Of the small engines, only this one lets its caller choose the order of single calls: the conformance suites and the
benchmark of traffic use that. It calls a stack as docs/how-to/drive-tierkv.md says. A prompt is a number and a length
in chunks; both determine the bytes of its pages, and every loaded byte is checked.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tierkv.reference.block_pool import Block, BlockPool
from tierkv.stack.stack import Stack
from tierkv.testing.frames import make_frame
from tierkv.types.engine import EngineSpec, GroupSpec, LoadReport, ScheduledRequest, StepOutput
from tierkv.types.keys import Key, make_key

BLOCK_TOKENS = 16
PAYLOAD_BYTES = 28 * 1024
SLOT_BYTES = 32 * 1024
"""A chunk with its header page."""

PATIENCE_S = 60.0
"""Seconds that real threads may take before a test fails; not a limit of speed."""

NUM_BLOCKS = 257


@dataclass(frozen=True, slots=True)
class Prompt:
    """The first ``chunks`` chunks of a text."""

    number: int
    """Number of the text."""
    chunks: int = 4
    """Length in chunks."""

    @property
    def hashes(self) -> list[bytes]:
        """One hash per chunk; each contains the number of the text."""
        return [hashlib.blake2b(b"%d/%d" % (self.number, i), digest_size=32).digest() for i in range(self.chunks)]

    @property
    def keys(self) -> list[Key]:
        """Keys of its chunks."""
        return [make_key(chunk_hash, 0) for chunk_hash in self.hashes]

    def first(self, chunks: int) -> Prompt:
        """Prefix of ``chunks`` chunks."""
        return Prompt(self.number, chunks)


@dataclass
class HandRequest:
    """Request of a prompt. It has one token more than its chunks: that token is always computed."""

    request_id: str
    prompt: Prompt
    kv_transfer_params: Mapping[str, Any] | None = None
    block_hashes: list[bytes] = field(init=False)
    blocks: list[Block] = field(default_factory=list)
    """Its blocks: one per chunk, and one for the last token."""

    def __post_init__(self) -> None:
        self.block_hashes = self.prompt.hashes

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return self.prompt.chunks * BLOCK_TOKENS + 1

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt; no token is generated."""
        return self.num_tokens


def engine_spec(model: str = "conformance", payload_bytes: int = PAYLOAD_BYTES) -> EngineSpec:
    """Spec of one group of full attention with one tensor; a block holds one chunk of ``payload_bytes``."""
    return EngineSpec(model, "uint8", (GroupSpec(BLOCK_TOKENS, (payload_bytes,)),), BLOCK_TOKENS)


class HandEngine:
    """Drives ``stack``, whose engine is :func:`engine_spec`.

    Args:
        stack: what it drives.
        payload_bytes: of a chunk.
        num_blocks: blocks of the pool, the null block included.

    Raises:
        ValueError: by every method that takes blocks, if the pool has too few.
    """

    def __init__(self, stack: Stack, payload_bytes: int = PAYLOAD_BYTES, num_blocks: int = NUM_BLOCKS) -> None:
        self.stack = stack
        self._payload_bytes = payload_bytes
        self._pages = np.zeros((num_blocks, payload_bytes), np.uint8)
        self._pool = BlockPool(num_blocks)
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
        """Step until a condition holds.

        Raises:
            AssertionError: it does not hold after :data:`PATIENCE_S`; names ``what``.
        """
        give_up_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < give_up_s, f"waited too long for {what}"
            time.sleep(0.001)
            self.step()

    # -- requests, call by call --------------------------------------------------------------------------------------

    def arrive(self, prompt: Prompt) -> HandRequest:
        """Announce a new request; end it with :meth:`end`."""
        request = HandRequest(f"request-{next(self._ids)}", prompt)
        self.stack.on_new_request(request)
        return request

    def ask(self, request: HandRequest) -> int | None:
        """Ask once for the number of chunks that can be loaded; None: not known yet."""
        tokens, is_asynchronous = self.stack.get_num_new_matched_tokens(request, 0)
        assert is_asynchronous == bool(tokens)
        return None if tokens is None else tokens // BLOCK_TOKENS

    def allocate(self, request: HandRequest, chunks: int) -> None:
        """Give a request its blocks, and accept the load of its first ``chunks`` chunks."""
        request.blocks = self._pool.allocate(request.prompt.chunks + 1)
        self._pages[self._block_ids(request)] = 0xDB
        self.stack.update_state_after_alloc(request, [request.blocks], chunks * BLOCK_TOKENS)

    def schedule(self, request: HandRequest, loaded: int) -> ScheduledRequest:
        """Entry of a step that computes all but the first ``loaded`` chunks of a request."""
        tokens = loaded * BLOCK_TOKENS
        ids = (tuple(self._block_ids(request)),)
        return ScheduledRequest(request.request_id, tokens, request.num_tokens - tokens, ids, replaces_table=True)

    def compute(self, request: HandRequest, loaded: int) -> None:
        """Write the right bytes of all but the first ``loaded`` chunks: the forward pass of that step."""
        for block, chunk_hash in list(zip(request.blocks, request.block_hashes, strict=False))[loaded:]:
            self._pages[block.block_id] = np.frombuffer(make_frame(chunk_hash, 0, self._payload_bytes), np.uint8)

    def check(self, request: HandRequest, loaded: int, invalid: Container[int] = ()) -> int:
        """Compare the first ``loaded`` chunks with the right bytes, up to the first of an ``invalid`` block.

        Returns:
            The number of chunks compared.

        Raises:
            AssertionError: a byte is wrong.
        """
        for number, (block, chunk_hash) in enumerate(zip(request.blocks[:loaded], request.block_hashes, strict=False)):
            if block.block_id in invalid:
                return number
            right = make_frame(chunk_hash, 0, self._payload_bytes)
            assert self._pages[block.block_id].tobytes() == right, f"wrong bytes: chunk {number} of {request.prompt}"
        return loaded

    def end(self, request: HandRequest) -> None:
        """End a request; its blocks are free."""
        self.stack.request_finished(request, [self._block_ids(request)])
        self._pool.release(reversed(request.blocks))
        request.blocks = []

    # -- whole requests ----------------------------------------------------------------------------------------------

    def store(self, prompt: Prompt) -> None:
        """Compute all of a prompt, whatever could be loaded of it, and wait until its chunks are in the host tier."""
        request = self.arrive(prompt)
        self.lookup(request)
        self.allocate(request, 0)
        self.step(StepOutput((self.schedule(request, 0),)), lambda: self.compute(request, 0))
        self.end(request)
        self.step_until(lambda: not self.stack.has_pending_work(), "the end of a store")

    def load(self, prompt: Prompt) -> int:
        """Load what a lookup offers. Returns the number of chunks loaded from the front; each of them is checked.

        Raises:
            AssertionError: a chunk was reported as loaded, and its bytes are wrong.
        """
        request = self.arrive(prompt)
        try:
            return self.load_for(request, self.lookup(request))
        finally:
            self.end(request)

    def load_for(self, request: HandRequest, chunks: int) -> int:
        """Load the ``chunks`` that the lookup of a request offered; returns and raises as :meth:`load`."""
        self.allocate(request, chunks)
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
        return self.check(request, chunks, invalid)

    def lookup(self, request: HandRequest) -> int:
        """Ask until the answer is known, in chunks."""
        chunks: list[int] = []

        def answered() -> bool:
            answer = self.ask(request)
            chunks.extend([] if answer is None else [answer])
            return bool(chunks)

        self.step_until(answered, "the answer to a lookup")
        return chunks[0]

    @staticmethod
    def _block_ids(request: HandRequest) -> list[int]:
        return [block.block_id for block in request.blocks]
