"""Copies of a worker's job on the GPU: directly between blocks and slots, or staged.

A store waits on its stream for the work that the engine had enqueued, so the step that computed the blocks is over.
Then the copy engine takes pages from their blocks to the slots. When the event behind the copies has passed, a copy
thread computes the checksums. A load verifies checksums first, on a copy thread.

*Directly*: runs of pages that are long enough are copied between blocks and slots, all in one call. *Staged*: shorter
ones are gathered into staging memory on the device, and each chunk is copied from there to its slot; a load copies each
chunk to staging memory, and scatters it. So are all, where the driver has no call for many copies, or the arena is not
pinned.

Enqueuing runs on copy threads too: at ten microseconds per call it would delay the engine's thread. Each direction has
two copy streams with a staging buffer each. They take turns: while the copy engine empties one, the other is filled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle
from typing import Any

import numpy as np
import torch

from tierkv.errors import TierKVError
from tierkv.types.geometry import Geometry, cdiv
from tierkv.types.keys import Key
from tierkv.types.transfers import VOID_SLOT, TransferJob, chunk_blocks
from tierkv.worker.cuda.batch_copy import Numbers
from tierkv.worker.cuda.pages import ChunkBlocks, DevicePages
from tierkv.worker.cuda.runtime import Device, Event, Stream, cuda_device
from tierkv.worker.cuda.transfer import CudaTransfer, Enqueued
from tierkv.worker.rank_slice import RankSlice
from tierkv.worker.transfers import CopyResult, Submit, log_failure

DIRECT_BYTES = 64 << 10
"""Mean length of runs from which on they are copied directly: the link is 97 % busy with copies of this length."""

PIECE_BYTES = 16 << 20
"""Bytes of a piece at most, if a chunk is not longer: a few milliseconds of checksums."""

PIECES_MAX = 16
"""Pieces of a job. Those of a longer job are longer: the engine's thread queues each, and the queue is bounded."""

