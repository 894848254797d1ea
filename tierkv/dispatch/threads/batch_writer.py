"""Writing in batches on a thread of its own, bounded in memory. The thread that puts never waits."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from tierkv.dispatch.threads.spawn import Handle, Spawn, start_thread, wait_until

Item = TypeVar("Item")


class BatchWriter(Generic[Item]):
    """Bounded queue of batches and the thread that writes them. ``put`` and ``close`` belong to one thread.

    Args:
        name: of the thread.
        write: writes a batch on the writer's thread. Raises nothing.
        release: called on the writer's thread after the last batch. Raises nothing.
        items_max: items at most that wait.
        batches_at_once: batches that are joined for one call of ``write``, where they wait.
        clock, engine_sleep: for :meth:`close`.
        spawn: starts the thread.
    """

    def __init__(  # noqa: PLR0913 - three are doors for tests
        self,
        name: str,
        write: Callable[[Sequence[Item]], None],
        release: Callable[[], None],
        *,
        items_max: int,
        clock: Callable[[], float],
        engine_sleep: Callable[[float], None],
        batches_at_once: int = 1,
        spawn: Spawn = start_thread,
    ) -> None:
        self.done = False
        """Whether the last batch was written and all is released."""
        self._write = write
        self._release = release
        self._items_max = items_max
        self._batches_at_once = batches_at_once
        self._clock = clock
        self._engine_sleep = engine_sleep
        self._put = self._taken = 0
        self._batches: queue.SimpleQueue[Sequence[Item] | None] = queue.SimpleQueue()
        self._handle: Handle = spawn(name, self)

    def put(self, batch: Sequence[Item]) -> bool:
        """Take over a batch without waiting. Returns False for one that does not fit, which is not written."""
        if self.done or self._put - self._taken + len(batch) > self._items_max:
            return False
        self._put += len(batch)
        self._batches.put(batch)
        return True

    def close(self, timeout_s: float) -> None:
        """Write what waits, within ``timeout_s``. Idempotent."""
        self._batches.put(None)
        wait_until(lambda: not self._handle.is_alive(), timeout_s, self._clock, self._engine_sleep)

    # -- the writer's thread -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Write batches until closed."""
        while self._write_next(self._batches.get()):
            pass

    def step(self) -> bool:
        """Write what waits, if anything does. Returns whether it did."""
        with contextlib.suppress(queue.Empty):
            self._write_next(self._batches.get_nowait())
            return True
        return False

    def _write_next(self, batch: Sequence[Item] | None) -> bool:
        is_last = batch is None
        joined = list(batch or ())
        for _ in range(self._batches_at_once - 1):
            if is_last:
                break
            try:
                more = self._batches.get_nowait()
            except queue.Empty:
                break
            is_last = more is None
            joined += more or ()
        if joined:
            self._write(joined)
            self._taken += len(joined)
        if is_last:
            self.done = True
            self._release()
        return not is_last
