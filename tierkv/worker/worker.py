"""A worker: moves chunks between GPU blocks and host slots as the scheduler says, and reports.

Order within a step (spec, section 16): flushed jobs first, because their blocks are about to be overwritten; then the
stores of the step before; then this step's loads. This step's stores wait for the next one, so that they never delay
the forward pass they depend on. A failed transfer is a report, never an exception.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from tierkv.codecs.frame import FrameSealer
from tierkv.errors import CorruptFrameError, EngineProtocolError
from tierkv.tiers.arena import HostArena
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key
from tierkv.types.transfers import ConnectorMeta, TransferJob, WorkerOutput, chunk_blocks
from tierkv.worker.pages import HostPages

_log = logging.getLogger(__name__)

Submit = Callable[[Callable[[], frozenset[Key]]], "Future[frozenset[Key]]"]
"""Runs a transfer somewhere else and gives a future of the keys that failed."""


class Worker:
    """Copies for one rank. All methods belong to the worker's own thread; copies run where ``submit`` puts them.

    Args:
        arena: memory of the host tier.
        sealer: writes and checks frames.
        geometry: sizes of groups and chunks.
        submit: runs transfers; loads and stores may run in any order, fences are the scheduler's work.
        verify_loads: check a chunk's checksum once more on its way to the GPU.
        wait_for: waits until futures of ``submit`` are done.

    Attributes:
        bytes_stored, bytes_loaded: payload of chunks that were copied and sealed, or checked and copied, so far.
    """

    def __init__(  # noqa: PLR0913 - each is a collaborator of its own, the last one a door for simulations
        self,
        arena: HostArena,
        sealer: FrameSealer,
        geometry: Geometry,
        submit: Submit,
        *,
        verify_loads: bool = True,
        wait_for: Callable[[Collection[Future[Any]]], object] = wait,
    ) -> None:
        self._arena = arena
        self._sealer = sealer
        self._geometry = geometry
        self._submit = submit
        self._verify_loads = verify_loads
        self._wait_for = wait_for
        self.bytes_stored = 0
        self.bytes_loaded = 0
        self._pages: HostPages | None = None
        self._queued: dict[int, TransferJob] = {}
        self._running: dict[int, tuple[TransferJob, Future[frozenset[Key]]]] = {}

    def register_kv_caches(self, caches: Sequence[Sequence[Any]]) -> None:
        """The engine's KV tensors, per group, each ``[num_blocks, ...]``; see :class:`HostPages` for rules."""
        self._pages = HostPages(self._geometry, caches)

    def start_step(self, meta: ConnectorMeta) -> None:
        """Before the forward pass: flush what must be flushed, then submit queued stores and this step's loads."""
        urgent = [job for job in meta.stores if job.job_id in meta.jobs_to_flush]
        for job in (*self._queued.values(), *urgent):
            self._start(job)
        self._queued.clear()
        self.wait(meta.jobs_to_flush)
        for job in meta.loads:
            self._start(job)
        # A load that is to be flushed in the very step that starts it: nobody will come back for it.
        self.wait(job.job_id for job in meta.loads if job.job_id in meta.jobs_to_flush)

    def queue_stores(self, meta: ConnectorMeta) -> None:
        """After the forward pass: this step's stores will be submitted at the start of the next one."""
        for job in meta.stores:
            if job.job_id not in meta.jobs_to_flush:
                self._queued[job.job_id] = job

    def get_finished(self) -> WorkerOutput:
        """What has ended since the last call. Does not wait."""
        finished: dict[int, int] = {}
        failed: dict[int, frozenset[Key]] = {}
        for job_id in [job_id for job_id, (_, future) in self._running.items() if future.done()]:
            job, future = self._running.pop(job_id)
            finished[job_id] = 1
            bad = _failed_keys(job, future)
            if bad:
                failed[job_id] = bad
            self._count(job, bad)
        return WorkerOutput(finished, failed)

    def _count(self, job: TransferJob, failed: frozenset[Key]) -> None:
        groups = self._geometry.groups
        copied = sum(
            groups[g].payload_bytes for key, g in zip(job.keys, job.chunk_groups, strict=True) if key not in failed
        )
        if job.is_store:
            self.bytes_stored += copied
        else:
            self.bytes_loaded += copied

    def wait(self, job_ids: Iterable[int]) -> None:
        """Until these jobs have ended; unknown and ended ids are fine (S112). Queued ones are submitted first."""
        futures = []
        for job_id in job_ids:
            if job_id in self._queued:
                self._start(self._queued.pop(job_id))
            running = self._running.get(job_id)
            if running is not None:
                futures.append(running[1])
        self._wait_for(futures)

    def drain(self) -> None:
        """Submit queued stores and wait for everything: nothing that was accepted is lost. For an orderly end."""
        self.wait([*self._queued, *self._running])

    def shutdown(self) -> None:
        """Drop queued stores, wait for running copies. Idempotent."""
        self._queued.clear()
        self.wait(list(self._running))

    def _start(self, job: TransferJob) -> None:
        if self._pages is None:
            raise EngineProtocolError("register_kv_caches must be called before the first transfer")
        self._running[job.job_id] = (job, self._submit(lambda: self._transfer(job)))

    # -- on the copy thread ------------------------------------------------------------------------------------------

    def _transfer(self, job: TransferJob) -> frozenset[Key]:
        """Copy chunk by chunk; returns the keys that failed."""
        failed: set[Key] = set()
        parts = chunk_blocks(job, self._geometry.blocks_per_chunk)
        for key, ref, group, (skip, block_ids) in zip(job.keys, job.slots, job.chunk_groups, parts, strict=True):
            try:
                if job.is_store:
                    self._store(key, ref.slot, group, skip, block_ids)
                else:
                    self._load(key, ref.slot, group, skip, block_ids)
            except CorruptFrameError as error:
                _log.warning("chunk %s is refused on its way to the GPU: %s", key.hex(), error)
                failed.add(key)
            except Exception:  # noqa: BLE001 - see below
                # Whatever else a copy can raise concerns this chunk alone: the engine recomputes it (promise 3).
                _log.exception("chunk %s could not be copied", key.hex())
                failed.add(key)
        return frozenset(failed)

    def _store(self, key: Key, slot: int, group: int, skip: int, block_ids: Sequence[int]) -> None:
        raw_bytes = self._geometry.groups[group].payload_bytes
        pages = self._registered()
        pages.check_ids(group, block_ids)
        pages.gather(group, skip, block_ids, self._arena.payload(slot)[:raw_bytes])
        self._sealer.seal(self._arena.slot(slot), key, raw_bytes)

    def _load(self, key: Key, slot: int, group: int, skip: int, block_ids: Sequence[int]) -> None:
        raw_bytes = self._geometry.groups[group].payload_bytes
        header = self._sealer.check(self._arena.slot(slot), key, payload=self._verify_loads)
        if header.raw_bytes != raw_bytes:
            raise CorruptFrameError(f"chunk of {header.raw_bytes} bytes, this group's chunks have {raw_bytes}", key=key)
        pages = self._registered()
        pages.check_ids(group, block_ids)
        pages.scatter(group, skip, block_ids, self._arena.payload(slot)[:raw_bytes])

    def _registered(self) -> HostPages:
        if self._pages is None:
            raise EngineProtocolError("register_kv_caches must be called before the first transfer")
        return self._pages


def _failed_keys(job: TransferJob, future: Future[frozenset[Key]]) -> frozenset[Key]:
    """What a finished copy says; a copy that could not run at all failed for every key."""
    if future.cancelled() or future.exception() is not None:
        return frozenset(job.keys)
    return future.result()
