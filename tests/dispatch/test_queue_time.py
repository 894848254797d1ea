"""Time in a queue that moves is no delay of the tier: no deadline counts it, and nothing is given up for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from dispatch_bench import DispatchBench, dispatching, wait_for
from tier_bench import Bench

from tierkv.abc import Capabilities
from tierkv.dispatch import TierLimits
from tierkv.types.tier_ops import OutcomeKind, Verb

OK, TIMED_OUT = [OutcomeKind.OK], [OutcomeKind.TIMED_OUT]
ONE_CALL = Capabilities(preferred_batch=4, preferred_concurrency=1)


class Turns:
    """Calls that begin one by one, as the test allows, and take ``seconds`` each on the stack's clock."""

    def __init__(self, dispatch: DispatchBench, seconds: float) -> None:
        self._dispatch = dispatch
        self._seconds = seconds
        self.allowed = self.begun = 0

    @property
    def may_begin(self) -> bool:
        """Whether the next call may begin."""
        return self.begun < self.allowed

    def begin(self) -> None:
        """Begin the next call."""
        self.begun += 1
        self._dispatch.clock.advance(self._seconds)

    def __call__(self, batch: Any, inner: Callable[[Any], Any]) -> object:
        """A blocking call."""
        while not self.may_begin:
            time.sleep(0.001)
        self.begin()
        return inner(batch)

    async def call_async(self, batch: Any, inner: Callable[[Any], Any]) -> object:
        """A call on an event loop."""
        while not self.may_begin:  # noqa: ASYNC110 - an Event could not be set from the test's thread
            await asyncio.sleep(0.001)
        self.begin()
        return await inner(batch)  # type: ignore[misc]  # it is the async kind


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])
def test_a_long_queue_is_read_to_its_end(request: pytest.FixtureRequest, *, asynchronous: bool) -> None:
    """Twenty reads of 3 s each with a deadline of 5 s: all arrive. They were misses from the second one on, and the
    tier was taken out of service, though it had answered each call in time."""
    used: Bench = request.getfixturevalue("async_bench" if asynchronous else "bench")
    tier = used.tier(asynchronous=asynchronous, capabilities=ONE_CALL)
    with dispatching(used, tier) as dispatch:
        dispatch.wait(*[dispatch.write(number, number) for number in range(4)])
        turns = Turns(dispatch, 3.0)
        if asynchronous:
            inner = used.files.read_into
            used.files.read_into = lambda batch: turns.call_async(batch, inner)  # type: ignore[method-assign]
        else:
            used.backend.add("read_into", turns)
        reads = [dispatch.submit(Verb.READ, [number % 4], [4 + number % 4], deadline_s=5.0) for number in range(20)]
        for number, read in enumerate(reads, 1):
            turns.allowed = number
            assert dispatch.wait(read) == [OK]
        assert dispatch.health() == []


def test_a_call_has_the_whole_time_from_its_begin(bench: Bench) -> None:
    """A read that waited nearly as long as its deadline still has all of it; then it is late, and runs on."""
    with dispatching(bench, bench.tier(capabilities=ONE_CALL)) as dispatch:
        dispatch.wait(dispatch.write(1, 1))
        turns = Turns(dispatch, 8.0)
        bench.backend.add("read_into", turns)
        first, second = (dispatch.submit(Verb.READ, [1], [slot], deadline_s=10.0) for slot in (2, 3))
        turns.allowed = 1
        assert dispatch.wait(first) == [OK]
        wait_for(lambda: bench.backend.calls.count("read_into") == 2, "the second call")
        dispatch.clock.advance(9.0)
        dispatch.drain()
        assert dispatch.completions(second) == []
        dispatch.clock.advance(1.0)
        dispatch.drain()
        assert dispatch.kinds(second) == TIMED_OUT
        assert not dispatch.completions(second)[-1].ended
        turns.allowed = 2
        dispatch.wait(second)


def test_a_queue_behind_a_hung_call_ends_with_its_deadline(bench: Bench) -> None:
    """The tier moved last when a call ended, also if the engine was silent since. From then on a read that waits has
    its deadline, no longer."""
    with dispatching(bench, bench.tier(capabilities=ONE_CALL), limits=TierLimits(breaker_failures=100)) as dispatch:
        dispatch.wait(dispatch.write(1, 1))
        turns = Turns(dispatch, 4.0)
        bench.backend.add("read_into", turns)
        reads = [dispatch.submit(Verb.READ, [1], [slot], deadline_s=5.0) for slot in range(2, 7)]
        turns.allowed = 3
        wait_for(lambda: len(dispatch.dispatcher._done) == 3, "three reads to end, which the engine does not see")
        wait_for(lambda: bench.backend.calls.count("read_into") == 4, "the hung call")
        dispatch.clock.advance(4.0)
        assert dispatch.wait(*reads[:3]) == [OK] * 3
        hung, waiting = reads[3:]
        assert dispatch.completions(hung) == dispatch.completions(waiting) == []
        dispatch.clock.advance(1.0)
        dispatch.drain()
        assert [dispatch.completions(op_id)[-1].ended for op_id in (hung, waiting)] == [False, True]
        turns.allowed = 5
        dispatch.wait(hung)


def test_deadlines_that_are_put_off_cost_keys_of_a_step(bench: Bench) -> None:
    """Thousands of reads that were submitted together are looked at together: a step looks at as many as its budget."""
    with dispatching(bench, bench.tier(capabilities=ONE_CALL)) as dispatch:
        dispatch.wait(dispatch.write(1, 1))
        turns = Turns(dispatch, 6.0)
        bench.backend.add("read_into", turns)
        reads = [dispatch.submit(Verb.READ, [1], [2], deadline_s=10.0) for _ in range(300)]
        turns.allowed = 1
        wait_for(lambda: bool(dispatch.dispatcher._done), "the first read")
        dispatch.clock.advance(5.0)
        heap = dispatch.dispatcher._deadlines._heap
        for _ in range(4):
            overdue = sum(due_s <= dispatch.clock() for due_s, _, _ in heap)
            dispatch.drain(50)
            assert 0 < overdue - sum(due_s <= dispatch.clock() for due_s, _, _ in heap) <= 52
        assert [dispatch.completions(read) for read in reads[1:]] == [[]] * 299
        turns.allowed = len(reads)
        dispatch.wait(reads[0])
