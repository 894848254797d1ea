"""Worker's side of the spec: tierkv's worker runs vLLM's transfers and marks their ends for the manager.

- A store always succeeds for vLLM. A chunk that was not copied has no seal in its slot. The manager checks the seal and
  never makes such a chunk readable.
- A load copies from the host tier without another check. A chunk is a HIT only after its frame was verified, or
  created, in the host tier, and it stays pinned (:mod:`tierkv.worker.rank_slice`). A failed copy, which no tier can
  cause, is flagged as failed for the manager, and :mod:`.failed_loads` reports it to vLLM.

A transfer is *given up* when it cannot be started, or when its result is lost in an error. It ends when all copies have
ended, because a copy that still runs would write to blocks of other requests. The manager drops its chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tierkv.errors import EngineProtocolError
from tierkv.integrations.vllm.spec.shape import with_pages
from tierkv.metrics.transfer_stats import LOAD, SIZE, STORE, TIME
from tierkv.stack.remote_worker import ProcessWorker, WorkerSetup, open_worker
from tierkv.types.transfers import NO_REQUEST, StagedTransfer, TransferJob, WorkerOutput

_log = logging.getLogger(__name__)


_NO_KEYS: frozenset[bytes] = frozenset()


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
        self._given_up: dict[int, tuple[int, bool]] = {}  # job -> the number to mark, whether it is a store
        self._ended: list[EndedTransfer] = []

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
        if self._worker is not None:
            output = self._worker.get_finished()
            if output.finished:
                self._note_ends(output)
        while self._without_chunks:
            self._end(self._without_chunks.pop(), frozenset())
        return self.take_ended() if self._ended else []

    def take_ended(self) -> list[EndedTransfer]:
        """Return the ends that were noted since the previous call: after an error, those before it."""
        ended, self._ended = self._ended, []
        return ended

    def give_up(self, job_id: int, number: int, *, is_store: bool) -> None:
        """Give up a transfer that could not be started."""
        self._jobs.pop(job_id, None)
        self._given_up[job_id] = number, is_store

    def give_up_all(self) -> None:
        """Give up all transfers, because their results are lost."""
        self._without_chunks.clear()
        for job_id, (job, number) in list(self._jobs.items()):
            self.give_up(job_id, number, is_store=job.is_store)

    def end_given_up(self) -> list[EndedTransfer]:
        """Wait for all copies, then end the transfers that were given up."""
        if not self._given_up:
            return []
        self.drain()
        given_up, self._given_up = self._given_up, {}
        for number, _ in given_up.values():
            self._mark_ended(number, success=False)
        return [EndedTransfer(job_id, success=is_store) for job_id, (_, is_store) in given_up.items()]

    def drain(self) -> None:
        """Wait until all transfers have ended."""
        if self._worker is not None:
            self._worker.drain()

    def _note_ends(self, output: WorkerOutput) -> None:
        # One entry per job that copied anything, by kind, in the order of the jobs.
        moved = {kind: iter(operations) for kind, operations in output.transfers.items()}
        for job_id in output.finished:
            if job_id not in self._jobs:  # it was given up
                continue
            job, _ = self._jobs[job_id]
            failed, kind = output.failed_keys.get(job_id, _NO_KEYS), STORE if job.is_store else LOAD
            done = next(moved[kind], None) if kind in moved and len(failed) < len(job.keys) else None
            self._end(job_id, failed, done)

    def _end(self, job_id: int, failed: frozenset[bytes], done: Mapping[str, float] | None = None) -> None:
        job, number = self._jobs[job_id]
        success = job.is_store or not failed
        self._mark_ended(number, success=success)
        moved = (None, None) if done is None else (int(done[SIZE]), done[TIME])
        self._ended.append(EndedTransfer(job_id, success, *moved))
        del self._jobs[job_id]

    def _mark_ended(self, number: int, *, success: bool) -> None:
        """Flag a transfer as ended for the manager. If that fails, it counts as failed there, and its slots stay."""
        if self._worker is not None:
            try:
                self._worker.mark_ended(number, success=success)
            except Exception as error:  # noqa: BLE001 - the end itself is reported to vLLM in any case
                _log.error("the end of a transfer could not be flagged: %r", error)

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
