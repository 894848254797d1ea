"""A worker's side of the spec seam: vLLM's transfers done by our worker, and their ends marked for our manager.

vLLM cannot hear of a transfer that failed: its own assertion would end the engine. So

- a store always "succeeds". What could not be copied has no seal in its slot, and the manager, which looks there, never
  lets it be read;
- a load is copied as it lies in the host tier, without another look: a chunk is a HIT only after its frame was checked
  when it arrived there, or was made there, and it stays pinned (:mod:`tierkv.worker.rank_slice`). What could not be
  copied at all, which no tier can cause, is told to vLLM as a failure: rather no answer than a wrong one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tierkv.errors import EngineProtocolError
from tierkv.integrations.vllm.spec.shape import with_pages
from tierkv.metrics.transfer_stats import LOAD, SIZE, STORE, TIME
from tierkv.stack.remote_worker import ProcessWorker, WorkerSetup, open_worker
from tierkv.stack.staged import StagedTransfer
from tierkv.types.transfers import NO_REQUEST, TransferJob, WorkerOutput

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    """One transfer that has ended. bytes_moved, seconds: None where nothing was moved."""

    job_id: int
    success: bool
    bytes_moved: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class DeviceBlocks:
    """The blocks of a transfer on the engine's device; fields as in :class:`~tierkv.types.transfers.TransferJob`."""

    block_ids: Sequence[int]
    group_sizes: Sequence[int]
    block_indices: Sequence[int]


class SpecWorker:
    """Needs no vLLM itself. All methods belong to the worker's thread.

    Args:
        pages: per group, the engine's tensors as ``[num_blocks, page_bytes]`` bytes.
        rank: of this worker, among those that share the stack.
    """

    def __init__(self, pages: Sequence[Sequence[Any]], rank: int) -> None:
        self._pages = pages
        self._rank = rank
        self._worker: ProcessWorker | None = None
        self._jobs: dict[int, tuple[TransferJob, int]] = {}  # with the number to mark
        self._empty: list[int] = []

    def submit(
        self, job_id: int, transfer: StagedTransfer, blocks: DeviceBlocks, setup: WorkerSetup, *, is_store: bool
    ) -> None:
        """Begin a transfer; does not wait.

        Raises:
            EngineProtocolError: the stack cannot be reached, or a load does not say which blocks are whose.
        """
        worker = self._worker or self._begin(setup)
        job = TransferJob(
            job_id=job_id,
            request_id=NO_REQUEST,
            is_store=is_store,
            keys=transfer.keys,
            slots=transfer.slots,
            chunk_groups=transfer.groups,
            block_ids=tuple(blocks.block_ids),
            group_sizes=tuple(blocks.group_sizes),
            block_indices=tuple(blocks.block_indices),
        )
        job = _without_unclear(job, setup.geometry.blocks_per_chunk)
        self._jobs[job_id] = job, transfer.number
        if job.keys:
            worker.start(job)
        else:
            self._empty.append(job_id)

    def _begin(self, setup: WorkerSetup) -> ProcessWorker:
        geometry = with_pages(setup.geometry, self._pages)
        worker = open_worker(replace(setup, rank=self._rank, geometry=geometry))
        try:
            worker.register_kv_caches(self._pages)
        except BaseException:
            worker.close()
            raise
        self._worker = worker
        return worker

    def get_finished(self) -> list[Ended]:
        """What has ended since the last call. Does not wait."""
        if self._worker is None:
            return []
        output = self._worker.get_finished()
        empty, self._empty = self._empty, []
        return [*self._ends(output), *(self._end(job_id, frozenset()) for job_id in empty)]

    def _ends(self, output: WorkerOutput) -> Iterator[Ended]:
        # One entry of its kind for each job that moved anything, in the order of the jobs.
        moved = {kind: iter(output.transfers.get(kind, ())) for kind in (LOAD, STORE)}
        for job_id in output.finished:
            job, _ = self._jobs[job_id]
            failed = output.failed_keys.get(job_id, frozenset())
            ended = self._end(job_id, failed)
            done = next(moved[STORE if job.is_store else LOAD], None) if len(failed) < len(job.keys) else None
            yield ended if done is None else replace(ended, bytes_moved=int(done[SIZE]), seconds=done[TIME])

    def _end(self, job_id: int, failed: frozenset[bytes]) -> Ended:
        job, number = self._jobs.pop(job_id)
        if self._worker is not None:
            self._worker.mark_ended(number)
        if failed and not job.is_store:
            _log.error("%d chunks could not be loaded, and vLLM cannot be told but by its own end", len(failed))
        return Ended(job_id, job.is_store or not failed)

    def wait(self, job_ids: Iterable[int]) -> None:
        """Until these transfers have ended; unknown ones are fine."""
        if self._worker is not None:
            self._worker.wait(job_ids)

    def shutdown(self) -> None:
        """Wait for running copies, mark their ends, and let go. Idempotent."""
        worker = self._worker
        if worker is None:
            return
        try:
            worker.drain()
            self.get_finished()
        finally:
            self._worker = None
            worker.close()


def _without_unclear(job: TransferJob, blocks_per_chunk: int) -> TransferJob:
    """A store without the groups of which it is not clear which block belongs to which chunk.

    vLLM leaves out blocks that a window has left behind. As long as these are the first ones, the first index says so;
    a gap further on can be seen from the number of blocks, and from nothing else. Such chunks are not stored.

    Raises:
        EngineProtocolError: a load, which must not leave anything out, does not fit its chunks.
    """
    unclear = set()
    for group, (size, index) in enumerate(zip(job.group_sizes, job.block_indices, strict=True)):
        room = job.chunk_groups.count(group) * blocks_per_chunk - (index % blocks_per_chunk if size else 0)
        if size != room and (job.is_store or not room - blocks_per_chunk < size <= room):
            unclear.add(group)
    if not unclear:
        return job
    if not job.is_store:
        raise EngineProtocolError(f"load {job.job_id}: blocks {job.group_sizes} do not fit its chunks")
    _log.warning("chunks of groups %s are not stored: vLLM left blocks out in their middle", sorted(unclear))
    chosen = [number for number, group in enumerate(job.chunk_groups) if group not in unclear]
    ids: list[int] = []
    offset = 0
    for group, size in enumerate(job.group_sizes):
        ids += job.block_ids[offset : offset + size] if group not in unclear else ()
        offset += size
    return replace(
        job,
        keys=tuple(job.keys[number] for number in chosen),
        slots=tuple(job.slots[number] for number in chosen),
        chunk_groups=tuple(job.chunk_groups[number] for number in chosen),
        block_ids=tuple(ids),
        group_sizes=tuple(0 if group in unclear else size for group, size in enumerate(job.group_sizes)),
    )
