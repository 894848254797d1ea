"""Table in shared memory in which workers flag the jobs that they completed.

A staged engine does not report every job: after a cache reset it never reports the jobs in flight. Their slots must not
be reused while a worker still reads or writes them. The table has one row per worker and one cell per job in flight.
A cell holds the number of the last job completed in it, so no cell has to be cleared. Its highest bit marks a job that
ended without success: nothing reads or writes its slots any more, but bytes that it should have copied may be missing.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from tierkv.memory.shared import MemoryHandle, SharedMemory, attach_memory

JOBS_MAX = 16_384
"""Maximum number of jobs in flight: 128 KiB of shared memory per worker."""
STORES_MAX = JOBS_MAX * 3 // 4
"""Maximum number of stores among them. A store may be refused; a load that was promised to the engine may not."""

_CELL_BYTES = 8
_FAILED = 1 << 63
"""Bit of a cell whose job has ended without success."""


class CompletionFlags:
    """Scheduler's side of the table: hands out job numbers and reads the flags. Scheduler's thread.

    Args:
        num_workers: rows of the table.
    """

    def __init__(self, num_workers: int) -> None:
        self._shared = SharedMemory("tierkv-flags")
        self._table = _FlagTable(self._shared.map(num_workers * JOBS_MAX * _CELL_BYTES), num_workers)
        self._taken: dict[int, int] = {}  # cell -> number
        self._stores: set[int] = set()
        self._last = 0

    @property
    def handle(self) -> MemoryHandle:
        """Handle with which workers attach the table."""
        return self._shared.memory_handle()

    def allocate(self, *, is_store: bool) -> int:
        """Return a number for a new job; 0 if the limit of its kind is reached."""
        if len(self._taken) >= JOBS_MAX or (is_store and len(self._stores) >= STORES_MAX):
            return 0
        self._last += 1
        while self._last % JOBS_MAX in self._taken:
            self._last += 1
        self._taken[self._last % JOBS_MAX] = self._last
        if is_store:
            self._stores.add(self._last)
        return self._last

    def has_ended(self, number: int) -> bool:
        """Whether every worker has ended the job, with or without success. Always False for 0."""
        return number > 0 and {number, number | _FAILED}.issuperset(self._cells(number))

    def has_succeeded(self, number: int) -> bool:
        """Whether every worker has completed the job. Always False for 0."""
        return number > 0 and {*self._cells(number)} == {number}

    def has_failed(self, number: int) -> bool:
        """Whether any worker ended the job without success. Always False for 0."""
        return number > 0 and number | _FAILED in self._cells(number)

    def _cells(self, number: int) -> list[int]:
        cells: list[int] = self._table.cells[:, number % JOBS_MAX].tolist()
        return cells

    def release(self, number: int) -> None:
        """Make the job's cell available for another job. Unknown numbers are ignored."""
        if self._taken.get(number % JOBS_MAX) == number:
            del self._taken[number % JOBS_MAX]
            self._stores.discard(number)

    def close(self) -> None:
        """Release the memory; workers keep their mappings. Idempotent."""
        self._table.close()
        self._shared.close()


class RankFlags:
    """One worker's row of the table. Worker's thread.

    Args:
        handle: from :attr:`CompletionFlags.handle`.
        num_workers: rows of the table.
        rank: row of this worker.

    Raises:
        EngineProtocolError: the stack is closed, or its process has ended.
    """

    def __init__(self, handle: MemoryHandle, num_workers: int, rank: int) -> None:
        self._table = _FlagTable(attach_memory(handle), num_workers)
        self._rank = rank

    def set_ended(self, number: int, *, success: bool = True) -> None:
        """Flag a job as ended by this worker."""
        self._table.cells[self._rank, number % JOBS_MAX] = number if success else number | _FAILED

    def close(self) -> None:
        """Unmap the table. Idempotent."""
        self._table.close()


class _FlagTable:
    """``[workers, JOBS_MAX]`` job numbers over a mapping."""

    def __init__(self, memory: mmap.mmap, num_workers: int) -> None:
        self._memory = memory
        self.cells: npt.NDArray[np.uint64] = np.frombuffer(memory, dtype=np.uint64).reshape(num_workers, JOBS_MAX)

    def close(self) -> None:
        self.cells = np.zeros((0, JOBS_MAX), dtype=np.uint64)  # no view may remain when the mapping is closed
        self._memory.close()
