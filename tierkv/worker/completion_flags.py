"""A table in shared memory where workers mark the jobs that they ended.

For engines whose reports do not tell everything: a job that a cache reset has overtaken is never reported, and yet its
slots must not be used again while a worker still reads or writes them. One row per worker, one cell per job in flight;
a cell holds the number of the last job that ended in it, so nothing has to be cleared.
"""

from __future__ import annotations

import mmap

import numpy as np

from tierkv.memory.shared import MemoryHandle, SharedMemory, attach_memory

JOBS_MAX = 16_384
"""Jobs that can be in flight at once: two pages of memory for each worker and thousand."""
STORES_MAX = JOBS_MAX * 3 // 4
"""How many of them may be stores: an engine can do without a store, but not without a load that it was promised."""

_CELL_BYTES = 8


class _Table:
    """``[workers, JOBS_MAX]`` numbers, in memory that processes share."""

    def __init__(self, memory: mmap.mmap, num_workers: int) -> None:
        self._memory = memory
        self._cells = np.frombuffer(memory, dtype=np.uint64).reshape(num_workers, JOBS_MAX)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        del self._cells
        self._cells = np.zeros((0, JOBS_MAX), dtype=np.uint64)
        self._memory.close()


class CompletionFlags(_Table):
    """The side that gives out numbers and looks for marks. Scheduler's thread."""

    def __init__(self, num_workers: int) -> None:
        self._shared = SharedMemory("tierkv-marks")
        super().__init__(self._shared.map(num_workers * JOBS_MAX * _CELL_BYTES), num_workers)
        self._taken: dict[int, int] = {}  # cell -> number
        self._stores: set[int] = set()
        self._last = 0

    @property
    def handle(self) -> MemoryHandle:
        """How workers find the table."""
        return self._shared.memory_handle()

    def new(self, *, is_store: bool) -> int:
        """A number for a job; 0 if there is none left for its kind."""
        if len(self._taken) >= JOBS_MAX or (is_store and len(self._stores) >= STORES_MAX):
            return 0
        self._last += 1
        while self._last % JOBS_MAX in self._taken:
            self._last += 1
        self._taken[self._last % JOBS_MAX] = self._last
        if is_store:
            self._stores.add(self._last)
        return self._last

    def ended(self, number: int) -> bool:
        """Whether every worker has ended that job. Never so for 0."""
        return number > 0 and bool((self._cells[:, number % JOBS_MAX] == number).all())

    def free(self, number: int) -> None:
        """Nobody will ask about that job again."""
        if self._taken.get(number % JOBS_MAX) == number:
            del self._taken[number % JOBS_MAX]
            self._stores.discard(number)

    def close(self) -> None:
        """Give the memory back; workers keep what they have mapped. Idempotent."""
        super().close()
        self._shared.close()


class Marks(_Table):
    """A worker's side. That worker's thread."""

    def __init__(self, handle: MemoryHandle, num_workers: int, rank: int) -> None:
        super().__init__(attach_memory(handle), num_workers)
        self._rank = rank

    def end(self, number: int) -> None:
        """This worker has ended that job."""
        self._cells[self._rank, number % JOBS_MAX] = number
