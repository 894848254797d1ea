"""A burst of loads from a disk tier that is slow and answers each call in time: all of it arrives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest

import tierkv_disk
from tierkv.testing.engines.hand_engine import SLOT_BYTES, HandRequest, Prompt
from tierkv.testing.engines.small_stack import READ_DEADLINE_S, TESTED, SmallStack

PROMPTS = [Prompt(number, 16) for number in range(8)]
CHUNKS = sum(prompt.chunks for prompt in PROMPTS)


def opened(place: Path, **tier: Any) -> SmallStack:
    """Stack over a disk tier with one thread, and a host tier for all prompts."""
    return SmallStack(
        tierkv_disk.PLUGIN,
        lambda path: tierkv_disk.DiskOptions(path=str(path), min_free_bytes=0),
        place / "disk",
        capacity_bytes=2 * CHUNKS * SLOT_BYTES,
        host_slots=2 * CHUNKS,
        tier={"io_threads": 1, **tier},
    )


class SlowReads:
    """Reads that each take three quarters of their deadline. The time passes between two steps, as in an engine."""

    def __init__(self, stack: SmallStack) -> None:
        self._stack = stack
        self._waiting: list[None] = []
        self._turns = Semaphore(0)
        self.calls = 0

    def __call__(self, batch: Any, inner: Callable[[Any], Any]) -> object:
        """A read on the tier's thread."""
        self._waiting.append(None)
        self._turns.acquire()
        return inner(batch)

    def end_one(self) -> None:
        """Let the time of a read pass, if one is under way."""
        if self._waiting:
            self._waiting.pop()
            self._stack.clock.advance(0.75 * READ_DEADLINE_S)
            self.calls += 1
            self._turns.release()


def answers(stack: SmallStack, requests: list[HandRequest], reads: SlowReads) -> list[int]:
    """Ask for all requests in each step until each is answered; the chunks offered to each."""
    known: dict[str, int] = {}

    def answered() -> bool:
        for request in requests:
            if request.request_id not in known and (chunks := stack.ask(request)) is not None:
                known[request.request_id] = chunks
        reads.end_one()
        return len(known) == len(requests)

    stack.step_until(answered, "all answers")
    return [known[request.request_id] for request in requests]


@pytest.mark.parametrize("tier", [{}, {"queue_ops_max": 2}], ids=["usual queue", "short queue"])
def test_a_burst_longer_than_the_deadline_of_a_read_arrives(tmp_path: Path, tier: dict[str, Any]) -> None:
    """Each read takes three quarters of its deadline, and eight or more wait for a thread. The later ones were misses,
    and the tier went out of service. Those for which a short queue has no room wait for it; they were refused."""
    with opened(tmp_path) as first:
        for prompt in PROMPTS:
            first.store(prompt)
    with opened(tmp_path, **tier) as stack:
        reads = SlowReads(stack)
        rule = stack.faulty.add("read_into", reads)
        requests = [stack.arrive(prompt) for prompt in PROMPTS]
        assert answers(stack, requests, reads) == [prompt.chunks for prompt in PROMPTS]
        assert reads.calls >= 8
        stack.faulty.rules.remove(rule)
        for request in requests:
            assert stack.load_for(request, request.prompt.chunks) == request.prompt.chunks
            stack.end(request)
        assert stack.stack.introspection.tiers()[TESTED].usable
