"""Shared parts of the reference engine's tests: a small model, expected tokens, and a connector."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tierkv.reference import Engine, EngineConfig, ModelConfig
from tierkv.types.engine import NULL_BLOCK_ID, BlockTables, LoadReport, Request, StepOutput
from tierkv.types.keys import Key, make_key
from tierkv.types.transfers import ConnectorMeta, TransferJob, WorkerOutput


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The cores are shared with other tests; and equality is promised for one number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Shape:
    """Windows of the small model's layers, and the number of their KV groups."""

    name: str
    num_groups: int
    layers: int = 2
    windows: tuple[int | None, ...] = ()

    def model(self, dtype: str = "bfloat16") -> ModelConfig:
        """The small model of this shape."""
        return ModelConfig(
            layers=self.layers, heads=4, kv_heads=2, head_dim=8, hidden=32, intermediate=64, vocab=512, dtype=dtype,
            windows=self.windows,
        )  # fmt: skip

    def config(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The fields of the engine's configuration that it decides."""
        return {"model": self.model(dtype), "num_groups": self.num_groups}

    @property
    def group_windows(self) -> tuple[int | None, ...]:
        """Per KV group."""
        return EngineConfig(**self.config()).windows


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("full", 1),
        Shape("full-2", 2),
        Shape("hybrid", 3, layers=3, windows=(9, 9, None)),
        Shape("windows", 2, windows=(5, 14)),
    )
}
"""Windows that end inside blocks of four tokens, shorter than the prompts; beside full attention and alone."""


@pytest.fixture
def shapes() -> dict[str, Shape]:
    """All of them by name."""
    return SHAPES


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    """Each shape in turn."""
    return SHAPES[request.param]


@pytest.fixture(scope="session")
def expected() -> Callable[..., list[int]]:
    """The tokens that a model gives to a prompt: alone, in one piece, with nothing cached."""
    known: dict[Any, list[int]] = {}

    def tokens(model: ModelConfig, prompt: Sequence[int], count: int, *, block_tokens: int = 4) -> list[int]:
        key = (model, tuple(prompt), count, block_tokens)
        if key not in known:
            groups = model.layers if model.windows else 1
            config = EngineConfig(
                model=model,
                num_blocks=2 + groups * (1 + (len(prompt) + count) // block_tokens),
                block_tokens=block_tokens,
                num_groups=groups,
                max_batched_tokens=len(prompt),
                prefix_caching=False,
            )
            known[key] = Engine(config).generate([prompt], count)[0].output_tokens
        return known[key]

    return tokens


@dataclass
class HostWorker:
    """Copies whole pages between the pool and a dict, late: loads are garbage until the step in which they end."""

    load_steps: int
    fails: Callable[[Key], bool]
    calls: list[tuple[Any, ...]]
    caches: list[list[Any]] = field(default_factory=list)
    host: dict[Key, list[Any]] = field(default_factory=dict)
    queued: list[TransferJob] = field(default_factory=list)
    loads: dict[int, tuple[TransferJob, int]] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)

    def register_kv_caches(self, caches: Sequence[Sequence[Any]]) -> None:
        self.calls.append(("register_kv_caches",))
        self.caches = [list(group) for group in caches]

    def start_step(self, meta: ConnectorMeta) -> None:
        self.calls.append(("start_step", meta))
        for job in self.queued:
            for key, group, block_id in zip(job.keys, job.chunk_groups, job.block_ids, strict=True):
                self.host[key] = [tensor[block_id].clone() for tensor in self.caches[group]]
            self.stored[job.job_id] = 1
        self.queued.clear()
        for job in meta.loads:
            for group, block_id in zip(job.chunk_groups, job.block_ids, strict=True):
                for tensor in self.caches[group]:
                    tensor[block_id].fill_(float("nan"))
            self.loads[job.job_id] = (job, self.load_steps)

    def queue_stores(self, meta: ConnectorMeta) -> None:
        self.calls.append(("queue_stores", meta))
        self.queued += meta.stores

    def get_finished(self) -> WorkerOutput:
        self.calls.append(("get_finished",))
        finished, self.stored = dict(self.stored), {}
        failed: dict[int, frozenset[Key]] = {}
        for job_id, (job, steps) in list(self.loads.items()):
            self.loads[job_id] = (job, steps - 1)
            if steps > 1:
                continue
            del self.loads[job_id]
            bad = frozenset(key for key in job.keys if self.fails(key))
            for key, group, block_id in zip(job.keys, job.chunk_groups, job.block_ids, strict=True):
                if key not in bad:
                    for tensor, page in zip(self.caches[group], self.host[key], strict=True):
                        tensor[block_id] = page
            finished[job_id] = 1
            failed[job_id] = bad
        return WorkerOutput(finished, failed)


