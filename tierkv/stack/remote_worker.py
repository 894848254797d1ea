"""Workers in processes of their own: the setup they need, and how they are opened.

The process that opened the stack makes one :class:`WorkerSetup` per rank (``stack.worker_setup(rank)``) and sends it by
any channel that pickles. The worker's process passes it to :func:`open_worker`. Metadata of each step takes the same
way, and reports return by it. tierkv has no channel of its own, since every engine has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from tierkv.dispatch.threads.copy_pool import CopyPool
from tierkv.errors import EngineProtocolError
from tierkv.frames.sealer import FrameSealer
from tierkv.memory.arena import HostArena
from tierkv.memory.shared import ArenaHandle, MemoryHandle, attach_arena
from tierkv.types.geometry import Geometry
from tierkv.types.transfers import ConnectorMeta, TransferJob, WorkerOutput
from tierkv.worker.completion_flags import RankFlags
from tierkv.worker.worker import SHUTDOWN_S, Worker


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """Everything that a worker's process needs of the stack. Plain data that pickles."""

    rank: int
    """Rank of the worker."""
    geometry: Geometry
    """Sizes of groups and chunks."""
    namespace: bytes
    """Fingerprint of the namespace, sixteen bytes."""
    arena: ArenaHandle
    """Handle of the host tier's memory."""
    copy_threads: int
    """Threads for the worker's copies."""
    gpu_staging_bytes: int
    """Device memory for chunks in flight."""
    verify_frames: bool
    """Whether checksums are compared at all."""
    verify_loads: bool
    """Whether the part of each chunk is verified on its way to the GPU."""
    completion_flags: MemoryHandle | None = None
    """Table in which completed jobs are flagged; only of a staged stack (:mod:`tierkv.worker.rank_slice`)."""


def setup_of_rank(setup: WorkerSetup | None, rank: int) -> WorkerSetup:
    """Return the setup of one rank, from that of rank 0; None: the workers live in the stack's process.

    Raises:
        EngineProtocolError: there is no such rank, or the workers live in the stack's process.
    """
    if setup is None:
        raise EngineProtocolError(
            "the workers of this stack live in its own process; an engine whose workers do not says so with "
            "EngineCapabilities(worker_processes=True)"
        )
    if rank not in range(setup.geometry.num_workers):
        raise EngineProtocolError(f"worker {rank}: this stack has workers 0 to {setup.geometry.num_workers - 1}")
    return replace(setup, rank=rank)


class ProcessWorker:
    """Worker with its own mapping of the arena and its own copy threads. Opened by :func:`open_worker`.

    The calls of a step are those of the held :class:`tierkv.worker.worker.Worker`, bound: they cost no further call.
    All methods belong to the worker's own thread.
    """

    rank: int
    """Rank of the worker."""
    register_kv_caches: Callable[[Sequence[Sequence[Any]]], None]
    """Register the engine's KV tensors."""
    start_step: Callable[[ConnectorMeta], None]
    """Start the loads of a step, and await the transfers that it flushes."""
    start: Callable[[TransferJob], None]
    """Start one transfer, for an engine that schedules itself."""
    queue_stores: Callable[[ConnectorMeta], None]
    """Queue the stores of a step, after its forward pass."""
    get_finished: Callable[[], WorkerOutput]
    """Return the transfers that have ended since the last call."""
    wait: Callable[[Iterable[int]], None]
    """Submit queued stores among these jobs, and wait until all of them have ended."""
    drain: Callable[..., bool]
    """Submit queued stores and wait until all jobs have ended, so that no accepted job is lost; optionally within
    seconds. Returns whether all have ended."""
    shutdown: Callable[..., bool]
    """Drop queued stores and wait, within seconds, until running copies have ended. Idempotent. Returns whether they
    have."""

    def __init__(self, setup: WorkerSetup, arena: HostArena) -> None:
        self._arena = arena
        self._pool = CopyPool(setup.copy_threads, name=f"tierkv-copy-{setup.rank}")
        worker = Worker(
            arena,
            FrameSealer(setup.namespace, verify=setup.verify_frames),
            setup.geometry,
            self._pool.submit,
            rank=setup.rank,
            verify_loads=setup.verify_loads,
            gpu_staging_bytes=setup.gpu_staging_bytes,
            staged=setup.completion_flags is not None,
        )
        self._worker = worker
        self.rank = worker.rank
        self.register_kv_caches = worker.register_kv_caches
        self.start_step = worker.start_step
        self.start = worker.start
        self.queue_stores = worker.queue_stores
        self.get_finished = worker.get_finished
        self.wait = worker.wait
        self.drain = worker.drain
        self.shutdown = worker.shutdown
        flags = setup.completion_flags
        self._flags = None if flags is None else RankFlags(flags, setup.geometry.num_workers, setup.rank)

    @property
    def bytes_stored(self) -> int:
        """Bytes of this worker's parts that were stored."""
        return self._worker.bytes_stored

    @property
    def bytes_loaded(self) -> int:
        """Bytes of this worker's parts that were loaded."""
        return self._worker.bytes_loaded

    def mark_ended(self, number: int, *, success: bool = True) -> None:
        """Flag a job as ended by this worker, for a staged stack; without effect for other stacks."""
        if self._flags is not None:
            self._flags.set_ended(number, success=success)

    def close(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Shut down, then release threads and memory. Call ``drain`` first to lose no store. Idempotent.

        Args:
            timeout_s: seconds. A copy that runs longer is abandoned on its thread, with the memory that it uses.
        """
        has_ended = self.shutdown(timeout_s)
        self._pool.close(timeout_s if has_ended else 0.0)
        self._arena.close()
        if self._flags is not None:
            self._flags.close()

    def __enter__(self) -> Self:
        """Return the open worker."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


def open_worker(setup: WorkerSetup) -> ProcessWorker:
    """Open a worker of a stack in another process. Close it when the engine's worker ends.

    Raises:
        EngineProtocolError: it is no setup; or the arena cannot be reached: the stack was closed, its process has ended
            or belongs to another user or container.
    """
    if not isinstance(setup, WorkerSetup):
        raise EngineProtocolError(f"open_worker: setup = {setup!r:.80}: give what Stack.worker_setup has returned")
    return ProcessWorker(setup, attach_arena(setup.arena))
