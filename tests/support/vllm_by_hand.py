"""Both sides of the vLLM connector around a real stack, with vLLM's part played by hand: needs torch, but no vLLM.

Workers share memory with the stack as in an engine of several processes, and every message is pickled on its way.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

import torch

from tierkv.integrations.vllm.connector.containment import ContainedScheduler, ContainedWorker
from tierkv.integrations.vllm.connector.scheduler import ConnectorScheduler
from tierkv.integrations.vllm.connector.worker import ConnectorWorker
from tierkv.integrations.vllm.pages import group_runs
from tierkv.stack.opening import open_stack
from tierkv.types.engine import EngineCapabilities, EngineSpec, GroupKind, GroupSpec
from tierkv.types.transfers import WorkerOutput

BLOCKS, BLOCK_TOKENS, PAGE_BYTES = 40, 4, 64
STEPS_MAX, PAUSE_S = 10_000, 0.001


@dataclass
class LaidOut:
    """vLLM's KVCacheTensor."""

    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0


@dataclass
class LayerGroup:
    """vLLM's KVCacheGroupSpec."""

    layer_names: list[str]


@dataclass
class CacheConfig:
    """vLLM's KVCacheConfig: groups of two layers that overlay each other."""

    num_groups: int = 1
    num_blocks: int = BLOCKS
    kv_cache_tensors: list[LaidOut] = field(init=False)
    kv_cache_groups: list[LayerGroup] = field(init=False)

    def __post_init__(self) -> None:
        self.kv_cache_groups = [LayerGroup([f"{g}.a", f"{g}.b"]) for g in range(self.num_groups)]
        self.kv_cache_tensors = [
            LaidOut(group.layer_names, BLOCKS * PAGE_BYTES, PAGE_BYTES) for group in self.kv_cache_groups
        ]

    def memory(self) -> dict[str, torch.Tensor]:
        """Tensors of one worker, by layer."""
        raw = torch.zeros(2 * BLOCKS * PAGE_BYTES, dtype=torch.int8)
        shape, strides = (BLOCKS, PAGE_BYTES), (PAGE_BYTES, 1)
        return {
            layer: raw.as_strided(shape, strides, i * BLOCKS * PAGE_BYTES)
            for group in self.kv_cache_groups
            for i, layer in enumerate(group.layer_names)
        }


@dataclass
class PlayedRequest:
    """Fields read of vLLM's Request."""

    request_id: str
    tokens: list[int]
    cache_salt: str | None = None
    lora_request: Any = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    num_in_flight_tokens: int = 0
    num_computed_tokens: int = 0
    mm_features: Sequence[Any] = ()
    prompt_embeds: Any = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: Any = None
    block_hashes: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        prefix = b"".join(token.to_bytes(4, "big") for token in self.tokens)
        ends = range(BLOCK_TOKENS, len(self.tokens) + 1, BLOCK_TOKENS)
        self.block_hashes = [(prefix[: 4 * end]).rjust(32, b"h")[-32:] for end in ends]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens)

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens


@dataclass(frozen=True)
class PlayedBlock:
    """Fields read of vLLM's KVCacheBlock."""

    block_id: int
    block_hash: bytes | None = None
    is_null: bool = False


def scheduler_output(
    new: Sequence[tuple[PlayedRequest, int, list[list[int]]]] = (),
    finished: Sequence[str] = (),
    preempted: Sequence[str] = (),
) -> SimpleNamespace:
    """VLLM's SchedulerOutput: (request, computed tokens, block ids per group), each scheduled to its end."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=request.request_id, num_computed_tokens=computed, block_ids=ids)
            for request, computed, ids in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set()
        ),
        num_scheduled_tokens={request.request_id: request.num_tokens - computed for request, computed, _ in new},
        preempted_req_ids=set(preempted),
        finished_req_ids=set(finished),
    )


@dataclass
class LoadReports:
    """Reports of loads in a step, of all workers together, as vLLM gets them."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid: set[int] = field(default_factory=set)


