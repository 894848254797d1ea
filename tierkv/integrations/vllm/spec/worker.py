"""Worker's side of the spec: tierkv's worker runs vLLM's transfers and marks their ends for the manager.

vLLM cannot handle a failed transfer: an assertion would end the engine. So:

- A store always succeeds for vLLM. A chunk that was not copied has no seal in its slot. The manager checks the seal and
  never makes such a chunk readable.
- A load copies from the host tier without another check. A chunk is a HIT only after its frame was verified, or
  created, in the host tier, and it stays pinned (:mod:`tierkv.worker.rank_slice`). A failed copy, which no tier can
  cause, is reported to vLLM as a failure, because no answer is better than a wrong one.
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
from tierkv.types.transfers import NO_REQUEST, StagedTransfer, TransferJob, WorkerOutput

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EndedTransfer:
    """Report of one transfer to vLLM, under the name of its job."""

    job_id: int
    """Number of the job."""
    success: bool
    """Result for vLLM."""
    bytes_moved: int | None = None
    """Copied bytes; None if nothing was copied."""
    seconds: float | None = None
    """Duration of the copy; None if nothing was copied."""


@dataclass(frozen=True, slots=True)
class DeviceBlocks:
    """Blocks of a transfer on the engine's device, with fields as in :class:`~tierkv.types.transfers.TransferJob`."""

    block_ids: Sequence[int]
    group_sizes: Sequence[int]
    block_indices: Sequence[int]


class SpecWorker:
    """Transfers of one worker. Does not import vLLM. All methods belong to the worker's thread.

    Args:
        pages: per group, the engine's tensors as ``[num_blocks, page_bytes]`` bytes.
        rank: rank of this worker among those that share the stack.
    """

    def __init__(self, pages: Sequence[Sequence[Any]], rank: int) -> None:
        self._pages = pages
        self._rank = rank
        self._worker: ProcessWorker | None = None
        self._jobs: dict[int, tuple[TransferJob, int]] = {}  # job and the number to mark at its end
        self._without_chunks: list[int] = []
        self._given_up: list[EndedTransfer] = []

    def submit(
        self, job_id: int, transfer: StagedTransfer, blocks: DeviceBlocks, setup: WorkerSetup, *, is_store: bool
    ) -> None:
        """Start a transfer without waiting.

        Raises:
            EngineProtocolError: the stack cannot be reached, or the blocks of a load do not fit its chunks.
        """
        worker = self._worker or self._open_worker(setup)
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
        job = _without_ambiguous(job, setup.geometry.blocks_per_chunk)
        self._jobs[job_id] = job, transfer.number
        if job.keys:
            worker.start(job)
        else:
            self._without_chunks.append(job_id)

    def _open_worker(self, setup: WorkerSetup) -> ProcessWorker:
        geometry = with_pages(setup.geometry, self._pages)
        worker = open_worker(replace(setup, rank=self._rank, geometry=geometry))
        try:
            worker.register_kv_caches(self._pages)
        except BaseException:
            worker.close()
            raise
        self._worker = worker
        return worker

    def get_finished(self) -> list[EndedTransfer]:
        """Return the transfers that ended since the previous call. Does not wait."""
        given_up, self._given_up = self._given_up, []
        if self._worker is None:
            return given_up
        output = self._worker.get_finished()
        if not (output.finished or self._without_chunks):
            return given_up
        empty, self._without_chunks = self._without_chunks, []
        return [*given_up, *self._ends(output), *(self._end(job_id, frozenset()) for job_id in empty)]

    @property
    def has_loads(self) -> bool:
        """Whether a load is in flight."""
        return any(not job.is_store for job, _ in self._jobs.values())

    def give_up_store(self, job_id: int, number: int) -> None:
        """End a store that could not be started. Its chunks lack a seal, so the manager drops them."""
        if self._worker is not None:
            self._worker.drain()
            self._worker.mark_ended(number)
        self._jobs.pop(job_id, None)
        self._given_up.append(EndedTransfer(job_id, success=True))

    def give_up_stores(self) -> list[EndedTransfer]:
        """End all stores, whose results are lost. Chunks that were not copied lack a seal."""
        for job_id, (_, number) in list(self._jobs.items()):
            self.give_up_store(job_id, number)
        given_up, self._given_up = self._given_up, []
        return given_up

    def drain(self) -> None:
        """Wait until all transfers have ended."""
        if self._worker is not None:
            self._worker.drain()

    def _ends(self, output: WorkerOutput) -> Iterator[EndedTransfer]:
        # One entry per job that copied anything, by kind, in the order of the jobs.
        moved = {kind: iter(output.transfers.get(kind, ())) for kind in (LOAD, STORE)}
        for job_id in output.finished:
            if job_id not in self._jobs:  # it was given up
                continue
            job, _ = self._jobs[job_id]
            failed = output.failed_keys.get(job_id, frozenset())
            ended = self._end(job_id, failed)
            done = next(moved[STORE if job.is_store else LOAD], None) if len(failed) < len(job.keys) else None
            yield ended if done is None else replace(ended, bytes_moved=int(done[SIZE]), seconds=done[TIME])

    def _end(self, job_id: int, failed: frozenset[bytes]) -> EndedTransfer:
        job, number = self._jobs.pop(job_id)
        if self._worker is not None:
            self._worker.mark_ended(number)
        if failed and not job.is_store:
            _log.error("%d chunks could not be loaded, which ends vLLM's engine", len(failed))
        return EndedTransfer(job_id, job.is_store or not failed)

    def wait(self, job_ids: Iterable[int]) -> None:
        """Wait until the transfers have ended. Unknown ids are ignored."""
        if self._worker is not None:
            self._worker.wait(job_ids)

    def shutdown(self) -> None:
        """Wait for copies in flight, mark their ends, and close. Idempotent."""
        worker = self._worker
        if worker is None:
            return
        try:
            worker.drain()
            self.get_finished()
        finally:
            self._worker = None
            worker.close()


def _without_ambiguous(job: TransferJob, blocks_per_chunk: int) -> TransferJob:
    """Return a store without the groups whose assignment of blocks to chunks is ambiguous.

    vLLM omits blocks outside a window. Where these are the first ones, the first index shows it. A later gap is only
    visible in the number of blocks. Such chunks are not stored.

    Raises:
        EngineProtocolError: the blocks of a load, which must be complete, do not fit its chunks.
    """
    ambiguous = set()
    for group, (size, index) in enumerate(zip(job.group_sizes, job.block_indices, strict=True)):
        room = job.chunk_groups.count(group) * blocks_per_chunk - (index % blocks_per_chunk if size else 0)
        if size != room and (job.is_store or not room - blocks_per_chunk < size <= room):
            ambiguous.add(group)
    if not ambiguous:
        return job
    if not job.is_store:
        raise EngineProtocolError(f"load {job.job_id}: blocks {job.group_sizes} do not fit its chunks")
    _log.warning("chunks of groups %s are not stored: vLLM omitted blocks in their middle", sorted(ambiguous))
    chosen = [number for number, group in enumerate(job.chunk_groups) if group not in ambiguous]
    ids: list[int] = []
    offset = 0
    for group, size in enumerate(job.group_sizes):
        ids += job.block_ids[offset : offset + size] if group not in ambiguous else ()
        offset += size
    return replace(
        job,
        keys=tuple(job.keys[number] for number in chosen),
        slots=tuple(job.slots[number] for number in chosen),
        chunk_groups=tuple(job.chunk_groups[number] for number in chosen),
        block_ids=tuple(ids),
        group_sizes=tuple(0 if group in ambiguous else size for group, size in enumerate(job.group_sizes)),
    )
