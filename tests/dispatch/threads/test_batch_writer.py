"""Batches on a thread of their own: the putting thread never waits, memory is bounded, a close writes what waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hand_thread import HandThread

from tierkv.dispatch.threads.batch_writer import BatchWriter


class Log:
    """Calls of a writer."""

    def __init__(self, **options: Any) -> None:
        self.calls: list[list[int]] = []
        self.released = 0
        self.writer: BatchWriter[int] = BatchWriter(
            "test", self.write, self.release, clock=time.monotonic, engine_sleep=time.sleep, **options
        )

    def write(self, batch: Sequence[int]) -> None:
        """Note a batch."""
        self.calls.append(list(batch))

    def release(self) -> None:
        """Count a release."""
        self.released += 1


def test_what_was_put_is_written_in_order() -> None:
    """A real thread, closed twice: all batches in order, and one release after them."""
    log = Log(items_max=10_000)
    assert all(log.writer.put([number, -number]) for number in range(500))
    log.writer.close(30.0)
    log.writer.close(30.0)
    assert log.calls == [[number, -number] for number in range(500)]
    assert (log.released, log.writer.done) == (1, True)
    assert not log.writer.put([1])


@pytest.mark.parametrize(("at_once", "calls"), [(1, [[1], [2, 3], [4]]), (2, [[1, 2, 3], [4]]), (8, [[1, 2, 3, 4]])])
def test_batches_that_wait_are_joined(at_once: int, calls: list[list[int]]) -> None:
    """A commit costs the same for one batch and for many, and those of one call stay in order."""
    log = Log(items_max=10, batches_at_once=at_once, spawn=(thread := HandThread()))
    for batch in ([1], [2, 3], [4]):
        log.writer.put(batch)
    log.writer.close(30.0)
    assert log.calls == calls
    assert not thread.runner.step()


def test_a_slow_disk_bounds_what_waits() -> None:
    """A batch that does not fit is refused whole; there is room again once earlier ones are written."""
    log = Log(items_max=3, spawn=(thread := HandThread()))
    assert log.writer.put([1, 2])
    assert not log.writer.put([3, 4])
    assert log.writer.put([5])
    assert thread.runner.step()
    assert log.writer.put([6, 7])
    log.writer.close(30.0)
    assert log.calls == [[1, 2], [5], [6, 7]]


def test_a_close_ends_within_its_time() -> None:
    """The disk hangs in a write: the close returns, and the thread ends by itself once the disk answers."""
    hangs, thread_names = threading.Event(), list[str]()
    log = Log(items_max=3)

    def write(_batch: Sequence[int]) -> None:
        thread_names.append(threading.current_thread().name)
        hangs.wait(30.0)

    log.writer._write = write
    log.writer.put([1])
    log.writer.close(0.05)
    assert not log.writer.done
    hangs.set()
    log.writer.close(30.0)
    assert log.writer.done
    assert thread_names == ["test"]
