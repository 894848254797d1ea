"""A read that nothing waits for any more is not performed: it only ends, and says nothing about the tier."""

from __future__ import annotations

import pytest
from dispatch_bench import KEYS, dispatching
from tier_bench import Bench

from tierkv.dispatch import TierLimits
from tierkv.testing import faults
from tierkv.types.tier_ops import OutcomeKind, Verb


def never() -> bool:
    """Nothing waits."""
    return False


@pytest.mark.parametrize("asynchronous", [False, True])
def test_it_is_not_performed(request: pytest.FixtureRequest, asynchronous: bool) -> None:
    """Its slot keeps its bytes, and no statistic of the tier's calls counts it."""
    bench: Bench = request.getfixturevalue("async_bench" if asynchronous else "bench")
    with dispatching(bench, bench.tier(asynchronous=asynchronous)) as dispatch:
        dispatch.wait(dispatch.write(1, 1))
        bench.fill(2, KEYS[7], b"payload")
        state, stats = dispatch.dispatcher.states()[0], dispatch.dispatcher.stats.tiers[0]
        bench.clock.advance(1.0)
        assert dispatch.wait(dispatch.submit(Verb.READ, [1], [2], is_wanted=never)) == [[OutcomeKind.UNWANTED]]
        assert bench.payload(2, KEYS[7]) == b"payload"
        assert state.lane.tickets.moved_s == bench.clock(), "so no deadline of a read behind it passes"
        assert sum(state.seconds[Verb.READ]._counts) == sum(state.queue_seconds[Verb.READ]._counts) == 0
        assert (stats.unwanted, stats.failed, stats.refused, stats.bytes_read) == (1, 0, 0, 0)
        assert dispatch.wait(dispatch.submit(Verb.READ, [1], [2])) == [[OutcomeKind.OK]]
        assert stats.unwanted == 1


def test_it_is_neither_a_success_nor_a_failure(bench: Bench) -> None:
    """Any number of them leaves a tier as it was: in service, or with the failures that it has."""
    with dispatching(bench, limits=TierLimits(breaker_failures=3)) as dispatch:
        state = dispatch.dispatcher.states()[0]
        for number in range(5):
            dispatch.wait(dispatch.submit(Verb.READ, [number], [2], is_wanted=never))
        assert state.breaker.usable
        dispatch.wait(dispatch.write(1, 1))
        bench.backend.add("read_into", faults.raise_error(lambda: OSError("gone")))
        for _ in range(3):
            assert state.breaker.usable
            dispatch.wait(dispatch.submit(Verb.READ, [2], [2], is_wanted=never), dispatch.submit(Verb.READ, [1], [2]))
        assert not state.breaker.usable
