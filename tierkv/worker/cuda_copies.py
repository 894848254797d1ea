"""Copies between a GPU and the arena: enqueued on streams and observed by events, so that no thread waits for the GPU.

A store waits on its stream for the work that the engine had enqueued, so the step that computed the blocks is over. It
gathers a batch of chunks into staging memory on the device, then copies each chunk asynchronously to its slot's part.
When the event behind the copies has passed, a copy thread computes the checksums.

A load verifies checksums first, on a copy thread. Then it copies each part to staging memory and scatters it.
Enqueuing runs on copy threads too: at ten microseconds per call it would delay the engine's thread.

Each direction has two copy streams with a staging buffer each. They take turns: while the copy engine empties one, the
other is filled.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch

from tierkv.errors import TierKVError
from tierkv.types.keys import Key
from tierkv.types.transfers import VOID_SLOT, TransferJob, chunk_blocks
from tierkv.worker.cuda_pages import ChunkBlocks, DevicePages
from tierkv.worker.cuda_runtime import CudaDevice, Device, Event, Stream
from tierkv.worker.rank_slice import RankSlice
from tierkv.worker.transfers import CopyResult, Submit, failed_result, log_failure

_log = logging.getLogger(__name__)

_STREAMS = 4


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk of a job. number: its position in the job."""

    number: int
    key: Key
    slot: int
    group: int
    blocks: ChunkBlocks


@dataclass(slots=True)
class _Enqueued:
    """State of a job on the GPU's streams."""

    failed: set[Key]
    """Keys that could not be enqueued."""
    began: Event | None = None
    """Point before the first copy."""
    events: list[Event] = field(default_factory=list)
    """Point behind each batch."""
    held: list[torch.Tensor] = field(default_factory=list)
    """Views that keep the arena mapped while the copy engine may use it."""


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
    """

    def __init__(
        self, rank_slice: RankSlice, pages: DevicePages, submit: Submit, device: Device, staging_bytes: int
    ) -> None:
        self._rank_slice = rank_slice
        self._pages = pages
        self._submit = submit
        self._device = device
        part_bytes_max = max(group.worker_bytes for group in rank_slice.geometry.groups)
        self._staging_bytes = max(staging_bytes // _STREAMS, part_bytes_max)
        self._is_pinned = rank_slice.arena.pin(device.register)
        copy_streams = [
            _CopyStream(device, self._staging_bytes, through_bounce=not self._is_pinned) for _ in range(_STREAMS)
        ]
        self._store_streams, self._load_streams = cycle(copy_streams[:2]), cycle(copy_streams[2:])

    def start(self, job: TransferJob) -> CudaTransfer:
        """Begin a job after the work that the engine has enqueued so far. Does not wait."""
        before = self._device.now()
        enqueue = self._enqueue_store if job.is_store else self._enqueue_load
        return CudaTransfer(self, job, self._submit(lambda: enqueue(job, before)))

    def close(self) -> None:
        """Unpin the arena. No transfer may be under way. Idempotent."""
        if self._is_pinned:
            self._is_pinned = False
            self._rank_slice.arena.unpin(self._device.unregister)

    def finish(self, job: TransferJob, failed: frozenset[Key], seconds: float | None) -> Future[CopyResult]:
        """Complete a job whose copies have ended: seal the slots of a store."""
        if job.is_store:
            return self._submit(lambda: self._seal_stores(job, failed, seconds))
        future: Future[CopyResult] = Future()
        future.set_result(CopyResult(failed, seconds=seconds))
        return future

    # -- on a copy thread --------------------------------------------------------------------------------------------

    def _enqueue_store(self, job: TransferJob, before: Event) -> _Enqueued:
        enqueued = _Enqueued(set())
        self._enqueue(job, before, self._valid_chunks(job, enqueued.failed), enqueued)
        return enqueued

    def _enqueue_load(self, job: TransferJob, before: Event) -> _Enqueued:
        enqueued = _Enqueued(set())
        intact = []
        for chunk in self._valid_chunks(job, enqueued.failed):
            try:
                self._rank_slice.check_load(chunk.key, chunk.slot, chunk.group)
            except TierKVError as error:
                log_failure(self._rank_slice.log, chunk.key, error)
                enqueued.failed.add(chunk.key)
            else:
                intact.append(chunk)
        self._enqueue(job, before, intact, enqueued)
        return enqueued

    def _valid_chunks(self, job: TransferJob, failed: set[Key]) -> list[_Chunk]:
        """Return the chunks with a slot and with existing blocks. An invalid id would break the GPU's context."""
        valid = []
        parts = chunk_blocks(job, self._rank_slice.geometry.blocks_per_chunk)
        for number, (key, ref, group, blocks) in enumerate(
            zip(job.keys, job.slots, job.chunk_groups, parts, strict=True)
        ):
            if ref == VOID_SLOT:
                failed.add(key)
                continue
            if job.is_store and not self._rank_slice.stores(ref.slot, group):
                continue
            try:
                self._pages.check_ids(group, blocks[1])
            except TierKVError as error:
                log_failure(self._rank_slice.log, key, error)
                failed.add(key)
            else:
                valid.append(_Chunk(number, key, ref.slot, group, blocks))
        return valid

    def _enqueue(self, job: TransferJob, before: Event, chunks: Sequence[_Chunk], enqueued: _Enqueued) -> None:
        """Enqueue copies in batches. Chunks of a batch that cannot be enqueued fail; its event is awaited anyway."""
        streams = self._store_streams if job.is_store else self._load_streams
        for batch in self._batches(chunks):
            copy_stream = next(streams)
            with copy_stream.lock, copy_stream.stream.use():
                try:
                    copy_stream.stream.wait_event(before)
                    enqueued.began = enqueued.began or copy_stream.stream.record_event()
                    self._copy(job, copy_stream, batch, enqueued)
                except Exception as error:  # noqa: BLE001 - out of memory, or an error of the GPU: the batch fails
                    for chunk in batch:
                        log_failure(self._rank_slice.log, chunk.key, error)
                        enqueued.failed.add(chunk.key)
                enqueued.events.append(copy_stream.stream.record_event())

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

    def _copy(self, job: TransferJob, copy_stream: _CopyStream, batch: Sequence[_Chunk], enqueued: _Enqueued) -> None:
        group = batch[0].group
        part_bytes = self._rank_slice.geometry.groups[group].worker_bytes
        blocks = [chunk.blocks for chunk in batch]
        ids = self._device.upload([block_id for _, block_ids in blocks for block_id in block_ids])
        staged = copy_stream.staging[: len(batch) * part_bytes]
        rows = staged.view(len(batch), part_bytes)
        parts = [torch.from_numpy(self._rank_slice.part(chunk.slot, group)) for chunk in batch]
        enqueued.held += parts
        if job.is_store:
            self._pages.gather(group, blocks, ids, staged)
            if copy_stream.bounce is not None:
                rows = copy_stream.bounce[: len(staged)].copy_(staged, non_blocking=True).view_as(rows)
                copy_stream.stream.synchronize()
            for part, row in zip(parts, rows, strict=True):
                part.copy_(row, non_blocking=True)
        else:
            target = rows if copy_stream.bounce is None else copy_stream.bounce[: len(staged)].view_as(rows)
            for part, row in zip(parts, target, strict=True):
                row.copy_(part, non_blocking=True)
            if copy_stream.bounce is not None:
                rows.copy_(target, non_blocking=True)
            self._pages.scatter(group, blocks, ids, staged)
            if copy_stream.bounce is not None:
                copy_stream.stream.synchronize()

    def _seal_stores(self, job: TransferJob, failed: frozenset[Key], seconds: float | None) -> CopyResult:
        """Seal the slots, or compute the checksums of this worker's parts."""
        bad = set(failed)
        checksums = []
        for key, ref, group in zip(job.keys, job.slots, job.chunk_groups, strict=True):
            digest = b""
            if key not in failed and self._rank_slice.stores(ref.slot, group):
                try:
                    digest = self._rank_slice.finish_store(key, ref.slot, group)
                except Exception as error:  # noqa: BLE001 - concerns this chunk alone (promise 3)
                    log_failure(self._rank_slice.log, key, error)
                    bad.add(key)
            checksums.append(digest)
        return CopyResult(frozenset(bad), tuple(checksums), seconds)


