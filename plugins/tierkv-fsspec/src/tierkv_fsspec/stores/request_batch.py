"""Requests of one call, sent side by side by a pool of threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future
from contextlib import suppress
from typing import Generic, TypeVar

A = TypeVar("A")
R = TypeVar("R")


class RequestBatch(Generic[A, R]):
    """Requests of which each is taken once: by a thread of the pool, or by the caller where no thread can be started.

    A pool keeps a task that it refused for want of a thread, and runs it later. That would fill a buffer which the
    caller uses for another chunk by then. So a task of the pool names no request: it takes the next one that is left.

    Args:
        action: sends one request.
        items: one for each request.
    """

    def __init__(self, action: Callable[[A], R], items: Sequence[A]) -> None:
        self._action = action
        self._ends: list[Future[R]] = [Future() for _ in items]
        self._left = deque(zip(items, self._ends, strict=True))

    def send(self, pool: Executor, is_closed: Callable[[], bool]) -> list[R] | None:
        """Send all requests, and wait for the end of each that began: they use the caller's buffers.

        Args:
            pool: sends them.
            is_closed: whether the pool was shut down.

        Returns:
            The results. None: the pool was shut down before each request began.
        """
        try:
            for _ in self._ends:
                pool.submit(self._send_next).add_done_callback(self._has_ended)
        except RuntimeError:
            if is_closed():
                self._abandon()
            while self._send_next():
                pass
        ended = [_await_end(end) for end in self._ends]
        return [end.result() for end in self._ends] if all(ended) else None

    def _send_next(self) -> bool:
        """Send one request. Returns whether one was left."""
        try:
            item, end = self._left.popleft()
        except IndexError:
            return False
        try:
            end.set_result(self._action(item))
        except BaseException as error:  # noqa: BLE001  the caller raises it
            end.set_exception(error)
        return True

    def _has_ended(self, task: Future[bool]) -> None:
        if task.cancelled():  # by the shutdown of the pool
            self._abandon()

    def _abandon(self) -> None:
        with suppress(IndexError):
            while True:
                self._left.popleft()[1].cancel()


def _await_end(request: Future[R]) -> bool:
    """Wait for a request. Returns whether it was sent.

    ``concurrent.futures.wait`` would wait for ever for a request that was cancelled.
    """
    try:
        request.exception()
    except CancelledError:
        return False
    return True
