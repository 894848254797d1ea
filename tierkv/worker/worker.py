"""Worker: copies chunks between KV blocks and host slots as the scheduler's metadata says, and reports the results.

Order within a step:

1. Stores of the previous step, and flushed stores of this step, are submitted.
2. Flushed jobs are waited for, because their blocks are about to be overwritten.
3. Loads that were given up run to their end, because their blocks may belong to another load of this step.
4. The other loads of this step are submitted.
5. After the forward pass, this step's stores are queued for the next step, so that they never delay the forward pass
   they depend on.

A failed transfer is a report, never an exception.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import wait
from typing import Any

from tierkv.errors import EngineProtocolError, wrong_value
from tierkv.frames.sealer import FrameSealer
from tierkv.logs.stack_log import StackLog
from tierkv.memory.arena import HostArena
from tierkv.metrics.transfer_stats import LOAD, STORE, TransferStats
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key
from tierkv.types.transfers import ConnectorMeta, TransferJob, WorkerOutput
from tierkv.types.waits import bounded_seconds
from tierkv.worker.host_copies import HostCopies
from tierkv.worker.pages import HostPages, check_counts
from tierkv.worker.rank_slice import RankSlice
from tierkv.worker.transfers import Copies, CopyResult, Submit, Transfer, Wait

_log = logging.getLogger(__name__)

GPU_STAGING_BYTES = 128 << 20
"""Default of the device memory that stages chunks, in bytes."""

SHUTDOWN_S = 30.0
"""Seconds that a worker waits for running copies when it ends."""

_POLL_S = 0.002

_NOTHING = WorkerOutput()
"""Report of a worker without ended jobs, as in most steps."""


class Worker:
    """Transfers of one rank. All methods belong to the worker's own thread; copies run on the threads of ``submit``.

    Args:
        arena: memory of the host tier.
        sealer: writes and checks frames.
        geometry: sizes of groups and chunks.
        submit: runs transfers, in any order. The scheduler orders jobs that depend on each other.
        rank: number of this worker among those that share the stack.
        verify_loads: verify a chunk's checksum again before a load.
        clock: seconds, for the duration of copies.
        gpu_staging_bytes: device memory that stages chunks if the KV tensors are on a GPU.
        wait_for: waits until futures of ``submit`` are done.
        sleep: waits on the worker's thread, in :meth:`drain` and :meth:`shutdown`.
        staged: whether the engine schedules itself; see :mod:`tierkv.worker.rank_slice`.
        log: log of the stack; one of its own if left out.

    Attributes:
        bytes_stored: bytes of this worker's parts that were stored.
        bytes_loaded: bytes of this worker's parts that were loaded.

    Raises:
        EngineProtocolError: there is no such rank.
    """

    def __init__(  # noqa: PLR0913 - a worker joins memory, frames, sizes and threads
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
        sleep: Callable[[float], None] = time.sleep,
        staged: bool = False,
        log: StackLog | None = None,
    ) -> None:
        self.rank = rank
        self._clock = clock
        self._stats = TransferStats()
        self._began_s: dict[int, float] = {}
        self.bytes_stored = 0
        self.bytes_loaded = 0
        self._rank_slice = RankSlice(arena, sealer, geometry, rank, verify_loads=verify_loads, staged=staged, log=log)
        self._geometry = geometry
        self._submit = submit
        self._gpu_staging_bytes = gpu_staging_bytes
        self._wait_for = wait_for
        self._sleep = sleep
        self._copies: Copies | None = None
        self._queued: dict[int, TransferJob] = {}
        self._running: dict[int, tuple[TransferJob, Transfer]] = {}

    def register_kv_caches(self, caches: Sequence[Sequence[Any]]) -> None:
        """Register the engine's KV tensors: per group, each ``[num_blocks, ...]``, all in host memory or on one GPU.

        On a GPU this pins the arena, which takes some seconds per hundred GB.

        Raises:
            EngineProtocolError: number, shape or device of the tensors differ from the spec; the message names the
                tensor.
        """
        check_counts(self._geometry, caches)
        if self._copies is not None:
            self.wait(list(self._running))
            self._copies.close()
        if getattr(caches[0][0], "is_cuda", False):
            from tierkv.worker.cuda.copies import cuda_copies  # noqa: PLC0415 - torch, and only where there is a GPU

            self._copies = cuda_copies(self._rank_slice, caches, self._submit, self._gpu_staging_bytes)
        else:
            self._copies = HostCopies(
                self._rank_slice, HostPages(self._geometry, caches), self._submit, self._clock, self._wait_for
            )

    def start_step(self, meta: ConnectorMeta) -> None:
        """Submit queued stores, wait for flushed jobs, then submit this step's loads. Call before the forward pass.

        Raises:
            EngineProtocolError: no KV tensors are registered, or ``meta`` is no instructions of a step.
        """
        try:
            is_idle = not (self._queued or meta.loads or meta.jobs_to_flush)
        except AttributeError as error:
            raise _no_instructions("start_step", meta) from error
        if is_idle:
            return  # stores of this step start with the next one
        urgent = [job for job in meta.stores if job.job_id in meta.jobs_to_flush]
        for job in (*self._queued.values(), *urgent):
            self._start(job)
        self._queued.clear()
        self.wait(meta.jobs_to_flush)
        # A load that is flushed in the step that starts it was given up. Its blocks may belong to another load of this
        # step, which must run last.
        given_up = [job for job in meta.loads if job.job_id in meta.jobs_to_flush]
        for job in given_up:
            self._start(job)
        self.wait(job.job_id for job in given_up)
        for job in meta.loads:
            if job.job_id not in meta.jobs_to_flush:
                self._start(job)

    def start(self, job: TransferJob) -> None:
        """Begin one job at once, for an engine that orders jobs itself.

        Raises:
            EngineProtocolError: no KV tensors are registered, or ``job`` is none.
        """
        if not isinstance(job, TransferJob):
            raise EngineProtocolError(f"start: {job!r:.80} is no job of this stack")
        self._start(job)

    def queue_stores(self, meta: ConnectorMeta) -> None:
        """Queue this step's stores for the next step. Call after the forward pass.

        Raises:
            EngineProtocolError: ``meta`` is no instructions of a step.
        """
        try:
            stores = meta.stores
        except AttributeError as error:
            raise _no_instructions("queue_stores", meta) from error
        for job in stores:
            if job.job_id not in meta.jobs_to_flush:
                self._queued[job.job_id] = job

    def get_finished(self) -> WorkerOutput:
        """Return the jobs that have ended since the last call. Does not wait."""
        if not self._running:
            return _NOTHING
        ended = [job_id for job_id, (_, transfer) in self._running.items() if transfer.done()]
        if not ended:
            return _NOTHING
        finished: dict[int, int] = {}
        failed: dict[int, frozenset[Key]] = {}
        parts: dict[int, dict[int, tuple[bytes, ...]]] = {}
        for job_id in ended:
            job, transfer = self._running.pop(job_id)
            result = transfer.result()
            finished[job_id] = 1
            if result.failed:
                failed[job_id] = result.failed
            if self._geometry.num_workers > 1:
                parts[job_id] = {self.rank: result.checksums}
            self._count(job, result)
        transfers = self._stats.drain()
        return WorkerOutput(finished, failed, parts, transfers.data if transfers else {})

    def _count(self, job: TransferJob, result: CopyResult) -> None:
        copied = self._bytes_copied(job, result.failed)
        began_s = self._began_s.pop(job.job_id)
        # If the copy itself was not timed, the time from its start to now is an upper bound.
        seconds = self._clock() - began_s if result.seconds is None else result.seconds
        self._stats.record(STORE if job.is_store else LOAD, copied, seconds)
        if job.is_store:
            self.bytes_stored += copied
        else:
            self.bytes_loaded += copied

    def _bytes_copied(self, job: TransferJob, failed: Collection[Key]) -> int:
        groups, stores = self._geometry.groups, self._rank_slice.stores
        if not failed and not (job.is_store and self._rank_slice.takes_turns):
            if len(groups) == 1:  # usual
                return groups[0].worker_bytes * len(job.keys)
            return sum([groups[group].worker_bytes for group in job.chunk_groups])
        return sum(
            groups[group].worker_bytes
            for key, ref, group in zip(job.keys, job.slots, job.chunk_groups, strict=True)
            if key not in failed and (not job.is_store or stores(ref.slot, group))
        )

    def wait(self, job_ids: Iterable[int]) -> None:
        """Wait until jobs have ended. Queued ones are submitted first; unknown and ended ids are ignored (S112).

        Raises:
            EngineProtocolError: they are no ids of jobs.
        """
        try:
            waited = list(dict.fromkeys(job_ids))
        except TypeError as error:
            raise wrong_value("wait", "job_ids", job_ids, "give the ids of jobs") from error
        for job_id in waited:
            if job_id in self._queued:
                self._start(self._queued.pop(job_id))
        for job_id in waited:
            running = self._running.get(job_id)
            if running is not None:
                running[1].wait()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Submit queued stores and wait for all jobs, so that no accepted job is lost.

        Args:
            timeout_s: seconds; None: without bound.

        Returns:
            Whether all jobs have ended.

        Raises:
            EngineProtocolError: no KV tensors are registered for a queued job, or ``timeout_s`` is no number of
                seconds; nothing was submitted.
        """
        if timeout_s is None:
            self.wait([*self._queued, *self._running])
            return True
        timeout_s = bounded_seconds("drain", timeout_s)
        for job in self._queued.values():
            self._start(job)
        self._queued.clear()
        deadline_s = self._clock() + timeout_s
        while not self._all_ended():
            if self._clock() >= deadline_s:
                return False
            self._sleep(_POLL_S)
        return True

    def _all_ended(self) -> bool:
        return all(transfer.done() for _, transfer in self._running.values())

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> bool:
        """Drop queued stores, wait for running copies. Idempotent.

        Args:
            timeout_s: seconds. A copy that runs longer is abandoned on its thread, with the memory that it uses.

        Returns:
            Whether all copies have ended.

        Raises:
            EngineProtocolError: ``timeout_s`` is no number of seconds; nothing was dropped.
        """
        timeout_s = bounded_seconds("shutdown", timeout_s)
        self._queued.clear()
        if not self.drain(timeout_s):
            _log.error(
                "worker %d: %d transfers did not end within %g seconds, and are abandoned with their memory",
                self.rank, sum(not transfer.done() for _, transfer in self._running.values()), timeout_s,
            )  # fmt: skip
            return False
        if self._copies is not None:
            self._copies.close()
        return True

    def _start(self, job: TransferJob) -> None:
        if self._copies is None:
            raise EngineProtocolError("register_kv_caches must be called before the first transfer")
        self._began_s[job.job_id] = self._clock()
        self._running[job.job_id] = (job, self._copies.start(job))


def _no_instructions(call: str, given: object) -> EngineProtocolError:
    return EngineProtocolError(f"{call}: {given!r:.80} is no instructions of build_connector_meta")