_STREAMS = 4


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk of a job."""

    key: Key
    slot: int
    group: int
    blocks: ChunkBlocks


class _Work:
    """A job, and what its pieces share. ``before``: point behind the work that the engine had enqueued."""

    def __init__(self, job: TransferJob, before: Event, pages: DevicePages, geometry: Geometry) -> None:
        self.job = job
        self.before = before
        self._pages = pages
        self._blocks_per_chunk = geometry.blocks_per_chunk

    @cached_property
    def blocks(self) -> list[tuple[int, tuple[int, ...]]]:
        """Blocks of each chunk. Computed on a copy thread; twice, if two of them ask first."""
        return chunk_blocks(self.job, self._blocks_per_chunk)

    @cached_property
    def has_all_blocks(self) -> bool:
        """Whether all its blocks exist."""
        return self._pages.has_blocks(self.job)


class _CopyStream:
    """Stream with device memory that is used on it alone.

    ``bounce`` is a pinned buffer for an arena that is not pinned. Batches that use it are waited for.
    """

    def __init__(self, device: Device, staging_bytes: int, *, through_bounce: bool) -> None:
        self.stream: Stream = device.stream()
        self.staging = device.memory(staging_bytes)
        self.bounce = device.pinned(staging_bytes) if through_bounce else None
        self.lock = threading.Lock()  # held while a batch is enqueued: batches of two threads must not mix


class CudaCopies:
    """Transfers of one worker whose KV tensors are on a GPU.

    Args:
        rank_slice: this worker's parts of the arena.
        pages: its KV tensors.
        submit: runs functions on copy threads.
        device: the GPU's runtime.
        staging_bytes: device memory for all copy streams. Each gets a quarter, and at least the length of one part.
        direct_bytes: mean length of runs of pages from which on they are copied directly.
        piece_bytes: bytes of a piece at most.
    """

    def __init__(  # noqa: PLR0913 - collaborators, and sizes that tests make small
        self,
        rank_slice: RankSlice,
        pages: DevicePages,
        submit: Submit,
        device: Device,
        staging_bytes: int,
        *,
        direct_bytes: int = DIRECT_BYTES,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._rank_slice = rank_slice
        self._pages = pages
        self._submit = submit
        self._device = device
        groups = rank_slice.geometry.groups
        part_bytes_max = max(group.worker_bytes for group in groups)
        self._staging_bytes = max(staging_bytes // _STREAMS, part_bytes_max)
        self._piece_chunks = max(1, piece_bytes // part_bytes_max)
        self._is_pinned = rank_slice.arena.pin(device.register)
        self._direct_bytes = direct_bytes
        self._may_be_direct = [
            self._is_pinned
            and device.has_batches
            and group.worker_parts == 1
            and max(group.page_bytes) * rank_slice.geometry.blocks_per_chunk >= direct_bytes
            for group in groups
        ]
        copy_streams = [
            _CopyStream(device, self._staging_bytes, through_bounce=not self._is_pinned) for _ in range(_STREAMS)
        ]
        self._store_streams, self._load_streams = cycle(copy_streams[:2]), cycle(copy_streams[2:])

    def start(self, job: TransferJob) -> CudaTransfer:
        """Begin a job after the work that the engine has enqueued so far. Does not wait."""
        work = _Work(job, self._device.now(), self._pages, self._rank_slice.geometry)
        count = len(job.keys)
        step = max(self._piece_chunks, cdiv(count, PIECES_MAX))
        numbers = [range(first, min(first + step, count)) for first in range(0, count, step)]
        pieces = [(piece, self._submit(partial(self._enqueue, work, piece))) for piece in numbers]
        return CudaTransfer(job, pieces, lambda piece, failed: self._finish(job, piece, failed))

    def close(self) -> None:
        """Unpin the arena. No transfer may be under way. Idempotent."""
        if self._is_pinned:
            self._is_pinned = False
            self._rank_slice.arena.unpin(self._device.unregister)

    def _finish(self, job: TransferJob, piece: range, failed: frozenset[Key]) -> Future[CopyResult]:
        """Complete a piece whose copies have ended: seal the slots of a store."""
        if job.is_store:
            return self._submit(lambda: self._seal_stores(job, piece, failed))
        future: Future[CopyResult] = Future()
        future.set_result(CopyResult(failed))
        return future

    # -- on a copy thread --------------------------------------------------------------------------------------------

    def _enqueue(self, work: _Work, piece: range) -> Enqueued:
        """Enqueue copies in batches. Chunks of a batch that cannot be enqueued fail; its event is awaited anyway."""
        enqueued, is_store = Enqueued(), work.job.is_store
        chunks = self._valid_chunks(work, piece, enqueued.failed)
        if not is_store:
            chunks = self._intact_chunks(chunks, enqueued.failed)
        streams = self._store_streams if is_store else self._load_streams
        for batch in self._batches(chunks):
            copy_stream = next(streams)
            with copy_stream.lock, copy_stream.stream.use():
                try:
                    copy_stream.stream.wait_event(work.before)
                    enqueued.began = enqueued.began or copy_stream.stream.record_event()
                    self._copy(batch, copy_stream, enqueued, is_store=is_store)
                except Exception as error:  # noqa: BLE001 - out of memory, or an error of the GPU: the batch fails
                    for chunk in batch:
                        log_failure(self._rank_slice.log, chunk.key, error)
                        enqueued.failed.add(chunk.key)
                enqueued.events.append(copy_stream.stream.record_event())
        return enqueued

    def _valid_chunks(self, work: _Work, piece: range, failed: set[Key]) -> list[_Chunk]:
        """Return the chunks with a slot and with existing blocks. An invalid id would break the GPU's context."""
        job, valid = work.job, []
        takes_turns = job.is_store and self._rank_slice.takes_turns
        for i in piece:
            key, ref, group, blocks = job.keys[i], job.slots[i], job.chunk_groups[i], work.blocks[i]
            if ref == VOID_SLOT:
                failed.add(key)
                continue
            if takes_turns and not self._rank_slice.stores(ref.slot, group):
                continue
            try:
                if not work.has_all_blocks:
                    self._pages.check_ids(group, blocks[1])
            except TierKVError as error:
                log_failure(self._rank_slice.log, key, error)
                failed.add(key)
            else:
                valid.append(_Chunk(key, ref.slot, group, blocks))
        return valid

    def _intact_chunks(self, chunks: Sequence[_Chunk], failed: set[Key]) -> list[_Chunk]:
        """Return the chunks that are in their slots, undamaged."""
        intact = []
        for chunk in chunks:
            try:
                self._rank_slice.check_load(chunk.key, chunk.slot, chunk.group)
            except TierKVError as error:
                log_failure(self._rank_slice.log, chunk.key, error)
                failed.add(chunk.key)
            else:
                intact.append(chunk)
        return intact

    def _batches(self, chunks: Sequence[_Chunk]) -> Iterator[list[_Chunk]]:
        """Yield runs of chunks of one group that fit the staging buffer."""
        batch: list[_Chunk] = []
        for chunk in chunks:
            room = self._staging_bytes // self._rank_slice.geometry.groups[chunk.group].worker_bytes
            if batch and (batch[0].group != chunk.group or len(batch) == room):
                yield batch
                batch = []
            batch.append(chunk)
        if batch:
            yield batch

    def _copy(self, batch: Sequence[_Chunk], copy_stream: _CopyStream, enqueued: Enqueued, *, is_store: bool) -> None:
        group, slots = batch[0].group, [chunk.slot for chunk in batch]
        blocks = [chunk.blocks for chunk in batch]
        enqueued.held.append(self._rank_slice.part(slots[0], group))
        parts = self._rank_slice.part_addresses(slots, group)
        if self._may_be_direct[group]:
            runs = self._pages.runs(group, blocks, parts)
            if runs.sizes.sum() >= self._direct_bytes * len(runs.sizes):
                if is_store:
                    self._clear_missing(batch)
                self._copy_batch(runs.parts, runs.pages, runs.sizes, is_store=is_store)
                return
        ids = self._device.upload([block_id for _, block_ids in blocks for block_id in block_ids])
        staged = copy_stream.staging[: len(batch) * self._rank_slice.geometry.groups[group].worker_bytes]
        if is_store:
            self._pages.gather(group, blocks, ids, staged)
            self._copy_staged(slots, group, parts, copy_stream, staged, is_store=True)
        else:
            self._copy_staged(slots, group, parts, copy_stream, staged, is_store=False)
            self._pages.scatter(group, blocks, ids, staged)
            if copy_stream.bounce is not None:
                copy_stream.stream.synchronize()

    def _clear_missing(self, batch: Sequence[_Chunk]) -> None:
        """Fill the parts of chunks that lack blocks with zeros. The slots belong to this job alone."""
        for chunk in batch:
            if len(chunk.blocks[1]) < self._rank_slice.geometry.blocks_per_chunk:
                self._rank_slice.part(chunk.slot, chunk.group)[:] = 0

    def _copy_batch(self, parts: Numbers, others: Numbers, sizes: Numbers, *, is_store: bool) -> None:
        self._device.copy_batch(parts if is_store else others, others if is_store else parts, sizes)

    def _copy_staged(  # noqa: PLR0913 - both ends of the copies
        self,
        slots: Sequence[int],
        group: int,
        parts: Numbers,
        copy_stream: _CopyStream,
        staged: torch.Tensor,
        *,
        is_store: bool,
    ) -> None:
        """Copy chunks between staging memory and their slots."""
        if self._is_pinned and self._device.has_batches:
            sizes = np.full(len(slots), len(staged) // len(slots), np.uint64)
            rows = np.uint64(staged.data_ptr()) + np.arange(len(slots), dtype=np.uint64) * sizes
            self._copy_batch(parts, rows, sizes, is_store=is_store)
            return
        rows_of = staged.view(len(slots), -1)
        host = [torch.from_numpy(self._rank_slice.part(slot, group)) for slot in slots]
        bounce = copy_stream.bounce
        if is_store:
            if bounce is not None:
                rows_of = bounce[: len(staged)].copy_(staged, non_blocking=True).view_as(rows_of)
                copy_stream.stream.synchronize()
            for part, row in zip(host, rows_of, strict=True):
                part.copy_(row, non_blocking=True)
        else:
            target = rows_of if bounce is None else bounce[: len(staged)].view_as(rows_of)
            for part, row in zip(host, target, strict=True):
                row.copy_(part, non_blocking=True)
            if bounce is not None:
                rows_of.copy_(target, non_blocking=True)

    def _seal_stores(self, job: TransferJob, piece: range, failed: frozenset[Key]) -> CopyResult:
        """Seal the slots, or compute the checksums of this worker's parts."""
        bad = set(failed)
        checksums = []
        for i in piece:
            key, slot, group, digest = job.keys[i], job.slots[i].slot, job.chunk_groups[i], b""
            if key not in failed and self._rank_slice.stores(slot, group):
                try:
                    digest = self._rank_slice.finish_store(key, slot, group)
                except Exception as error:  # noqa: BLE001 - concerns this chunk alone (promise 3)
                    log_failure(self._rank_slice.log, key, error)
                    bad.add(key)
            checksums.append(digest)
        return CopyResult(frozenset(bad), tuple(checksums))


def cuda_copies(
    rank_slice: RankSlice, caches: Sequence[Sequence[Any]], submit: Submit, staging_bytes: int
) -> CudaCopies:
    """Open :class:`CudaCopies` for KV tensors on a CUDA device.

    Raises:
        EngineProtocolError: number, shape or device of the tensors differ from the spec.
    """
    pages = DevicePages(rank_slice.geometry, caches)
    return CudaCopies(rank_slice, pages, submit, cuda_device(pages.device), staging_bytes)
