"""Copies on the host's own cores: a job is a loop over its chunks, run on a copy thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from tierkv.errors import CorruptFrameError
from tierkv.types.keys import Key
from tierkv.types.transfers import VOID_SLOT, TransferJob, chunk_blocks
from tierkv.worker.rank_slice import RankSlice
from tierkv.worker.transfers import CopyResult, Pages, Submit, Wait, failed_result

_log = logging.getLogger(__name__)


class HostCopies:
    """Gathers into slots and scatters from them.

    Args:
        slots: this worker's parts of the arena.
        pages: its KV tensors.
        submit: runs a job.
        clock: seconds, for the time that a job takes.
        wait_for: waits for one.
    """

    def __init__(
        self,
        slots: RankSlice,
        pages: Pages,
        submit: Submit,
        clock: Callable[[], float] = time.perf_counter,
        wait_for: Wait = wait,
    ) -> None:
        self._slots = slots
        self._pages = pages
        self._submit = submit
        self._clock = clock
        self._wait_for = wait_for

    def start(self, job: TransferJob) -> HostTransfer:
        """Hand a job to a copy thread."""
        return HostTransfer(job, self._submit(lambda: self._run(job)), self._wait_for)

    def close(self) -> None:
        """Nothing was taken."""

    # -- on a copy thread --------------------------------------------------------------------------------------------

    def _run(self, job: TransferJob) -> CopyResult:
        began_s = self._clock()
        failed: set[Key] = set()
        checksums: list[bytes] = []
        parts = chunk_blocks(job, self._slots.geometry.blocks_per_chunk)
        for key, ref, group, (skip, block_ids) in zip(job.keys, job.slots, job.chunk_groups, parts, strict=True):
            digest = b""
            if ref == VOID_SLOT:  # the last job of a load says what does not come; the blocks may be another's by now
                failed.add(key)
                continue
            try:
                if job.is_store:
                    digest = self._store(key, ref.slot, group, skip, block_ids)
                else:
                    self._load(key, ref.slot, group, skip, block_ids)
            except Exception as error:  # noqa: BLE001 - whatever a copy can raise concerns this chunk alone (promise 3)
                log_failure(key, error)
                failed.add(key)
            if job.is_store:
                checksums.append(digest)
        return CopyResult(frozenset(failed), tuple(checksums), self._clock() - began_s)

    def _store(self, key: Key, slot: int, group: int, skip: int, block_ids: Sequence[int]) -> bytes:
        self._pages.check_ids(group, block_ids)
        self._pages.gather(group, skip, block_ids, self._slots.part(slot, group))
        return self._slots.finish_store(key, slot, group)

    def _load(self, key: Key, slot: int, group: int, skip: int, block_ids: Sequence[int]) -> None:
        self._slots.check_load(key, slot, group)
        self._pages.check_ids(group, block_ids)
        self._pages.scatter(group, skip, block_ids, self._slots.part(slot, group))


class HostTransfer:
    """A job on a copy thread."""

    def __init__(self, job: TransferJob, future: Future[CopyResult], wait_for: Wait) -> None:
        self._job = job
        self._wait_for = wait_for
        self._future = future

    def done(self) -> bool:
        """Whether it has ended."""
        return self._future.done()

    def wait(self) -> None:
        """Until it has ended, whether well or not."""
        self._wait_for((self._future,))

    def result(self) -> CopyResult:
        """How it ended; a job that could not run at all failed for every key."""
        if self._future.cancelled() or self._future.exception() is not None:
            return failed_result(self._job)
        return self._future.result()


def log_failure(key: Key, error: Exception) -> None:
    """Damage is expected now and then and told in a line; anything else comes with its traceback."""
    if isinstance(error, CorruptFrameError):
        _log.warning("chunk %s is refused on its way to the GPU: %s", key.hex(), error)
    else:
        _log.error("chunk %s could not be copied", key.hex(), exc_info=error)
