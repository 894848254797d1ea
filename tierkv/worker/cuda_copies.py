"""Copies between a GPU and the arena: enqueued on streams, watched by events, so that nobody waits for the GPU.

A store: wait on its stream for what the engine had enqueued (so the step that computed the blocks is over); gather a
batch of chunks into staging memory on the device; one asynchronous copy per chunk into its slot's part; once the event
behind them has passed, the parts' checksums on a copy thread. A load: checksums first, on a copy thread; then the same
way back. Enqueuing runs on copy threads too: at ten microseconds a call it would be noticed on the engine's.

Two lanes per direction, each a stream and a staging buffer, take turns: while the copy engine empties one, the other
is filled.
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
from tierkv.worker.host_copies import log_failure
from tierkv.worker.rank_slice import RankSlice
from tierkv.worker.transfers import CopyResult, Submit, failed_result

_log = logging.getLogger(__name__)

_LANES = 4


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk of a job."""

    number: int
    key: Key
    slot: int
    group: int
    blocks: ChunkBlocks


@dataclass(slots=True)
class _Enqueued:
    """What a job has on the GPU's streams. ``held`` keeps the arena mapped while the copy engine may use it."""

    failed: set[Key]
    began: Event | None = None
    events: list[Event] = field(default_factory=list)
    held: list[torch.Tensor] = field(default_factory=list)


class _Lane:
    """A stream, and the device memory that is used on it alone.

    ``bounce`` is pinned memory to go through where the arena is not pinned; then a batch is waited for.
    """

    def __init__(self, device: Device, staging_bytes: int, *, through_bounce: bool) -> None:
        self.stream: Stream = device.stream()
        self.staging = device.memory(staging_bytes)
        self.bounce = device.pinned(staging_bytes) if through_bounce else None
        self.lock = threading.Lock()  # held while a batch is enqueued: batches of two threads must not mix


