"""A worker: moves chunks between GPU blocks and host slots as the scheduler says, and reports.

Order within a step (spec, section 16): flushed jobs first, because their blocks are about to be overwritten; then the
stores of the step before; then this step's loads, after those of them that were given up already, into whose blocks
another may go. This step's stores wait for the next one, so that they never delay
the forward pass they depend on. A failed transfer is a report, never an exception.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from typing import Any

from tierkv.errors import EngineProtocolError
from tierkv.frames.frame import FrameSealer
from tierkv.memory.arena import HostArena
from tierkv.metrics.transfer_stats import LOAD, STORE, TransferStats
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key
from tierkv.types.transfers import ConnectorMeta, TransferJob, WorkerOutput
from tierkv.worker.host_copies import HostCopies
from tierkv.worker.pages import HostPages, check_counts
from tierkv.worker.rank_slice import RankSlice
from tierkv.worker.transfers import Copies, CopyResult, Submit, Transfer, Wait

GPU_STAGING_BYTES = 128 << 20
"""Device memory for chunks on their way, unless the stack's description says otherwise."""


class Worker:
    """Copies for one rank. All methods belong to the worker's own thread; copies run where ``submit`` puts them.

    Args:
        arena: memory of the host tier.
        sealer: writes and checks frames.
        geometry: sizes of groups and chunks.
        submit: runs transfers; loads and stores may run in any order, fences are the scheduler's work.
        rank: which of the workers that share the stack this is.
        verify_loads: check a chunk's checksum once more on its way to the GPU.
        clock: seconds, for the time that copies take.
        gpu_staging_bytes: device memory for chunks on their way, where the KV tensors are on a GPU.
        wait_for: waits until futures of ``submit`` are done.
        staged: see :mod:`tierkv.worker.rank_slice`.

    Attributes:
        bytes_stored, bytes_loaded: this worker's parts of chunks that were copied, and checked where that is its work.
    """

    def __init__(  # noqa: PLR0913 - a worker is where memory, frames, sizes and threads meet
        self,
        arena: HostArena,
        sealer: FrameSealer,
        geometry: Geometry,
        submit: Submit,
        *,
        rank: int = 0,
        verify_loads: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        gpu_staging_bytes: int = GPU_STAGING_BYTES,
        wait_for: Wait = wait,
        staged: bool = False,
    ) -> None:
        self.rank = rank
        self._clock = clock
        self._stats = TransferStats()
        self._began_s: dict[int, float] = {}
        self.bytes_stored = 0
        self.bytes_loaded = 0
        self._slots = RankSlice(arena, sealer, geometry, rank, verify_loads=verify_loads, staged=staged)
        self._geometry = geometry
        self._submit = submit
        self._gpu_staging_bytes = gpu_staging_bytes
        self._wait_for = wait_for
        self._copies: Copies | None = None
        self._queued: dict[int, TransferJob] = {}
        self._running: dict[int, tuple[TransferJob, Transfer]] = {}

    def register_kv_caches(self, caches: Sequence[Sequence[Any]]) -> None:
        """The engine's KV tensors, per group, each ``[num_blocks, ...]``, all in host memory or all on one GPU.

        On a GPU this pins the arena, which takes some seconds per hundred GB.

        Raises:
            EngineProtocolError: number, shape or place of the tensors differ from the spec; says which and how.
        """
        check_counts(self._geometry, caches)
        if self._copies is not None:
            self.wait(list(self._running))
            self._copies.close()
        if getattr(caches[0][0], "is_cuda", False):
            from tierkv.worker.cuda_copies import cuda_copies  # noqa: PLC0415 - torch, and only where there is a GPU

            self._copies = cuda_copies(self._slots, caches, self._submit, self._gpu_staging_bytes)
        else:
            self._copies = HostCopies(
                self._slots, HostPages(self._geometry, caches), self._submit, self._clock, self._wait_for
            )

    def start_step(self, meta: ConnectorMeta) -> None:
        """Before the forward pass: flush what must be flushed, then submit queued stores and this step's loads."""
        if not (self._queued or meta.loads or meta.jobs_to_flush):
            return  # stores of this step are for the next one
        urgent = [job for job in meta.stores if job.job_id in meta.jobs_to_flush]
        for job in (*self._queued.values(), *urgent):
            self._start(job)
        self._queued.clear()
        self.wait(meta.jobs_to_flush)
        # A load that is to be flushed in the very step that starts it was given up: its blocks are somebody else's,
        # perhaps those of another load of this step, which must come last.
        given_up = [job for job in meta.loads if job.job_id in meta.jobs_to_flush]
        for job in given_up:
            self._start(job)
        self.wait(job.job_id for job in given_up)
        for job in meta.loads:
            if job.job_id not in meta.jobs_to_flush:
                self._start(job)

    def start(self, job: TransferJob) -> None:
        """Begin one job at once: for an engine that keeps an order of its own."""
        self._start(job)

    def queue_stores(self, meta: ConnectorMeta) -> None:
        """After the forward pass: this step's stores will be submitted at the start of the next one."""
        for job in meta.stores:
            if job.job_id not in meta.jobs_to_flush:
                self._queued[job.job_id] = job

    def get_finished(self) -> WorkerOutput:
        """What has ended since the last call. Does not wait."""
        ended = [job_id for job_id, (_, transfer) in self._running.items() if transfer.done()]
        if not ended:
            return WorkerOutput()
        finished: dict[int, int] = {}
        failed: dict[int, frozenset[Key]] = {}
        parts: dict[int, dict[int, tuple[bytes, ...]]] = {}
        for job_id in ended:
            job, transfer = self._running.pop(job_id)
            result = transfer.result()
            finished[job_id] = 1
            if result.failed:
                failed[job_id] = result.failed
            if not self._slots.is_alone:
                parts[job_id] = {self.rank: result.checksums}
            self._count(job, result)
        transfers = self._stats.drain()
        return WorkerOutput(finished, failed, parts, transfers.data if transfers else {})

    def _count(self, job: TransferJob, result: CopyResult) -> None:
        groups = self._geometry.groups
        copied = sum(
            groups[g].worker_bytes
            for key, g in zip(job.keys, job.chunk_groups, strict=True)
            if key not in result.failed
        )
        began_s = self._began_s.pop(job.job_id)
        # Where the copy itself was not timed, it took at most from its start to this look at it.
        seconds = self._clock() - began_s if result.seconds is None else result.seconds
        self._stats.record(STORE if job.is_store else LOAD, copied, seconds)
        if job.is_store:
            self.bytes_stored += copied
        else:
            self.bytes_loaded += copied

    def wait(self, job_ids: Iterable[int]) -> None:
        """Until these jobs have ended; unknown and ended ids are fine (S112). Queued ones are submitted first."""
        waited = list(job_ids)
        for job_id in waited:
            if job_id in self._queued:
                self._start(self._queued.pop(job_id))
        for job_id in waited:
            running = self._running.get(job_id)
            if running is not None:
                running[1].wait()

    def drain(self) -> None:
        """Submit queued stores and wait for everything: nothing that was accepted is lost. For an orderly end."""
        self.wait([*self._queued, *self._running])

    def shutdown(self) -> None:
        """Drop queued stores, wait for running copies. Idempotent."""
        self._queued.clear()
        self.wait(list(self._running))
        if self._copies is not None:
            self._copies.close()

    def _start(self, job: TransferJob) -> None:
        if self._copies is None:
            raise EngineProtocolError("register_kv_caches must be called before the first transfer")
        self._began_s[job.job_id] = self._clock()
        self._running[job.job_id] = (job, self._copies.start(job))
