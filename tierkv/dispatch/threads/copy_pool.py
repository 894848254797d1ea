"""Daemon threads for copies that must not run on the engine's thread."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from tierkv.dispatch.threads.spawn import Handle, Spawn, start_thread, wait_until
from tierkv.errors import TierKVError

_T = TypeVar("_T")
_Job = tuple[Future[Any], Callable[[], Any]]


class CopyPool:
    """Bounded pool of daemon threads. ``submit`` and ``close`` belong to one thread.

    ``ThreadPoolExecutor`` joins its threads when the interpreter exits. Here, a function that hangs does not block the
    exit.

    Args:
        threads: number of threads; each is started when it is first needed.
        name: prefix of the threads' names.
        jobs_max: functions that may wait.
        spawn: starts the threads.
        engine_sleep: waits on the caller's thread, in :meth:`close`.

    Raises:
        ValueError: ``threads`` or ``jobs_max`` is below 1.
    """

    def __init__(
        self,
        threads: int = 1,
        *,
        name: str = "tierkv-copy",
        jobs_max: int = 4096,
        spawn: Spawn = start_thread,
        engine_sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if threads < 1 or jobs_max < 1:
            raise ValueError(f"threads and jobs_max must be 1 or more, got {threads} and {jobs_max}")
        self._threads_max = threads
        self._name = name
        self._jobs_max = jobs_max
        self._spawn = spawn
        self._engine_sleep = engine_sleep
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._handles: list[Handle] = []
        self._is_closed = False

    def submit(self, function: Callable[[], _T]) -> Future[_T]:
        """Run ``function`` in the background. Never waits.

        Returns:
            Future of its result. If the pool is closed or full, or no thread can be started, the future already holds
            a ``TierKVError``.
        """
        future: Future[_T] = Future()
        if self._is_closed:
            future.set_exception(TierKVError("the pool is closed"))
        elif self._jobs.qsize() >= self._jobs_max:
            future.set_exception(TierKVError(f"{self._jobs_max} jobs of {self._name!r} wait already"))
        elif not self._has_thread():
            future.set_exception(TierKVError(f"no thread of {self._name!r} can be started at present"))
        else:
            self._jobs.put((future, function))
        return future

    def _has_thread(self) -> bool:
        """Start one more thread, unless all have started or the system refuses it. Returns whether there is any."""
        if len(self._handles) < self._threads_max:
            with contextlib.suppress(RuntimeError, MemoryError):
                self._handles.append(self._spawn(f"{self._name}-{len(self._handles)}", _CopyWorker(self._jobs)))
        return bool(self._handles)

    def close(self, timeout_s: float = 0.0) -> int:
        """Cancel waiting functions and wait up to ``timeout_s`` for running ones. Idempotent.

        Returns:
            Number of threads that still run and are abandoned.
        """
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(queue.Empty):
                while (job := self._jobs.get_nowait()) is not None:
                    job[0].cancel()
            for _ in self._handles:
                self._jobs.put(None)
        wait_until(lambda: not self._alive(), timeout_s, time.monotonic, self._engine_sleep)
        return self._alive()

    def _alive(self) -> int:
        return sum(handle.is_alive() for handle in self._handles)


class _CopyWorker:
    """Runner of one thread: takes jobs until it takes None."""

    def __init__(self, jobs: queue.SimpleQueue[_Job | None]) -> None:
        self._jobs = jobs
        self._job: _Job | None = None
        self.done = False

    def run(self) -> None:
        while not self.done:
            self._take(self._jobs.get())
            self.finish()

    def step(self) -> bool:
        begun = self.begin()
        self.finish()
        return begun

    def begin(self) -> bool:
        try:
            self._take(self._jobs.get_nowait())
        except queue.Empty:
            return False
        return True

    def _take(self, job: _Job | None) -> None:
        self._job, self.done = job, job is None

    def finish(self) -> None:
        job, self._job = self._job, None
        if job is None:
            return
        future, function = job
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - the future carries it to the caller; the thread continues
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            # An error's traceback refers to this frame, which must not keep the arena's memory alive.
            del future, function, job
