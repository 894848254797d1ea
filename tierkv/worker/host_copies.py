"""Copies on the host's cores: a job is a loop over its chunks on a copy thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from tierkv.types.keys import Key
from tierkv.types.transfers import VOID_SLOT, TransferJob, chunk_blocks
from tierkv.worker.pages import HostPages
from tierkv.worker.rank_slice import RankSlice
from tierkv.worker.transfers import CopyResult, Submit, Wait, failed_result, log_failure


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

    def start(self, job: TransferJob) -> HostTransfer:
        """Submit a job to a copy thread. Does not wait."""
        return HostTransfer(job, self._run, self._submit, self._wait_for)

    def close(self) -> None:
        """Do nothing: no device memory was taken."""

    # -- on a copy thread --------------------------------------------------------------------------------------------

    def _run(self, job: TransferJob) -> CopyResult:
        began_s = self._clock()
        failed: set[Key] = set()
        checksums: list[bytes] = []
        parts = chunk_blocks(job, self._rank_slice.geometry.blocks_per_chunk)
        copy = self._store if job.is_store else self._load
        takes_turns = job.is_store and self._rank_slice.takes_turns
        has_all_blocks = self._pages.has_blocks(job)
        for key, ref, group, (skip, block_ids) in zip(job.keys, job.slots, job.chunk_groups, parts, strict=True):
            digest = b""
            if takes_turns and not self._rank_slice.stores(ref.slot, group):
                checksums.append(digest)
                continue
            if ref == VOID_SLOT:  # a key that cannot be loaded; its blocks may belong to another request by now
                failed.add(key)
                continue
            try:
                if not has_all_blocks:
                    self._pages.check_ids(group, block_ids)
                digest = copy(key, ref.slot, group, skip, block_ids)
            except Exception as error:  # noqa: BLE001 - any error concerns this chunk alone (promise 3)
                log_failure(self._rank_slice.log, key, error)
                failed.add(key)
            if job.is_store:
                checksums.append(digest)
        return CopyResult(frozenset(failed), tuple(checksums), self._clock() - began_s)

    def _store(self, key: Key, slot: int, group: int, skip: int, block_ids: Sequence[int]) -> bytes:
        pieces = self._pages.gather_in_pieces(group, skip, block_ids, self._rank_slice.part(slot, group))
        return self._rank_slice.finish_store(key, slot, group, pieces)

    def _load(self, key: Key, slot: int, group: int, skip: int, block_ids: Sequence[int]) -> bytes:
        self._rank_slice.check_load(key, slot, group)
        self._pages.scatter(group, skip, block_ids, self._rank_slice.part(slot, group))
        return b""


class HostTransfer:
    """Job on a copy thread."""

    def __init__(
        self, job: TransferJob, run: Callable[[TransferJob], CopyResult], submit: Submit, wait_for: Wait
    ) -> None:
        self._job = job
        self._run = run
        self._wait_for = wait_for
        self._result: CopyResult | None = None  # set on the copy thread: to read it takes no lock
        self._future: Future[CopyResult] = submit(self._copy)

    def _copy(self) -> CopyResult:
        self._result = result = self._run(self._job)
        return result

    def done(self) -> bool:
        """Whether it has ended."""
        return self._result is not None or self._future.done()

    def wait(self) -> None:
        """Wait until it has ended, with or without success."""
        self._wait_for((self._future,))

    def result(self) -> CopyResult:
        """Return its result. Every key of a job that could not run has failed."""
        if self._result is not None:
            return self._result
        try:
            return self._future.result()
        except Exception:  # noqa: BLE001 - whatever kept the job from running
            return failed_result(self._job)
