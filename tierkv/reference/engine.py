"""Step loop of the reference engine: schedule, start transfers, run the model, take in the results.

Not for serving: see :mod:`tierkv.reference`. Everything runs on the caller's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor

from tierkv.reference.block_pool import BlockPool
from tierkv.reference.block_tables import TableKeeper
from tierkv.reference.configs import EngineConfig
from tierkv.reference.connector import KVConnector, KVConnectorWorker
from tierkv.reference.kv_pool import Allocate, kv_tensors
from tierkv.reference.model import Decoder, TokenRange
from tierkv.reference.request import Request, RequestRecord
from tierkv.reference.scheduling import Scheduler
from tierkv.types.cache_events import CacheEvent
from tierkv.types.engine import EngineSpec, StepOutput
from tierkv.types.transfers import ConnectorMeta, WorkerOutput

IDLE_S = 0.0005
"""Seconds that a step without tokens waits, so that waiting for a load does not occupy a core."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Result of one step."""

    output: StepOutput
    """The step as scheduled."""
    new_tokens: Mapping[str, int]
    """Request id -> the token generated for it."""
    finished: frozenset[str]
    """Requests that became complete in this step."""
    waiting: int
    """Number of waiting requests after the step."""
    loading: int
    """Number of requests that wait for a load."""
    running: int
    """Number of running requests."""
    events: tuple[CacheEvent, ...] = ()
    """Cache events of the connector."""