def cuda_copies(
    rank_slice: RankSlice, caches: Sequence[Sequence[Any]], submit: Submit, staging_bytes: int
) -> CudaCopies:
    """Open :class:`CudaCopies` for KV tensors on a CUDA device.

    Raises:
        EngineProtocolError: number, shape or device of the tensors differ from the spec.
    """
    pages = DevicePages(rank_slice.geometry, caches)
    return CudaCopies(rank_slice, pages, submit, CudaDevice(pages.device), staging_bytes)


class CudaTransfer:
    """Job under way: enqueued by a copy thread, copied by the GPU, completed by a copy thread."""

    def __init__(self, copies: CudaCopies, job: TransferJob, enqueued: Future[_Enqueued]) -> None:
        self._copies = copies
        self._job = job
        self._enqueued = enqueued
        self._finished: Future[CopyResult] | None = None

    def done(self) -> bool:
        """Whether it has ended. Starts its completion if the GPU has finished. Does not wait."""
        if self._finished is None and self._enqueued.done():
            self._advance(block=False)
        return self._finished is not None and self._finished.done()

    def wait(self) -> None:
        """Wait until it has ended."""
        wait((self._enqueued,))
        if self._finished is None:
            self._advance(block=True)
        if self._finished is not None:
            wait((self._finished,))

    def result(self) -> CopyResult:
        """Return its result. Every key of a job that could not run has failed."""
        finished = self._finished
        if finished is None or finished.cancelled() or finished.exception() is not None:
            return failed_result(self._job)
        return finished.result()

    def _advance(self, *, block: bool) -> None:
        """Start the completion of the job if the GPU's last copy has ended, or, with ``block``, when it has."""
        failed, seconds = frozenset(self._job.keys), None
        if not self._enqueued.cancelled() and self._enqueued.exception() is None:
            enqueued = self._enqueued.result()
            try:
                for event in enqueued.events:
                    if block:
                        event.synchronize()
                    elif not event.query():
                        return
                failed, seconds = frozenset(enqueued.failed), _seconds(enqueued)
            except RuntimeError:  # the GPU's context is lost: it will copy nothing more
                _log.exception("the GPU failed in transfer %d", self._job.job_id)
            enqueued.held.clear()
        self._finished = self._copies.finish(self._job, failed, seconds)


def _seconds(enqueued: _Enqueued) -> float | None:
    """Seconds from the begin of the first copy to the end of the last, on the GPU's clock. All copies have ended."""
    return enqueued.began.elapsed_time(enqueued.events[-1]) / 1000 if enqueued.began else None
