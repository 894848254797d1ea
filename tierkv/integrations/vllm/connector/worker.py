"""Worker's side of the connector: copies between vLLM's KV memory and the shared host tier. Does not import vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tierkv.errors import EngineProtocolError
from tierkv.integrations.vllm.pages import KVCacheConfig, check_heads, group_pages
from tierkv.stack.remote_worker import ProcessWorker, WorkerSetup, open_worker
from tierkv.types.engine import GroupSpec
from tierkv.types.transfers import ConnectorMeta, TransferJob, WorkerOutput, chunk_blocks


@dataclass(slots=True)
class _Load:
    """Load of one request, in one or several jobs."""

    jobs: dict[int, TransferJob] = field(default_factory=dict)
    """Jobs in flight."""
    ends: bool = False
    """Whether the last job is known."""
    failed: bool = False
    """Whether the load failed as a whole."""


@dataclass(slots=True)
class LoadResults:
    """Results of loads since the previous call."""

    finished: set[str] = field(default_factory=set)
    """Requests whose load ended."""
    failed: set[str] = field(default_factory=set)
    """Requests whose load failed as a whole."""
    invalid_block_ids: set[int] = field(default_factory=set)
    """Blocks without valid data, of loads that failed in part."""


class ConnectorWorker:
    """Transfers of one worker. All methods belong to the worker's thread.

    Args:
        config: layout of vLLM's KV memory.
        rank: rank of this worker among those that share the stack.
        divided: shape of each group, if chunks are divided by heads.
    """

    def __init__(self, config: KVCacheConfig, rank: int, divided: Sequence[GroupSpec] | None = None) -> None:
        self._config = config
        self._divided = divided
        self._rank = rank
        self._pages: list[list[Any]] | None = None
        self._worker: ProcessWorker | None = None
        self._start_unreported = 0
        self._last_steps: Callable[[ProcessWorker], None] | None = None
        self._loads: dict[str, _Load] = {}
        self._output = WorkerOutput()
        self._blocks_per_chunk = 1
        self._fails_whole = True

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Register the engine's KV tensors, by layer.

        Raises:
            EngineProtocolError: the tensors do not have the configured layout.
        """
        if self._divided is not None:
            check_heads(self._config, kv_caches, self._divided)
        self._pages = group_pages(self._config, kv_caches)
        if self._worker is not None:
            self._worker.register_kv_caches(self._pages)

    # -- a step --------------------------------------------------------------------------------------------------------

    def start_step(
        self,
        meta: ConnectorMeta,
        setup: WorkerSetup | None,
        failed_loads: frozenset[str],
        last_steps: Callable[[ProcessWorker], None] | None,
    ) -> None:
        """Start a step, before any block is written. Waits for transfers that read blocks to be written.

        Raises:
            EngineProtocolError: the first step had no setup, or the engine's memory differs from the setup.
        """
        self._last_steps = last_steps
        worker = self._worker or self._open_worker(setup)
        self._fail(failed_loads)
        for job in meta.loads:
            load = self._loads.setdefault(job.request_id, _Load())
            load.jobs[job.job_id] = job
            load.ends = load.ends or job.ends_load
        worker.start_step(meta)

    def _fail(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            load = self._loads.setdefault(request_id, _Load())
            load.ends = load.failed = True

    def abandon(self) -> None:
        """Wait for running copies, then end every load as failed. The worker takes no further transfers."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        self._last_steps = None
        self._fail(self._loads)
        for load in self._loads.values():
            load.jobs.clear()

    def refuse_loads(self, meta: ConnectorMeta, failed_loads: frozenset[str]) -> None:
        """End the loads of a step as failed, without a transfer. Only after :meth:`abandon`."""
        self._fail(failed_loads)
        for job in meta.loads:
            load = self._loads.setdefault(job.request_id, _Load(failed=True))
            load.ends = load.ends or job.ends_load

    def _open_worker(self, setup: WorkerSetup | None) -> ProcessWorker:
        if setup is None or self._pages is None:
            missing = "its setup" if setup is None else "the engine's KV tensors"
            raise EngineProtocolError(f"worker {self._rank} of tierkv got a step before {missing}")
        worker = open_worker(replace(setup, rank=self._rank))
        try:
            worker.register_kv_caches(self._pages)
        except BaseException:
            worker.close()
            raise
        self._blocks_per_chunk = setup.geometry.blocks_per_chunk
        self._fails_whole = len(setup.geometry.groups) > 1 or setup.geometry.has_windows
        self._worker, self._start_unreported = worker, 1
        return worker

    def queue_stores(self, meta: ConnectorMeta) -> None:
        """Queue the stores of the step, after the forward pass. They start with the next step."""
        if self._worker is not None:
            self._worker.queue_stores(meta)

    # -- results -------------------------------------------------------------------------------------------------------

    def take_results(self) -> LoadResults:
        """Return the loads that ended since the previous call. Does not wait. :meth:`take_output` returns the rest.

        With several KV cache groups, or a window, a load fails as a whole: vLLM accepts no failed blocks then.
        """
        results = LoadResults()
        if self._worker is None:
            return results
        output = self._worker.get_finished()
        if not (output.finished or self._loads):
            return results
        # The previous output was mostly taken, so there is nothing to join.
        self._output = WorkerOutput.aggregate([self._output, output]) if self._output.finished else output
        for load in self._loads.values():
            for job_id in [job_id for job_id in load.jobs if job_id in output.finished]:
                self._note(load, load.jobs.pop(job_id), output, results)
        return self.take_ended(results)

    def take_ended(self, results: LoadResults | None = None) -> LoadResults:
        """Return the loads whose jobs have all ended. Needs no worker, so it may follow :meth:`abandon`.

        Args:
            results: gets the loads; None: empty ones.
        """
        results = results or LoadResults()
        for request_id in [name for name, load in self._loads.items() if load.ends and not load.jobs]:
            results.finished.add(request_id)
            if self._loads.pop(request_id).failed:
                results.failed.add(request_id)
        return results

    def _note(self, load: _Load, job: TransferJob, output: WorkerOutput, results: LoadResults) -> None:
        failed = output.failed_keys.get(job.job_id) if output.failed_keys else None
        if not failed:
            return
        if self._fails_whole:
            load.failed = True
            return
        chunks = zip(job.keys, chunk_blocks(job, self._blocks_per_chunk), strict=True)
        results.invalid_block_ids.update(block for key, (_, ids) in chunks if key in failed for block in ids)

    def take_output(self) -> tuple[WorkerOutput, int] | None:
        """Return ended jobs, and 1 if this worker has just started; None if there is nothing to report."""
        if not self._output.finished and not self._start_unreported:
            return None
        report = self._output, self._start_unreported
        self._output, self._start_unreported = WorkerOutput(), 0
        return report

    # -- the end -------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait for all transfers."""
        if self._worker is not None:
            self._worker.drain()

    def shutdown(self) -> None:
        """End all transfers, run the last steps of a scheduler in this process, and close. Idempotent."""
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
