"""Small engine of several workers over one stack, in this process or in processes of their own.

Every page of a rank is filled from rank, block and a seed, so that a wrong byte anywhere shows.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

import tierkv
from tierkv.stack.remote_worker import WorkerSetup
from tierkv.stack.stack import Stack
from tierkv.types.engine import EngineCapabilities, EngineSpec, GroupSpec, LoadReport, ScheduledRequest, StepOutput
from tierkv.types.transfers import ConnectorMeta, WorkerOutput
from tierkv.worker.pages import HostPages
from tierkv.worker.worker import Worker

BLOCK_TOKENS, NUM_BLOCKS = 16, 32
PAGE_BYTES = (256, 96)
PATIENCE_S = 20.0


def spec_of(num_workers: int, *, processes: bool = False, copies: int = 1) -> EngineSpec:
    """Return an engine whose chunks of two blocks have 704 bytes per worker, or per ``copies`` workers."""
    groups = (GroupSpec(BLOCK_TOKENS, PAGE_BYTES, copies=copies),)
    return EngineSpec(
        "m", "float32", groups, BLOCK_TOKENS, num_workers=num_workers,
        capabilities=EngineCapabilities(worker_processes=processes),
    )  # fmt: skip


def config_of(**more: Any) -> dict[str, Any]:
    """Return a stack of about sixteen slots."""
    return {"host": {"capacity": "128KiB"}, "chunk": {"blocks": 2}, **more}


def pages_of(rank: int, seed: int) -> list[np.ndarray]:
    """Return the tensors of one rank, with bytes that no other rank or seed has."""
    rng = np.random.default_rng((rank, seed))
    return [rng.integers(0, 256, (NUM_BLOCKS, size), dtype=np.uint8) for size in PAGE_BYTES]


class Rank(Protocol):
    """One worker, in this process or another."""

    def step(self, meta: ConnectorMeta, written: Sequence[int] = ()) -> None:
        """Run a whole step: start, forward pass (writes these blocks), queue."""

    def finished(self) -> WorkerOutput:
        """Return the ended jobs."""

    def block(self, block_id: int) -> bytes:
        """Return the bytes of one block in all tensors."""


class LocalRank:
    """Worker in this process.

    Args:
        worker: the worker.
        seed: of the bytes of its pages.
        device: torch's device of its pages; empty: numpy memory.
        copies: workers with equal pages.
    """

    def __init__(self, worker: Worker, seed: int = 1, device: str = "", copies: int = 1) -> None:
        self.worker = worker
        self.pages: list[Any] = [*pages_of(worker.rank // copies, seed)]
        if device:
            import torch  # noqa: PLC0415 - seconds in each new process, which most of them do not need

            self.pages = [torch.from_numpy(pages).to(device) for pages in self.pages]
        worker.register_kv_caches([self.pages])

    def step(self, meta: ConnectorMeta, written: Sequence[int] = ()) -> None:
        self.worker.start_step(meta)
        for pages in self.pages:
            pages[list(written)] = 0
        self.worker.queue_stores(meta)

    def finished(self) -> WorkerOutput:
        return self.worker.get_finished()

    def block(self, block_id: int) -> bytes:
        return b"".join(bytes(pages[block_id].tolist()) for pages in self.pages)


class RemoteRank:
    """Worker in a process of its own."""

    def __init__(self, setup: WorkerSetup, seed: int = 1, stall: str = "", device: str = "") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=serve_rank, args=(other, setup, seed, stall, device), daemon=True)
        self.process.start()
        other.close()

    def ask(self, *message: object) -> Any:
        """Call a method in the worker's process."""
        self._pipe.send(message)
        if not self._pipe.poll(PATIENCE_S):
            raise TimeoutError(f"{message[0]} was not answered")
        return self._pipe.recv()

    def step(self, meta: ConnectorMeta, written: Sequence[int] = ()) -> None:
        self.ask("step", meta, written)

    def finished(self) -> WorkerOutput:
        output: WorkerOutput = self.ask("finished")
        return output

    def block(self, block_id: int) -> bytes:
        data: bytes = self.ask("block", block_id)
        return data

    def kill(self) -> None:
        """End the process as an out-of-memory killer would."""
        self.process.kill()
        self.process.join(PATIENCE_S)

    def close(self) -> None:
        """End the process in order, if it still runs."""
        with suppress(OSError, EOFError):
            self.ask("quit")
        self.process.join(PATIENCE_S)
        self._pipe.close()


def serve_rank(pipe: Connection, setup: WorkerSetup, seed: int, stall: str, device: str) -> None:
    """Run a worker's process. ``stall``: copies that stop half-way, forever."""
    if stall:
        setattr(HostPages, stall, _stalled(getattr(HostPages, stall)))
    with tierkv.open_worker(setup) as worker:
        rank = LocalRank(worker, seed, device, setup.geometry.groups[0].copies)
        calls: dict[str, Callable[..., object]] = {
            "step": rank.step, "finished": rank.finished, "block": rank.block, "drain": worker.drain,
            "quit": lambda: None,
        }  # fmt: skip
        name = ""
        while name != "quit":
            name, *arguments = pipe.recv()
            pipe.send(calls[name](*arguments))


