"""Copies on the host's cores: a job is a loop over its chunks, or runs of them, on a copy thread.

A load of tens of MiB has several parts, so that all copy threads share it: a request waits for its end, and often for
nothing else. A store has one, because the scheduler divides it, and nothing waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

from tierkv.types.geometry import batches
from tierkv.types.keys import Key
from tierkv.types.transfers import VOID_SLOT, TransferJob, chunk_blocks
from tierkv.worker.chunk_runs import chunk_runs
from tierkv.worker.pages import HostPages
from tierkv.worker.rank_slice import RankSlice
from tierkv.worker.transfers import CopyResult, Submit, Wait, log_failure

PART_BYTES = 8 << 20
"""Bytes of a part of a load: its copy takes some milliseconds, to hand it to a thread some tens of microseconds."""
PARTS_MAX = 8
"""Parts of a load at most. A longer one stays on one thread, so that the others copy short ones meanwhile."""

Layout = tuple[Sequence[tuple[int, tuple[int, ...]]], bool]
"""Of each chunk of a job, the number of skipped blocks and the ids of the others; whether all of these exist."""


@dataclass(frozen=True, slots=True)
class CopyPart:
    """Result of a part of a transfer, on one copy thread; fields as in :class:`~tierkv.worker.transfers.CopyResult`."""

    failed: set[Key]
    checksums: list[bytes]
    began_s: float
    ended_s: float


class HostCopies:
    """Transfers of one worker whose KV tensors are in host memory.

    Args:
        rank_slice: this worker's parts of the arena.
        pages: its KV tensors.
        submit: runs functions on copy threads.
        clock: seconds, for the duration of a job.
        wait_for: waits for a future of ``submit``.
    """

    def __init__(
        self,
        rank_slice: RankSlice,
        pages: HostPages,
        submit: Submit,
        clock: Callable[[], float] = time.perf_counter,
        wait_for: Wait = wait,
    ) -> None:
        self._rank_slice = rank_slice
        self._pages = pages
        self._submit = submit
        self._clock = clock
        self._wait_for = wait_for
        groups = rank_slice.geometry.groups
        self._chunk_bytes = [pages.part_bytes(group.index) for group in groups]
        self._part_chunks = max(1, PART_BYTES // max(self._chunk_bytes))
        self._takes_runs = all(group.parts == 1 for group in groups) and not rank_slice.takes_turns

    def start(self, job: TransferJob) -> HostTransfer:
        """Submit a job to copy threads. Does not wait."""
        fail = partial(log_failure, self._rank_slice.log)
        return HostTransfer(job, self._parts(job), self._layout, self._run, self._submit, self._wait_for, fail)

    def _parts(self, job: TransferJob) -> Sequence[range]:
        count = len(job.keys)
        if job.is_store or not self._part_chunks < count <= PARTS_MAX * self._part_chunks:
            return (range(count),)
        return [range(part[0], part[-1] + 1) for part in batches(range(count), self._part_chunks)]

    def close(self) -> None:
        """Do nothing: no device memory was taken."""

    # -- on a copy thread --------------------------------------------------------------------------------------------

    def _layout(self, job: TransferJob) -> Layout:
        return chunk_blocks(job, self._rank_slice.geometry.blocks_per_chunk), self._pages.has_blocks(job)

    def _run(self, job: TransferJob, part: range, layout: Layout) -> CopyPart:
        """Copy the chunks at these places of a job."""
        began_s = self._clock()
        failed: set[Key] = set()
        checksums: list[bytes] = []
        blocks, has_all_blocks = layout
        if has_all_blocks and self._takes_runs:
            factor = self._rank_slice.geometry.blocks_per_chunk
            for places, is_run in chunk_runs(job, blocks, factor, self._chunk_bytes, part):
                if is_run and self._copy_run(job, places, blocks[places.start][1][0]):
                    checksums += (b"",) * (len(places) if job.is_store else 0)
                else:
                    self._copy_each(job, places, blocks, failed, checksums, checks_ids=False)
        else:
            self._copy_each(job, part, blocks, failed, checksums, checks_ids=not has_all_blocks)
        return CopyPart(failed, checksums, began_s, self._clock())

    def _copy_run(self, job: TransferJob, run: range, first_block: int) -> bool:
        """Copy chunks of a run together. Returns False if one of them fails: then each is to be copied alone."""
        group, rank_slice = job.chunk_groups[run.start], self._rank_slice
        try:
            rows = rank_slice.rows(job.slots[run.start].slot, job.slots[run.stop - 1].slot, group)
            if job.is_store:
                self._pages.gather_run(group, first_block, rows)
                for i, row in zip(run, rows[:, : self._chunk_bytes[group]], strict=True):
                    rank_slice.finish_store(job.keys[i], job.slots[i].slot, group, (row,))
            else:
                for i in run:
                    rank_slice.check_load(job.keys[i], job.slots[i].slot, group)
                self._pages.scatter_run(group, first_block, rows)
        except Exception:  # noqa: BLE001 - whatever it is, it concerns some chunk alone (promise 3)
            return False
        return True

    def _copy_each(  # noqa: PLR0913 - what _run has prepared
        self,
        job: TransferJob,
        places: range,
        blocks: Sequence[tuple[int, tuple[int, ...]]],
        failed: set[Key],
        checksums: list[bytes],
        *,
        checks_ids: bool,
    ) -> None:
        """Copy the chunks at these places of a job one by one."""
        copy = self._store if job.is_store else self._load
        takes_turns = job.is_store and self._rank_slice.takes_turns
        for i in places:
            key, ref, group, (skip, block_ids) = job.keys[i], job.slots[i], job.chunk_groups[i], blocks[i]
            digest = b""
            if takes_turns and not self._rank_slice.stores(ref.slot, group):
                checksums.append(digest)
                continue
            if ref == VOID_SLOT:  # a key that cannot be loaded; its blocks may belong to another request by now
                failed.add(key)
                continue
            try:
                if checks_ids:
                    self._pages.check_ids(group, block_ids)
                digest = copy(key, ref.slot, group, skip, block_ids)
            except Exception as error:  # noqa: BLE001 - any error concerns this chunk alone (promise 3)
                log_failure(self._rank_slice.log, key, error)
                failed.add(key)
            if job.is_store:
                checksums.append(digest)

    def _store(self, key: Key, slot: int, group: int, skip: int, block_ids: Sequence[int]) -> bytes:
        pieces = self._pages.gather_in_pieces(group, skip, block_ids, self._rank_slice.part(slot, group))
        return self._rank_slice.finish_store(key, slot, group, pieces)

    def _load(self, key: Key, slot: int, group: int, skip: int, block_ids: Sequence[int]) -> bytes:
        self._rank_slice.check_load(key, slot, group)
        self._pages.scatter(group, skip, block_ids, self._rank_slice.part(slot, group))
        return b""


class HostTransfer:
    """Job on copy threads."""

    def __init__(  # noqa: PLR0913, PLR0917 - the copies hand in their parts
        self,
        job: TransferJob,
        parts: Sequence[range],
        lay_out: Callable[[TransferJob], Layout],
        run: Callable[[TransferJob, range, Layout], CopyPart],
        submit: Submit,
        wait_for: Wait,
        log_failure: Callable[[Key, Exception], None],
    ) -> None:
        self._log_failure = log_failure
        self._job = job
        self._parts = parts
        self._lay_out = lay_out
        self._layout: Layout | None = None
        self._run = run
        self._wait_for = wait_for
        self._copied: list[CopyPart | None] = [None] * len(parts)  # set on copy threads: to read it takes no lock
        self._futures: list[Future[None]] = [submit(partial(self._copy, number)) for number in range(len(parts))]

    def _copy(self, number: int) -> None:
        layout = self._layout
        if layout is None:  # the first threads may all compute it; the results are equal
            layout = self._layout = self._lay_out(self._job)
        self._copied[number] = self._run(self._job, self._parts[number], layout)

    def done(self) -> bool:
        """Whether it has ended."""
        for part, future in zip(self._copied, self._futures, strict=True):
            if part is None and not future.done():
                return False
        return True

    def wait(self) -> None:
        """Wait until it has ended, with or without success."""
        self._wait_for(self._futures)

    def result(self) -> CopyResult:
        """Return its result. Every key of a part that could not run has failed."""
        part = self._copied[0]
        if len(self._parts) == 1 and part is not None:  # usual
            return CopyResult(frozenset(part.failed), tuple(part.checksums), part.ended_s - part.began_s)
        failed, checksums = set[Key](), list[bytes]()
        for places, part, future in zip(self._parts, self._copied, self._futures, strict=True):
            has_ended = part is None and future.done() and not future.cancelled()
            if has_ended and isinstance(error := future.exception(), Exception):
                self._log_failure(self._job.keys[places.start], error)  # of one chunk: the others have the same reason
            failed |= {*self._job.keys[places.start : places.stop]} if part is None else part.failed
            checksums += [b""] * (len(places) * self._job.is_store) if part is None else part.checksums
        copied = [part for part in self._copied if part is not None]
        seconds = max([part.ended_s for part in copied]) - min([part.began_s for part in copied]) if copied else None
        return CopyResult(frozenset(failed), tuple(checksums), seconds)