class ByHand:
    """A context manager; closes everything.

    Attributes:
        reported: requests whose load the workers have reported as ended, once per report.
    """

    def __init__(
        self,
        stack: Mapping[str, Any],
        *,
        groups: int = 1,
        ranks: int = 1,
        kinds: Sequence[GroupKind] = (),
        contains: bool = False,
    ) -> None:
        self.config = CacheConfig(groups)
        kinds = kinds or [GroupKind.FULL_ATTENTION] * groups
        specs = tuple(
            GroupSpec(BLOCK_TOKENS, tuple(run.page_bytes for run in runs), kind)
            for runs, kind in zip(group_runs(self.config), kinds, strict=True)
        )
        capabilities = EngineCapabilities(worker_processes=True)
        spec = EngineSpec("m", "int8", specs, BLOCK_TOKENS, num_workers=ranks, capabilities=capabilities)
        self.scheduler = ContainedScheduler(ConnectorScheduler(open_stack(dict(stack), spec)), contains=contains)
        self.memory = [self.config.memory() for _ in range(ranks)]
        self.workers = [ContainedWorker(ConnectorWorker(self.config, rank), contains=contains) for rank in range(ranks)]
        for worker, memory in zip(self.workers, self.memory, strict=True):
            worker.register_kv_caches(memory)
        self._failed: set[str] = set()
        self._reported_by: dict[str, int] = {}
        self._stopped = 0
        self.reported: list[str] = []

    def step(
        self,
        output: SimpleNamespace | None = None,
        forward: Callable[[], object] = lambda: None,
        *,
        local: bool = False,
    ) -> LoadReports:
        """A step of the engine. ``local``: the worker is given the way back, as in an engine of one process."""
        meta, setup, failed_loads = self.start(output, local=local)
        forward()
        for worker in self.workers:
            worker.queue_stores(meta)
        self.sent = setup, failed_loads
        return self.take_reports()

    def start(self, output: SimpleNamespace | None = None, *, local: bool = False) -> tuple[Any, Any, Any]:
        """The first half of a step: scheduled, and begun by the workers."""
        made = self.scheduler.build(output or scheduler_output())
        meta, setup, failed_loads = pickle.loads(pickle.dumps((made.meta, made.setup, made.failed_loads)))
        last_steps = self.scheduler.run_last_steps if local else None
        for worker in self.workers:
            worker.start_step(meta, setup, failed_loads, last_steps, stops=made.stops)
        return meta, setup, failed_loads

    def collect(self) -> tuple[WorkerOutput, int, LoadReports]:
        """Join the workers' reports as vLLM does: a load has ended when all of them have reported it."""
        reports, outputs, started_workers = LoadReports(), [], 0
        for worker in self.workers:
            results = worker.take_results()
            self._failed |= results.failed
            reports.invalid |= results.invalid_block_ids
            for request_id in results.finished:
                self._reported_by[request_id] = self._reported_by.get(request_id, 0) + 1
            output = worker.take_output()
            if output is not None:
                outputs.append(pickle.loads(pickle.dumps(output[0])))
                started_workers += output[1]
                self._stopped += output[2]
        reports.finished = {name for name, count in self._reported_by.items() if count == len(self.workers)}
        self._reported_by = {name: count for name, count in self._reported_by.items() if name not in reports.finished}
        self.reported += reports.finished
        reports.failed = self._failed & reports.finished
        self._failed -= reports.failed
        return WorkerOutput.aggregate(outputs), started_workers, reports

    def take_reports(self) -> LoadReports:
        """Make the second half of a step: take in the workers' reports."""
        output, started_workers, reports = self.collect()
        stopped_workers, self._stopped = self._stopped, 0
        self.scheduler.process_output(output, started_workers, reports.finished, stopped_workers)
        return reports

    def settle(self) -> LoadReports:
        """Step until nothing is in flight. Returns all reports."""
        reports = LoadReports()
        for _ in range(STEPS_MAX):
            taken = self.step()
            reports.finished |= taken.finished
            reports.failed |= taken.failed
            reports.invalid |= taken.invalid
            if not self.scheduler.has_pending_work:
                return reports
            time.sleep(PAUSE_S)
        raise AssertionError("transfers did not end")

    # -- requests ------------------------------------------------------------------------------------------------------

    def compute(self, request: PlayedRequest, ids: list[list[int]], mark: int) -> None:
        """Serve a prompt without hits: its blocks are filled by a forward pass, rank by rank otherwise."""
        self.scheduler.on_new_request(request)
        assert self.ask(request) == 0
        self.scheduler.update_state_after_alloc(request, blocks_of(ids), 0)
        self.step(scheduler_output([(request, 0, ids)]), lambda: self.fill(ids, mark))
        self.scheduler.request_finished(request, tuple(ids))
        self.settle()

    def fill(self, ids: list[list[int]], mark: int) -> None:
        """Bytes that name rank, layer and position."""
        for rank, memory in enumerate(self.memory):
            for group, table in zip(self.config.kv_cache_groups, ids, strict=True):
                for number, layer in enumerate(group.layer_names):
                    for position, block in enumerate(table):
                        memory[layer][block] = (mark + 31 * rank + 7 * number + position) % 100 + 1

    def blocks(self, rank: int, group: int, ids: Sequence[int]) -> torch.Tensor:
        """The bytes of some blocks."""
        return torch.stack(
            [self.memory[rank][layer][list(ids)] for layer in self.config.kv_cache_groups[group].layer_names]
        )

    def clear(self) -> None:
        """The device forgets."""
        for memory in self.memory:
            for tensor in memory.values():
                tensor.zero_()

    def ask(self, request: PlayedRequest) -> int:
        """Ask for the tokens that can be loaded until the answer is known."""
        for _ in range(STEPS_MAX):
            tokens, _asynchronous = self.scheduler.get_num_new_matched_tokens(request, 0)
            if tokens is not None:
                return tokens
            self.step()
            time.sleep(PAUSE_S)
        raise AssertionError("the lookup was never answered")

    def begin_load(self, request: PlayedRequest, ids: list[list[int]]) -> int:
        """Ask for a prompt and have what was found loaded into these blocks; how many tokens."""
        self.scheduler.on_new_request(request)
        tokens = self.ask(request)
        self.scheduler.update_state_after_alloc(request, blocks_of(ids), tokens)
        return tokens

    def damage(self, offset_of_part: int = 0, slots: Sequence[int] | None = None) -> None:
        """Flip a byte in each slot of the host tier, or in some, at an offset."""
        arena = self.scheduler.stack._core.wiring.arena
        for slot in range(arena.num_slots) if slots is None else slots:
            arena.payload(slot)[offset_of_part] ^= 0xFF

    def close(self) -> None:
        """Both sides."""
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def blocks_of(ids: list[list[int]]) -> list[list[PlayedBlock]]:
    """Tables of blocks that hold nothing yet."""
    return [[PlayedBlock(block) for block in table] for table in ids]