class CudaCopies:
    """Transfers of one worker whose KV tensors are on a GPU.

    Args:
        slots: this worker's parts of the arena.
        pages: its KV tensors.
        submit: runs functions on copy threads.
        device: the GPU's runtime.
        staging_bytes: device memory for all lanes; if a lane's share holds no part of a chunk, it gets what one takes.
    """

    def __init__(
        self, slots: RankSlice, pages: DevicePages, submit: Submit, device: Device, staging_bytes: int
    ) -> None:
        self._slots = slots
        self._pages = pages
        self._submit = submit
        self._device = device
        part_bytes_max = max(group.worker_bytes for group in slots.geometry.groups)
        self._staging_bytes = max(staging_bytes // _LANES, part_bytes_max)
        self._is_pinned = slots.arena.pin(device.register)
        lanes = [_Lane(device, self._staging_bytes, through_bounce=not self._is_pinned) for _ in range(_LANES)]
        self._store_lanes, self._load_lanes = cycle(lanes[:2]), cycle(lanes[2:])

    def start(self, job: TransferJob) -> CudaTransfer:
        """Begin a job, behind everything that the engine has enqueued so far. Does not wait."""
        before = self._device.now()
        enqueue = self._enqueue_store if job.is_store else self._enqueue_load
        return CudaTransfer(self, job, self._submit(lambda: enqueue(job, before)))

    def close(self) -> None:
        """Unpin the arena; no transfer is under way. Idempotent."""
        if self._is_pinned:
            self._is_pinned = False
            self._slots.arena.unpin(self._device.unregister)

    def finish(self, job: TransferJob, failed: frozenset[Key], seconds: float | None) -> Future[CopyResult]:
        """The bytes are where they belong: what is left to do for a job."""
        if job.is_store:
            return self._submit(lambda: self._finish_stores(job, failed, seconds))
        future: Future[CopyResult] = Future()
        future.set_result(CopyResult(failed, seconds=seconds))
        return future

    # -- on a copy thread --------------------------------------------------------------------------------------------

    def _enqueue_store(self, job: TransferJob, before: Event) -> _Enqueued:
        done = _Enqueued(set())
        self._enqueue(job, before, self._valid_chunks(job, done.failed), done)
        return done

    def _enqueue_load(self, job: TransferJob, before: Event) -> _Enqueued:
        done = _Enqueued(set())
        whole = []
        for chunk in self._valid_chunks(job, done.failed):
            try:
                self._slots.check_load(chunk.key, chunk.slot, chunk.group)
            except TierKVError as error:
                log_failure(chunk.key, error)
                done.failed.add(chunk.key)
            else:
                whole.append(chunk)
        self._enqueue(job, before, whole, done)
        return done

    def _valid_chunks(self, job: TransferJob, failed: set[Key]) -> list[_Chunk]:
        """The chunks of a job that come, with blocks that exist: a wrong id would be a fault of the GPU's context."""
        sound = []
        parts = chunk_blocks(job, self._slots.geometry.blocks_per_chunk)
        for number, (key, ref, group, blocks) in enumerate(
            zip(job.keys, job.slots, job.chunk_groups, parts, strict=True)
        ):
            if ref == VOID_SLOT:
                failed.add(key)
                continue
            try:
                self._pages.check_ids(group, blocks[1])
            except TierKVError as error:
                log_failure(key, error)
                failed.add(key)
            else:
                sound.append(_Chunk(number, key, ref.slot, group, blocks))
        return sound

    def _enqueue(self, job: TransferJob, before: Event, chunks: Sequence[_Chunk], done: _Enqueued) -> None:
        """Put copies on lanes, batch by batch. A batch that cannot be enqueued fails; its lane is waited for anyway."""
        for batch in self._batches(chunks):
            lane = next(self._store_lanes if job.is_store else self._load_lanes)
            with lane.lock, lane.stream.use():
                try:
                    lane.stream.wait_event(before)
                    done.began = done.began or lane.stream.record_event()
                    self._copy(job, lane, batch, done)
                except Exception as error:  # noqa: BLE001 - out of memory, or a fault of the GPU: the batch fails
                    for chunk in batch:
                        log_failure(chunk.key, error)
                        done.failed.add(chunk.key)
                done.events.append(lane.stream.record_event())

    def _batches(self, chunks: Sequence[_Chunk]) -> Iterator[list[_Chunk]]:
        """Neighbours of one group, as many as fit the staging buffer."""
        batch: list[_Chunk] = []
        for chunk in chunks:
            room = self._staging_bytes // self._slots.geometry.groups[chunk.group].worker_bytes
            if batch and (batch[0].group != chunk.group or len(batch) == room):
                yield batch
                batch = []
            batch.append(chunk)
        if batch:
            yield batch

    def _copy(self, job: TransferJob, lane: _Lane, batch: Sequence[_Chunk], done: _Enqueued) -> None:
        group = batch[0].group
        part_bytes = self._slots.geometry.groups[group].worker_bytes
        blocks = [chunk.blocks for chunk in batch]
        ids = self._device.upload([block_id for _, block_ids in blocks for block_id in block_ids])
        staged = lane.staging[: len(batch) * part_bytes]
        rows = staged.view(len(batch), part_bytes)
        parts = [torch.from_numpy(self._slots.part(chunk.slot, group)) for chunk in batch]
        done.held += parts
        if job.is_store:
            self._pages.gather(group, blocks, ids, staged)
            if lane.bounce is not None:
                rows = lane.bounce[: len(staged)].copy_(staged, non_blocking=True).view_as(rows)
                lane.stream.synchronize()
            for part, row in zip(parts, rows, strict=True):
                part.copy_(row, non_blocking=True)
        else:
            target = rows if lane.bounce is None else lane.bounce[: len(staged)].view_as(rows)
            for part, row in zip(parts, target, strict=True):
                row.copy_(part, non_blocking=True)
            if lane.bounce is not None:
                rows.copy_(target, non_blocking=True)
            self._pages.scatter(group, blocks, ids, staged)
            if lane.bounce is not None:
                lane.stream.synchronize()

    def _finish_stores(self, job: TransferJob, failed: frozenset[Key], seconds: float | None) -> CopyResult:
        """Seal the slots, or checksum this worker's parts of them."""
        bad = set(failed)
        checksums = []
        for key, ref, group in zip(job.keys, job.slots, job.chunk_groups, strict=True):
            digest = b""
            if key not in failed:
                try:
                    digest = self._slots.finish_store(key, ref.slot, group)
                except Exception as error:  # noqa: BLE001 - concerns this chunk alone (promise 3)
                    log_failure(key, error)
                    bad.add(key)
            checksums.append(digest)
        return CopyResult(frozenset(bad), tuple(checksums), seconds)


def cuda_copies(slots: RankSlice, caches: Sequence[Sequence[Any]], submit: Submit, staging_bytes: int) -> CudaCopies:
    """Copies for KV tensors on a CUDA device; see :class:`CudaCopies`."""
    pages = DevicePages(slots.geometry, caches)
    return CudaCopies(slots, pages, submit, CudaDevice(pages.device), staging_bytes)


class CudaTransfer:
    """A job on its way: enqueued by a copy thread, copied by the GPU, finished by a copy thread again."""

    def __init__(self, copies: CudaCopies, job: TransferJob, enqueued: Future[_Enqueued]) -> None:
        self._copies = copies
        self._job = job
        self._enqueued = enqueued
        self._finished: Future[CopyResult] | None = None

    def done(self) -> bool:
        """Whether it has ended; moves it on if the GPU is through. Does not wait."""
        if self._finished is None and self._enqueued.done():
            self._advance(block=False)
        return self._finished is not None and self._finished.done()

    def wait(self) -> None:
        """Until it has ended."""
        wait((self._enqueued,))
        if self._finished is None:
            self._advance(block=True)
        if self._finished is not None:
            wait((self._finished,))

    def result(self) -> CopyResult:
        """How it ended; a job that could not run at all failed for every key."""
        finished = self._finished
        if finished is None or finished.cancelled() or finished.exception() is not None:
            return failed_result(self._job)
        return finished.result()

    def _advance(self, *, block: bool) -> None:
        """Behind the GPU's last copy, finish the job."""
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
            except RuntimeError:  # the GPU's context is gone: nothing will ever be copied by it again
                _log.exception("the GPU failed in transfer %d", self._job.job_id)
            enqueued.held.clear()
        self._finished = self._copies.finish(self._job, failed, seconds)


def _seconds(enqueued: _Enqueued) -> float | None:
    """From the first copy's begin to the last one's end, on the GPU's own clock; all have passed."""
    return enqueued.began.elapsed_time(enqueued.events[-1]) / 1000 if enqueued.began else None
