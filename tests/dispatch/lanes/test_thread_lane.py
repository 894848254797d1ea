"""Lane of a blocking backend where the system refuses threads."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import pytest
from tier_bench import Bench

from tierkv.dispatch.lanes.lane import ThreadLane
from tierkv.dispatch.lanes.ticket import Ticket
from tierkv.dispatch.threads.spawn import Handle, start_thread
from tierkv.types.tier_ops import TierOp, Verb


class Threads:
    """Starts no thread, and refuses further ones beyond a number."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.names: list[str] = []

    def __call__(self, name: str, runner: Any) -> Handle:
        """Pretend to start a thread."""
        if len(self.names) == self.allowed:
            raise RuntimeError("can't start new thread")
        self.names.append(name)
        return self

    def is_alive(self) -> bool:
        """Whether a thread runs."""
        return True


def test_fewer_threads_are_enough_for_a_while(bench: Bench) -> None:
    """A tier was refused where one of its threads could not be started, and those before it stayed for ever."""
    threads = Threads(1)
    lane = ThreadLane(bench.tier(), 3, 8, deque(), threads)
    for allowed in (1, 2, 3, 9):
        threads.allowed = allowed
        assert lane.offer(Ticket(TierOp(0, 0, Verb.PROBE, (), (), 1.0), 0.0))
        assert len(threads.names) == min(allowed, 3)
    assert len(set(threads.names)) == 3


def test_no_thread_is_an_error(bench: Bench) -> None:
    """A lane without any would take operations that nothing performs."""
    with pytest.raises(RuntimeError, match="can't start"):
        ThreadLane(bench.tier(), 3, 8, deque(), Threads(0))


def test_threads_end_where_their_start_is_interrupted(bench: Bench) -> None:
    """A key pressed at the opening of a stack, as in a notebook, left idle threads for the life of the process."""
    started: list[Handle] = []

    def spawn(name: str, runner: Any) -> Handle:
        started.append(start_thread(name, runner))
        if len(started) == 2:
            raise KeyboardInterrupt
        return started[-1]

    with pytest.raises(KeyboardInterrupt):
        ThreadLane(bench.tier(), 3, 8, deque(), spawn)
    for thread in started:
        assert isinstance(thread, threading.Thread)
        thread.join(60.0)
        assert not thread.is_alive()