def _stalled(copy: Callable[..., Any]) -> Callable[..., None]:
    def half(pages: HostPages, group: int, skip: int, block_ids: Sequence[int], part: Any) -> None:
        for _ in copy(pages, group, skip, block_ids, part) or ():  # a gather gives pieces
            pass
        part[len(part) // 2 :] = 0xEE
        time.sleep(10 * PATIENCE_S)

    return half


@dataclass
class PagedRequest:
    """Prompt of a request."""

    request_id: str
    tokens: Sequence[int]
    kv_transfer_params: None = None
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens = len(self.tokens)
        parent = b""
        for start in range(0, len(self.tokens) // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS):
            parent = hashlib.sha256(parent + bytes(self.tokens[start : start + BLOCK_TOKENS])).digest()
            self.block_hashes.append(parent)


@dataclass(frozen=True)
class PagedBlock:
    """GPU block."""

    block_id: int
    block_hash: bytes | None = None
    is_null: bool = False


class Driver:
    """Steps a stack and its workers."""

    def __init__(self, stack: Stack, ranks: Sequence[Rank]) -> None:
        self.stack = stack
        self.ranks = ranks
        self._count = 0

    def request(self, tokens: Iterable[int]) -> PagedRequest:
        """Create a request."""
        self._count += 1
        request = PagedRequest(f"r{self._count}", list(tokens))
        self.stack.on_new_request(request)
        return request

    def step(self, output: StepOutput | None = None, written: Sequence[int] = ()) -> LoadReport:
        """Run one step of the stack and of all workers."""
        meta = self.stack.build_connector_meta(output or StepOutput())
        for rank in self.ranks:
            rank.step(meta, written)
        return self.collect()

    def collect(self) -> LoadReport:
        """Hand the reports of the workers to the stack."""
        return self.stack.update_connector_output(WorkerOutput.aggregate(rank.finished() for rank in self.ranks))

    def compute(self, request: PagedRequest, block_ids: Sequence[int]) -> None:
        """Compute all of a prompt in one step, which queues its store. The request stays alive."""
        self.stack.get_num_new_matched_tokens(request, 0)
        self.stack.update_state_after_alloc(request, [[PagedBlock(i) for i in block_ids]], 0)
        scheduled = ScheduledRequest(
            request.request_id, 0, request.num_tokens, (tuple(block_ids),), replaces_table=True
        )
        self.step(StepOutput((scheduled,)))

    def begin_store(self, request: PagedRequest, block_ids: Sequence[int]) -> None:
        """Compute a prompt, and begin its store in the next step."""
        self.compute(request, block_ids)
        meta = self.stack.build_connector_meta(StepOutput())
        for rank in self.ranks:
            rank.step(meta)

    def store(self, request: PagedRequest, block_ids: Sequence[int]) -> None:
        """Compute and store a prompt."""
        self.begin_store(request, block_ids)
        self.settle()
        self.stack.request_finished(request, (tuple(block_ids),))

    def settle(self) -> None:
        """Step until nothing is in flight."""
        deadline = time.monotonic() + PATIENCE_S
        while self.stack.has_pending_work():
            assert time.monotonic() < deadline, "transfers do not end"
            self.step()

    def begin_load(self, request: PagedRequest, block_ids: Sequence[int]) -> int:
        """Look up, allocate and begin the load. Returns the number of loaded tokens."""
        deadline = time.monotonic() + PATIENCE_S
        while (hit := self.stack.get_num_new_matched_tokens(request, 0)[0]) is None:
            assert time.monotonic() < deadline, "a lookup stays deferred"
            self.step()
        self.stack.update_state_after_alloc(request, [[PagedBlock(i) for i in block_ids]], hit)
        meta = self.stack.build_connector_meta(StepOutput())
        for rank in self.ranks:
            rank.step(meta)
        return hit

    def load(self, request: PagedRequest, block_ids: Sequence[int]) -> tuple[int, frozenset[int]]:
        """Load a prompt. Returns its number of found tokens, and the blocks whose load failed."""
        hit = self.begin_load(request, block_ids)
        invalid: set[int] = set()
        deadline = time.monotonic() + PATIENCE_S
        report = self.collect()
        while hit and request.request_id not in report.finished:
            assert time.monotonic() < deadline, "a load does not end"
            invalid |= report.invalid_block_ids
            report = self.step()
        return hit, frozenset(invalid | report.invalid_block_ids)


@contextmanager
def remote_ranks(
    stack: Stack, count: int, *, stall: dict[int, str] | None = None, device: str = ""
) -> Iterator[list[RemoteRank]]:
    """Start worker processes that end with the block."""
    ranks = [
        RemoteRank(stack.worker_setup(rank), stall=(stall or {}).get(rank, ""), device=device) for rank in range(count)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()
