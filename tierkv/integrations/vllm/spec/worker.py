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
from tierkv.types.engine import GroupKind
from tierkv.types.geometry import Geometry
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
        job = _of_whole_chunks(job, setup.geometry)
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


def _of_whole_chunks(job: TransferJob, geometry: Geometry) -> TransferJob:
    """Return a store without chunks of which vLLM omitted blocks, because they are outside a window.

    Where these are the first blocks of the transfer, the first index shows it. The chunk that they begin is not stored:
    another prompt with this chunk may need all of its blocks. Only of states, the last block of a chunk is all of it.
    A later gap is only visible in the number of blocks. Then nothing of the group is stored.

    Raises:
        EngineProtocolError: the blocks of a load, which must be complete, do not fit its chunks.
    """
    length = geometry.blocks_per_chunk
    left_out: dict[int, tuple[int, int]] = {}  # group -> chunks and blocks at its front that are not stored
    for group, (size, index) in enumerate(zip(job.group_sizes, job.block_indices, strict=True)):
        count, missing = job.chunk_groups.count(group), index % length if size else 0
        room = count * length - missing
        if not job.is_store:
            if not room - length < size <= room:
                raise EngineProtocolError(f"load {job.job_id}: blocks {job.group_sizes} do not fit its chunks")
        elif size != room:
            left_out[group] = count, size
            _log.warning("chunks of group %s are not stored: vLLM omitted blocks in their middle", group)
        elif missing and geometry.groups[group].kind is not GroupKind.SSM:
            left_out[group] = 1, length - missing
    return _without_fronts(job, left_out) if left_out else job


def _without_fronts(job: TransferJob, left_out: Mapping[int, tuple[int, int]]) -> TransferJob:
    """Return a store without the first chunks of some groups, and without their blocks.

    left_out: per group, number of chunks, and of blocks.
    """
    chosen: list[int] = []
    ids: list[int] = []
    sizes, indices = list(job.group_sizes), list(job.block_indices)
    chunk = offset = 0
    for group, size in enumerate(job.group_sizes):
        count = job.chunk_groups.count(group)
        chunks, blocks = left_out.get(group, (0, 0))
        chosen += range(chunk + chunks, chunk + count)
        ids += job.block_ids[offset + blocks : offset + size]
        sizes[group], indices[group] = size - blocks, indices[group] + blocks
        chunk, offset = chunk + count, offset + size
    return replace(
        job,
        keys=tuple(job.keys[number] for number in chosen),
        slots=tuple(job.slots[number] for number in chosen),
        chunk_groups=tuple(job.chunk_groups[number] for number in chosen),
        block_ids=tuple(ids),
        group_sizes=tuple(sizes),
        block_indices=tuple(indices),
    )
