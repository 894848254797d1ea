"""A worker's side of the connector: copies between vLLM's KV memory and the shared host tier. Needs no vLLM itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tierkv.errors import EngineProtocolError
from tierkv.integrations.vllm.pages import KVCacheConfig, group_pages
from tierkv.stack.remote_worker import ProcessWorker, WorkerSetup, open_worker
from tierkv.types.transfers import ConnectorMeta, TransferJob, WorkerOutput, chunk_blocks
from tierkv.worker.worker import Worker


@dataclass(slots=True)
class _Load:
    """The load of one request, which may come in several jobs. ends: the last of them is known."""

    jobs: dict[int, TransferJob] = field(default_factory=dict)
    ends: bool = False
    failed: bool = False


@dataclass(slots=True)
class LoadResults:
    """What became of loads since it was last asked: request ids, and blocks that hold no valid data."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)


class ConnectorWorker:
    """All methods belong to the worker's thread.

    Args:
        config: where vLLM lays its KV memory.
        rank: of this worker, among those that share the stack.
    """

    def __init__(self, config: KVCacheConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._pages: list[list[Any]] | None = None
        self._worker: ProcessWorker | None = None
        self._begun_untold = 0
        self._last_steps: Callable[[Worker], None] | None = None
        self._loads: dict[str, _Load] = {}
        self._output = WorkerOutput()
        self._blocks_per_chunk = 1
        self._fails_whole = True

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """The engine's KV tensors, by layer.

        Raises:
            EngineProtocolError: they are not laid out as the configuration says.
        """
        self._pages = group_pages(self._config, kv_caches)
        if self._worker is not None:
            self._worker.register_kv_caches(self._pages)

    # -- a step --------------------------------------------------------------------------------------------------------

    def start_step(
        self,
        meta: ConnectorMeta,
        setup: WorkerSetup | None,
        voided: frozenset[str],
        last_steps: Callable[[Worker], None] | None,
    ) -> None:
        """Before anything is written to the KV memory in this step. Waits for transfers that read what will be.

        Raises:
            EngineProtocolError: the first step brought no setup, or the engine's memory is not what the setup says.
        """
        self._last_steps = last_steps
        worker = self._worker or self._begin(setup)
        for request_id in voided:
            self._loads[request_id] = _Load(ends=True, failed=True)
        for job in meta.loads:
            load = self._loads.setdefault(job.request_id, _Load())
            load.jobs[job.job_id] = job
            load.ends = load.ends or job.ends_load
        worker.start_step(meta)

    def _begin(self, setup: WorkerSetup | None) -> ProcessWorker:
        if setup is None or self._pages is None:
            missing = "its setup" if setup is None else "the engine's KV tensors"
            raise EngineProtocolError(f"worker {self._rank} of tierkv has a step before it has {missing}")
        worker = open_worker(replace(setup, rank=self._rank))
        try:
            worker.register_kv_caches(self._pages)
        except BaseException:
            worker.close()
            raise
        self._blocks_per_chunk = setup.geometry.blocks_per_chunk
        self._fails_whole = len(setup.geometry.groups) > 1 or setup.geometry.has_windows
        self._worker, self._begun_untold = worker, 1
        return worker

    def queue_stores(self, meta: ConnectorMeta) -> None:
        """After the forward pass: this step's stores begin with the next step."""
        if self._worker is not None:
            self._worker.queue_stores(meta)

    # -- results -------------------------------------------------------------------------------------------------------

    def take_results(self) -> LoadResults:
        """Loads that ended since the last call. Does not wait; :meth:`take_output` has the rest.

        Where a model has several KV cache groups, or a window, a load fails as a whole: vLLM cannot be told by block.
        """
        results = LoadResults()
        if self._worker is not None:
            output = self._worker.get_finished()
            if output.is_empty and not self._loads:
                return results
            self._output = WorkerOutput.aggregate([self._output, output])
            for request_id, load in list(self._loads.items()):
                for job_id in load.jobs.keys() & output.finished.keys():
                    self._note(load, load.jobs.pop(job_id), output, results)
                if load.ends and not load.jobs:
                    del self._loads[request_id]
                    results.finished.add(request_id)
                    if load.failed:
                        results.failed.add(request_id)
        return results

    def _note(self, load: _Load, job: TransferJob, output: WorkerOutput, results: LoadResults) -> None:
        failed = output.failed_keys.get(job.job_id)
        if not failed:
            return
        if self._fails_whole:
            load.failed = True
            return
        chunks = zip(job.keys, chunk_blocks(job, self._blocks_per_chunk), strict=True)
        results.invalid_block_ids.update(block for key, (_, ids) in chunks if key in failed for block in ids)

    def take_output(self) -> tuple[WorkerOutput, int] | None:
        """What the scheduler's side has to know since the last call, and 1 if this worker has begun; None: nothing."""
        if self._output.is_empty and not self._begun_untold:
            return None
        told = self._output, self._begun_untold
        self._output, self._begun_untold = WorkerOutput(), 0
        return told

    # -- the end -------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait for all transfers."""
        if self._worker is not None:
            self._worker.drain()

    def shutdown(self) -> None:
        """End transfers, let the scheduler's side bring its own to an end if it lives here, and let go. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        try:
            if self._last_steps is not None:
                self._last_steps(worker)
            worker.drain()
        finally:
            self._last_steps = None
            worker.close()