class Engine:
    """Small paged engine with greedy sampling."""

    def __init__(  # noqa: PLR0913 - the configuration, and collaborators of which each can be left out
        self,
        config: EngineConfig,
        *,
        connector: KVConnector | None = None,
        workers: Sequence[KVConnectorWorker] | None = None,
        allocate: Allocate | None = None,
        clock: Callable[[], float] = time.monotonic,
        idle: Callable[[], None] = lambda: time.sleep(IDLE_S),
    ) -> None:
        """Draw the weights, allocate the KV pool and register it with the connector.

        Args:
            config: the engine's shape.
            connector: loads and stores KV beyond the pool; None for none.
            workers: the connector's worker of each rank; None: its only one.
            allocate: allocates the pool's memory; None: torch does.
            clock: seconds, for the records.
            idle: called in a step that computes nothing.

        Raises:
            ValueError: there is not one worker per rank.
        """
        self._config = config
        self._connector = connector
        self._clock = clock
        self._idle = idle
        self._workers = _workers(config, connector, workers)
        self._decoder = Decoder(
            config.model,
            block_tokens=config.block_tokens,
            num_groups=config.num_groups,
            tensor_parallel=config.tensor_parallel,
            device=config.device,
        )
        self._kv_cache = [kv_tensors(config, allocate) for _ in range(config.tensor_parallel)]
        self._pool = BlockPool(config.num_blocks)
        self._keeper = TableKeeper(
            self._pool,
            windows=config.windows,
            block_tokens=config.block_tokens,
            prefix_caching=config.prefix_caching,
        )
        self._scheduler = Scheduler(
            self._keeper,
            connector,
            block_tokens=config.block_tokens,
            max_batched_tokens=config.max_batched_tokens,
            max_running=config.max_running,
        )
        self._requests: dict[str, Request] = {}
        self._records: dict[str, RequestRecord] = {}
        self._arrivals = count()
        for rank, worker in enumerate(self._workers):
            worker.register_kv_caches(self.kv_caches(rank))

    def kv_caches(self, rank: int = 0) -> list[list[Tensor]]:
        """Per group, the pool tensors [num_blocks, 2, block_tokens, kv_heads, head_dim] of its layers, of one rank.

        All groups share them: a block id belongs to one group at a time, and its pages hold that group's layers.
        """
        return [list(self._kv_cache[rank]) for _ in range(self._config.num_groups)]

    @property
    def block_pool(self) -> BlockPool:
        """The block pool; read-only for callers."""
        return self._pool

    @property
    def has_unfinished(self) -> bool:
        """Whether some request is neither complete nor aborted."""
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether a request or a transfer of the connector needs a further step."""
        pending = self._connector is not None and self._connector.has_pending_work()
        return self.has_unfinished or self._scheduler.has_loose_ends or pending

    def engine_spec(self) -> EngineSpec:
        """Description of this engine for tierkv; equal to ``EngineConfig.engine_spec()``."""
        return self._config.engine_spec()

    def record(self, request_id: str) -> RequestRecord:
        """Record of a request, finished or not; it is updated while the request runs.

        Raises:
            KeyError: no such request was added.
        """
        return self._records[request_id]

    def add_request(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        request_id: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> str:
        """Queue a request for ``max_new_tokens`` greedy tokens. Returns its id.

        Requests of different salts share no cache.

        Raises:
            ValueError: the prompt is empty or names tokens outside the vocabulary, ``max_new_tokens`` is below 1, the
                id was used before, or the pool is too small for the request even if it were alone.
        """
        index = next(self._arrivals)
        name = f"request-{index}" if request_id is None else request_id
        self._check(name, prompt, max_new_tokens)
        record = RequestRecord(name, index, len(prompt), arrival_s=self._clock())
        request = Request(self._config, record, prompt, max_new_tokens, kv_transfer_params, cache_salt)
        self._requests[name] = request
        self._records[name] = record
        self._scheduler.add(request)
        return name

    def abort(self, request_id: str) -> bool:
        """End a request between steps, whatever its state. False if it is unknown or over already."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        request.record.aborted = True
        request.record.finished_s = self._clock()
        self._scheduler.abort(request)
        return True

    def step(self) -> StepReport:
        """Run one step, with or without tokens to compute."""
        step, requests = self._scheduler.schedule()
        meta = self._start_transfers(step)
        new_tokens = self._compute(step, requests)
        for worker in self._workers:
            worker.queue_stores(meta)
        finished = self._take_in(step, new_tokens)
        events = self._end_transfers()
        if not step.scheduled:
            self._idle()
        queues = self._scheduler
        return StepReport(
            step, new_tokens, finished, queues.num_waiting, queues.num_loading, queues.num_running, events
        )

    def drain(self) -> None:
        """Step until no request is unfinished and the connector's transfers have ended."""
        while self.has_work:
            self.step()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        on_progress: Callable[[StepReport], None] | None = None,
    ) -> list[RequestRecord]:
        """Serve all prompts, then let the connector finish. ``on_progress`` is called after each step.

        Returns:
            The records, in the order of the prompts.

        Raises:
            ValueError: as for :meth:`add_request`; prompts before the refused one are aborted.
        """
        names: list[str] = []
        try:
            names.extend(self.add_request(prompt, max_new_tokens) for prompt in prompts)
        except ValueError:
            for name in names:
                self.abort(name)
            raise
        while self.has_work:
            report = self.step()
            if on_progress is not None:
                on_progress(report)
        return [self._records[name] for name in names]

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Drop the cached content of the pool, and with ``reset_connector`` that of the connector.

        Returns:
            False, and nothing changed, while a request holds blocks.
        """
        if not self._pool.reset_prefix_cache():
            return False
        if reset_connector and self._connector is not None:
            self._connector.reset_cache()
        return True

    def _check(self, name: str, prompt: Sequence[int], max_new_tokens: int) -> None:
        if name in self._records:
            raise ValueError(f"request_id = {name!r} was used before; every request needs its own")
        if not prompt:
            raise ValueError(f"the prompt of request {name!r} is empty; it needs at least one token")
        vocab = self._config.model.vocab
        wrong = next((token for token in prompt if not 0 <= token < vocab), None)
        if wrong is not None:
            raise ValueError(f"the prompt of request {name!r} holds token {wrong}, outside 0..{vocab - 1}")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {max_new_tokens} of request {name!r}; use 1 or more")
        # The last token is only handed out, never run.
        needed = self._keeper.blocks_for(len(prompt) + max_new_tokens - 1, self._config.max_batched_tokens)
        if needed > self._config.num_blocks - 1:
            raise ValueError(
                f"request {name!r} needs {needed} blocks and the pool has {self._config.num_blocks - 1}; "
                f"shorten it, or use num_blocks = {needed + 1} or more"
            )

    def _start_transfers(self, step: StepOutput) -> ConnectorMeta:
        if self._connector is None:
            return ConnectorMeta()
        meta = self._connector.build_connector_meta(step)
        for worker in self._workers:
            worker.start_step(meta)
        return meta

    def _compute(self, step: StepOutput, requests: Sequence[Request]) -> dict[str, int]:
        """Run the model. Returns the greedy token of each request that was computed up to its end."""
        batch, at_end = [], []
        for entry, request in zip(step.scheduled, requests, strict=True):
            end = entry.num_computed_tokens + entry.num_scheduled_tokens
            tokens = request.tokens[entry.num_computed_tokens : end]
            batch.append(TokenRange(entry.num_computed_tokens, tokens, request.block_ids))
            at_end.append(end == request.num_tokens)
        logits = self._decoder.forward(batch, self._kv_cache)
        return {
            request.request_id: int(row.argmax())
            for request, row, ends in zip(requests, logits, at_end, strict=True)
            if ends
        }

    def _take_in(self, step: StepOutput, new_tokens: Mapping[str, int]) -> frozenset[str]:
        now = self._clock()
        for request_id in new_tokens:
            record = self._records[request_id]
            record.first_token_s = now if record.first_token_s is None else record.first_token_s
        done = self._scheduler.commit(step, new_tokens)
        for request in done:
            request.record.finished_s = now
            del self._requests[request.request_id]
        return frozenset(request.request_id for request in done)

    def _end_transfers(self) -> tuple[CacheEvent, ...]:
        if self._connector is None:
            return ()
        output = WorkerOutput.aggregate(worker.get_finished() for worker in self._workers)
        report = self._connector.update_connector_output(output)
        self._scheduler.end_loads(report)
        return tuple(self._connector.events.take())


def _workers(
    config: EngineConfig, connector: KVConnector | None, workers: Sequence[KVConnectorWorker] | None
) -> tuple[KVConnectorWorker, ...]:
    if connector is None:
        return ()
    found = (connector.worker,) if workers is None else tuple(workers)
    if len(found) != config.tensor_parallel:
        raise ValueError(
            f"tensor_parallel = {config.tensor_parallel} and {len(found)} workers were given; each rank needs its own"
        )
    return found