class HostEvents:
    """Events of a connector that has none; notes that they were taken."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

    def take(self) -> list[Any]:
        self.calls.append(("events.take",))
        return []


class HostConnector:
    """Keeps blocks in host memory, and holds the engine to the protocol while it does.

    It is no tierkv: it has no tiers, no bounds and no chunks. It represents any connector, so that the engine's side of
    the protocol is tested by itself: it defers each lookup ``deferrals`` times, lets loads take ``load_steps`` steps in
    which their blocks hold NaN, and fails the keys that ``fails`` says. ``calls`` is the story. ``windows``: per group,
    in tokens; none given: all groups attend to everything.
    """

    def __init__(
        self,
        *,
        block_tokens: int = 4,
        deferrals: int = 0,
        load_steps: int = 1,
        fails: Callable[[Key], bool] = lambda key: False,
        windows: Sequence[int | None] = (),
        ranks: int = 1,
    ) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.workers = [HostWorker(load_steps, fails, self.calls) for _ in range(ranks)]
        self.worker = self.workers[0]
        self.deferrals = deferrals
        self.live_jobs: dict[int, TransferJob] = {}
        self.preempted: list[str] = []
        self._block_tokens = block_tokens
        self._windows = windows
        self._requests: dict[str, Request] = {}
        self._asked: dict[str, int] = {}
        self._local: dict[str, int] = {}
        self._tables: dict[str, list[list[int]]] = {}
        self._num_stored: dict[str, int] = {}
        self._new_loads: list[TransferJob] = []
        self._num_jobs = 0

    # -- the protocol ------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self.calls.append(("on_new_request", request.request_id))
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        name = request.request_id
        assert name in self._requests, "asked about a request that never arrived, or is over"
        self._asked[name] = self._asked.get(name, 0) + 1
        if self._asked[name] <= self.deferrals:
            self.calls.append(("get_num_new_matched_tokens", name, num_computed_tokens, None))
            return None, False
        self._local[name] = first = num_computed_tokens // self._block_tokens
        end = len(request.block_hashes)
        while end > first and not all(
            make_key(request.block_hashes[i], group) in self.worker.host
            for group in self.groups
            for i in range(self._first_needed(request, group, end), end)
        ):
            end -= 1
        tokens = (end - first) * self._block_tokens
        self.calls.append(("get_num_new_matched_tokens", name, num_computed_tokens, tokens))
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: BlockTables, num_external_tokens: int) -> None:
        name, first = request.request_id, self._local[request.request_id]
        self.calls.append(("update_state_after_alloc", name, num_external_tokens))
        self._asked[name] = 0
        self._tables[name] = [[] for _ in self.groups]
        end = first + num_external_tokens // self._block_tokens
        self._num_stored[name] = end
        starts = [self._first_needed(request, group, end) for group in self.groups]
        for start, needed, table in zip(starts, self._needed(request, end), blocks, strict=True):
            assert all(block.is_null for block in table[:needed]), "what no token will see takes no block"
            assert all(block.block_hash is not None for block in table[needed:first]), "local blocks are computed"
            assert all(block.block_hash is None and not block.is_null for block in table[start:])
            assert len(table) >= end
        if num_external_tokens:
            ids = [[block.block_id for block in table[start:end]] for start, table in zip(starts, blocks, strict=True)]
            self._new_loads.append(self._job(request, starts, ids, is_store=False))

    def build_connector_meta(self, step: StepOutput) -> ConnectorMeta:
        self.preempted += step.preempted
        for name in step.preempted:
            self._tables[name] = [[] for _ in self.groups]
        for name in step.finished:
            assert name not in self._requests, "reported as finished without request_finished"
        being_loaded = {i for job in self.live_jobs.values() if not job.is_store for i in job.block_ids}
        stores = []
        for entry in step.scheduled:
            table = self._tables[entry.request_id]
            assert entry.replaces_table == (not table[0]), "the whole table, exactly when we know of none"
            seen = [self._first_visible(group, entry.num_computed_tokens) for group in self.groups]
            for ids, more, start in zip(table, entry.block_ids, seen, strict=True):
                ids.extend(more)
                assert NULL_BLOCK_ID not in ids[start:], "computed in the null block"
                assert not being_loaded.intersection(ids[start:]), "computed in blocks that a load writes"
            full = (entry.num_computed_tokens + entry.num_scheduled_tokens) // self._block_tokens
            first = self._num_stored[entry.request_id]
            if full > first:
                request = self._requests[entry.request_id]
                starts = [first + sum(i == NULL_BLOCK_ID for i in ids[first:full]) for ids in table]
                new = [ids[start:full] for start, ids in zip(starts, table, strict=True)]
                assert not any(NULL_BLOCK_ID in ids for ids in new), "null blocks are before all others only"
                stores.append(self._job(request, starts, new, is_store=True))
                self._num_stored[entry.request_id] = full
        meta = ConnectorMeta(tuple(self._new_loads), tuple(stores))
        self._new_loads.clear()
        self.calls.append(("build_connector_meta", step))
        return meta

    def update_connector_output(self, output: WorkerOutput) -> LoadReport:
        self.calls.append(("update_connector_output", output))
        names, invalid = set(), set()
        for job_id, count in output.finished.items():
            assert count == len(self.workers), "reports of all ranks, joined"
            job = self.live_jobs.pop(job_id)
            if not job.is_store:
                names.add(job.request_id)
                bad = output.failed_keys[job_id]
                invalid |= {i for key, i in zip(job.keys, job.block_ids, strict=True) if key in bad}
                if bad:
                    self._num_stored[job.request_id] = 0
        return LoadReport(frozenset(names), frozenset(invalid))

    def request_finished(self, request: Request, block_ids: tuple[tuple[int, ...], ...]) -> tuple[bool, None]:
        self.calls.append(("request_finished", request.request_id, block_ids))
        assert len(block_ids) == len(self.groups)
        del self._requests[request.request_id]
        return False, None

    @property
    def events(self) -> HostEvents:
        return HostEvents(self.calls)

    def reset_cache(self) -> None:
        self.calls.append(("reset_cache",))
        self.worker.host.clear()

    def has_pending_work(self) -> bool:
        return bool(self.live_jobs)

    # -- for tests ---------------------------------------------------------------------------------------------------

    @property
    def groups(self) -> range:
        return range(len(self.worker.caches))

    def told(self, *names: str) -> list[tuple[Any, ...]]:
        """The calls of these names, in order."""
        return [call for call in self.calls if call[0] in names]

    def steps(self) -> list[StepOutput]:
        """Steps as scheduled."""
        return [call[1] for call in self.told("build_connector_meta")]

    def _needed(self, request: Request, end: int) -> list[int]:
        """Per group, the first block that the token behind ``end`` blocks sees; or the last token, if it is no more."""
        position = min(end * self._block_tokens, request.num_tokens - 1)
        return [self._first_visible(group, position) for group in self.groups]

    def _first_visible(self, group: int, position: int) -> int:
        """The first block that the token at this position attends to."""
        window = self._windows[group] if self._windows else None
        return 0 if window is None else max(0, position - window + 1) // self._block_tokens

    def _first_needed(self, request: Request, group: int, end: int) -> int:
        """The first block to load, if the blocks up to ``end`` are."""
        return max(self._local[request.request_id], self._needed(request, end)[group])

    def _job(self, request: Request, starts: list[int], ids: list[list[int]], *, is_store: bool) -> TransferJob:
        parts = [(group, i) for group in self.groups for i in range(starts[group], starts[group] + len(ids[group]))]
        keys = tuple(make_key(request.block_hashes[i], group) for group, i in parts)
        job = TransferJob(
            job_id=self._num_jobs,
            request_id=request.request_id,
            is_store=is_store,
            keys=keys,
            slots=(),
            chunk_groups=tuple(group for group, _ in parts),
            block_ids=tuple(i for group in ids for i in group),
            group_sizes=tuple(len(group) for group in ids),
            block_indices=tuple(starts),
        )
        self._num_jobs += 1
        self.live_jobs[job.job_id] = job
        return job


@pytest.fixture
def host_connector() -> type[HostConnector]:
    """A class, so that a test chooses how its connector behaves."""
    return HostConnector
