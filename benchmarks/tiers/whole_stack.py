"""A whole stack over a disk: eight requests are stored until they are durable, then loaded cold, beside raw O_DIRECT.

Everything of a deployment but the model: lookups, copies with checksums between pages and the host tier, dispatch, the
disk tier with its index log. The limit moves the same bytes between memory and one preallocated file, with as many
threads as the tier, several frames a call. Every loaded byte is compared outside of the measured time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import tierkv
from benchmarks.core.rig import random_hashes
from benchmarks.measure import Cost, Settings, take_turns, timed
from benchmarks.rows import Row
from benchmarks.tiers.bandwidth import KIB, Limit, bandwidth_row
from benchmarks.tiers.raw_disk import RawDisk
from benchmarks.tiers.rig import Frames, huge_memory
from tierkv.reference.block_pool import Block
from tierkv.types.engine import EngineSpec, GroupSpec, LoadReport, ScheduledRequest, StepOutput

REQUESTS = 8
BLOCK_TOKENS = 16
POLL_S = 0.0005
"""Time between two steps without a forward pass."""
RESET_STEPS = 8
"""Steps after a reset, each of which frees a part of the slots."""
PATIENCE_S = 300.0
TARGETS = {"64 KiB": 0.75}
"""Share of raw that is aimed at for each size, where it is not the usual one."""


@dataclass
class _Request:
    """Request of as many chunks as blocks, and one token more, which is always computed."""

    request_id: str
    block_hashes: list[bytes]
    blocks: list[Block]
    kv_transfer_params: None = field(default=None)

    @property
    def num_tokens(self) -> int:
        return len(self.block_hashes) * BLOCK_TOKENS + 1

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens

    @property
    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(block.block_id for block in self.blocks),)

    def entry(self, computed: int) -> ScheduledRequest:
        """Entry of a step that computes all tokens behind the first ``computed``."""
        return ScheduledRequest(
            self.request_id, computed, self.num_tokens - computed, self.block_ids, replaces_table=True
        )


class _Engine:
    """Engine of one stack, whose forward pass takes no time: all pages are right from the start.

    Attributes:
        longest_start_s: longest call of the worker before a forward pass.
    """

    def __init__(self, folder: Path, chunks: int, chunk_bytes: int, frame_bytes: int) -> None:
        spec = EngineSpec("benchmark", "uint8", (GroupSpec(BLOCK_TOKENS, (chunk_bytes,)),), BLOCK_TOKENS)
        space = chunks * frame_bytes
        tier = {
            "backend": "disk",
            "path": str(folder),
            "capacity": 2 * space,
            "segment_bytes": space,
            "min_free_bytes": 0,
        }
        host = {"capacity": space + 64 * frame_bytes}
        self.stack = tierkv.open_stack({"host": host, "lookup": {"recompute": "off"}, "tiers": [tier]}, spec)
        self._chunks, self._chunk_bytes = chunks, chunk_bytes
        self._originals = np.random.default_rng(1).integers(256, size=(chunks, chunk_bytes), dtype=np.uint8)
        blocks = chunks + REQUESTS + 1
        self._pages = huge_memory(blocks * chunk_bytes).reshape(blocks, chunk_bytes)
        self._pages[1 : chunks + 1] = self._originals
        self.stack.worker.register_kv_caches([[self._pages]])
        self._hashes = random_hashes(chunks, seed=1)
        self._count = 0
        self._requests: list[_Request] = []
        self.longest_start_s = 0.0

    def store(self) -> None:
        """Compute all prompts in one step, end them, and step until all is written."""
        requests = self._requests
        for request in requests:
            self.stack.on_new_request(request)
            self._answer(request)
            self.stack.update_state_after_alloc(request, [request.blocks], 0)
        self._step(StepOutput(tuple(request.entry(0) for request in requests)))
        for request in requests:
            self.stack.request_finished(request, request.block_ids)
        self._step_until(self._is_idle)
        if (used := self.stack.introspection.tiers()["disk"].used_bytes) < self._chunks * self._chunk_bytes:
            raise RuntimeError(f"the disk holds {used} bytes of {self._chunks} chunks")

    def load(self) -> None:
        """Ask for all prompts, load what is offered, and step until it is there."""
        requests = self._requests
        for request in requests:
            self.stack.on_new_request(request)
        loading: set[str] = set()
        waiting = list(requests)

        def loaded() -> bool:
            for request in list(waiting):
                tokens, _ = self.stack.get_num_new_matched_tokens(request, 0)
                if tokens is not None:
                    waiting.remove(request)
                    if tokens != request.num_tokens - 1:
                        raise RuntimeError(f"{tokens} tokens are offered of {request.num_tokens - 1}")
                    self.stack.update_state_after_alloc(request, [request.blocks], tokens)
                    loading.add(request.request_id)
            return not waiting and not loading

        def ended(report: LoadReport) -> None:
            loading.difference_update(report.finished)
            if report.invalid_block_ids:
                raise RuntimeError(f"{len(report.invalid_block_ids)} blocks could not be loaded")

        self._step_until(loaded, ended)
        for request in requests:
            self.stack.request_finished(request, request.block_ids)
        self._step_until(self._is_idle)

    def empty(self, *, below: bool) -> None:
        """Empty the host tier, or with ``below`` the disk as well, wipe the pages for a load, and make new requests.

        The steps let the reset free all slots, which is work of the reset, and of no store or load.
        """
        self.stack.reset_cache("all" if below else "host")
        for _ in range(RESET_STEPS):
            self._step()
        self._step_until(self._is_idle)
        self._pages[1 : self._chunks + 1] = self._originals if below else 0
        self._requests = self._new_requests()

    def verify(self) -> None:
        """Compare every byte that was loaded.

        Raises:
            RuntimeError: one differs.
        """
        if not np.array_equal(self._pages[1 : self._chunks + 1], self._originals):
            raise RuntimeError("a loaded chunk is not what was stored")

    def _new_requests(self) -> list[_Request]:
        """Return the prompts, as requests of a new name. The last token of each has a block of its own."""
        self._count += 1
        share = self._chunks // REQUESTS
        return [
            _Request(
                f"{self._count}/{number}",
                self._hashes[number * share : (number + 1) * share],
                [
                    Block(block)
                    for block in (*range(1 + number * share, 1 + (number + 1) * share), 1 + self._chunks + number)
                ],
            )
            for number in range(REQUESTS)
        ]

    def _answer(self, request: _Request) -> None:
        def answered() -> bool:
            tokens, _ = self.stack.get_num_new_matched_tokens(request, 0)
            if tokens:
                raise RuntimeError(f"{tokens} tokens are known of a new prompt")
            return tokens is not None

        self._step_until(answered)

    def _is_idle(self) -> bool:
        if self.stack.has_pending_work() or self.stack.tiers.has_waiting_writes():
            return False
        return not self.stack.introspection.tiers()["disk"].pending_ops

    def _step(self, output: StepOutput | None = None) -> LoadReport:
        meta = self.stack.build_connector_meta(output or StepOutput())
        began_s = time.perf_counter()
        self.stack.worker.start_step(meta)
        self.longest_start_s = max(self.longest_start_s, time.perf_counter() - began_s)
        self.stack.worker.queue_stores(meta)
        return self.stack.update_connector_output(self.stack.worker.get_finished())

    def _step_until(self, condition: Callable[[], bool], take: Callable[[LoadReport], None] = lambda _: None) -> None:
        give_up_s = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > give_up_s:
                raise RuntimeError("the stack does not come to an end")
            take(self._step())
            time.sleep(POLL_S)


def run(settings: Settings) -> Iterator[Row]:
    """Measure store to durable and cold load, for three sizes of chunks."""
    sizes = (("64 KiB", 64, 2048), ("256 KiB", 256, 768), ("2 MiB", 2048, 128))
    for size, kib, count in settings.pick(sizes, (("64 KiB", 64, 32), ("1 MiB", 1024, 8))):
        with tempfile.TemporaryDirectory(dir=settings.directory, prefix="tierkv-benchmark-") as folder:
            yield from _rows(Path(folder), size, Frames(count, kib * KIB), settings.rounds)


def _rows(folder: Path, size: str, frames: Frames, rounds: int) -> Iterator[Row]:
    engine = _Engine(folder / "tier", len(frames.keys), frames.payload_bytes, frames.frame_bytes)
    with engine.stack, RawDisk(folder / "raw", frames, threads=4) as raw:

        def store() -> Cost:
            engine.empty(below=True)
            return timed(engine.store)

        def load() -> Cost:
            engine.empty(below=False)
            cost = timed(engine.load)
            engine.verify()
            return cost

        stores = take_turns([store, lambda: timed(raw.put)], rounds)
        longest_s, engine.longest_start_s = engine.longest_start_s, 0.0
        loads = take_turns([load, lambda: timed(raw.get)], rounds)
    total, share = frames.total_bytes, TARGETS.get(size, 0.85)
    extra = {"longest start_step, ms": 1e3 * longest_s}
    yield bandwidth_row(
        f"store until durable, {size}", total, stores[0], Limit("raw pwritev, fdatasync", stores[1], share), extra
    )
    extra = {"longest start_step, ms": 1e3 * engine.longest_start_s}
    yield bandwidth_row(f"cold load, {size}", total, loads[0], Limit("raw preadv", loads[1], share), extra)
