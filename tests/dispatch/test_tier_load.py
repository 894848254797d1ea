"""Queues of a tier as an operator sees them: length, age, calls under way, and the time before a call apart."""

from __future__ import annotations

from threading import Event

import pytest
from dispatch_bench import KEYS, dispatching, wait_for
from tier_bench import Bench

from tierkv.dispatch import TierLimits
from tierkv.frames.frame import HEADER_BYTES
from tierkv.metrics.watched import TierLoad
from tierkv.testing import faults
from tierkv.types.tier_ops import OutcomeKind, Verb

ONE_THREAD = TierLimits(io_threads=1, breaker_failures=2, breaker_cooldown_s=10.0)


def test_a_queue_has_a_length_and_an_age(bench: Bench, gate: Event) -> None:
    """One call hangs and two operations wait behind it: an operator sees for how long."""
    with dispatching(bench, limits=ONE_THREAD) as dispatch:
        state = dispatch.dispatcher.states()[0]
        assert state.load() == TierLoad(0, 0.0, 0, 0, 0)
        bench.backend.add("write", faults.hang_until(gate))
        first = dispatch.write(0, 0, deadline_s=1000.0)
        wait_for(lambda: state.load().queued_ops == 0, "the first call")
        dispatch.clock.advance(5.0)
        second = dispatch.write(1, 1, deadline_s=1000.0)
        dispatch.clock.advance(2.0)
        third = dispatch.write(2, 2, deadline_s=1000.0)
        assert state.load() == TierLoad(queued_ops=2, queue_age_s=2.0, running_ops=1, late_ops=0, breaker=0)
        dispatch.clock.advance(3.0)
        gate.set()
        dispatch.wait(first, second, third)
        assert state.load() == TierLoad(0, 0.0, 0, 0, 0)
        assert state.seconds[Verb.WRITE].total == 10.0 + 5.0 + 3.0
        assert state.queue_seconds[Verb.WRITE].total == 5.0 + 3.0, "the first one did not wait"
        assert state.queue_seconds[Verb.WRITE].count == 3


def test_a_call_that_hangs_is_late_until_it_returns(bench: Bench, gate: Event) -> None:
    """A deadline ends the wait of the engine, not the call: an alert must see that the thread is still in it."""
    with dispatching(bench, limits=ONE_THREAD) as dispatch:
        state = dispatch.dispatcher.states()[0]
        bench.backend.add("write", faults.hang_until(gate), times=1)
        first = dispatch.write(0, 0, deadline_s=5.0)
        wait_for(lambda: state.load().queued_ops == 0, "the first call")
        second = dispatch.write(1, 1, deadline_s=5.0)
        assert state.load().late_ops == 0
        dispatch.clock.advance(6.0)
        dispatch.drain()
        late = state.load().late_ops
        gate.set()
        assert late == 1, "the second one was never in a call"
        dispatch.wait(first, second)
        assert state.load().late_ops == 0


def test_the_breaker_has_a_number(bench: Bench, gate: Event) -> None:
    """0 in service, 2 out of service, 1 while a trial is under way."""
    with dispatching(bench, limits=ONE_THREAD) as dispatch:
        state = dispatch.dispatcher.states()[0]
        rule = bench.backend.add("contains", faults.raise_error(lambda: OSError("gone")))
        dispatch.wait(*[dispatch.submit(Verb.PROBE, [1]) for _ in range(2)])
        assert state.load().breaker == 2
        bench.backend.rules.remove(rule)
        bench.backend.add("contains", faults.hang_until(gate), times=1)
        dispatch.clock.advance(10.0)
        dispatch.drain()
        assert state.load().breaker == 1
        gate.set()
        dispatch.wait_health(False, True)
        assert state.load().breaker == 0


def test_frames_that_are_set_aside_are_counted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A growing number means a device that loses bytes; a frame that is only deleted does not count."""
    aside: list[bytes] = []
    with dispatching(bench) as dispatch:
        for number in range(2):
            dispatch.wait(dispatch.write(number, number))
            damaged = bytearray(bench.file(KEYS[number]).read_bytes())
            damaged[HEADER_BYTES] ^= 1
            bench.file(KEYS[number]).write_bytes(damaged)
        assert dispatch.wait(dispatch.submit(Verb.READ, [0], [3])) == [[OutcomeKind.CORRUPT]]
        assert dispatch.dispatcher.stats.tiers[0].quarantined == 0, "this backend sets nothing aside"
        monkeypatch.setattr(bench.backend, "quarantine", lambda key, _reason: aside.append(key), raising=False)
        assert dispatch.wait(dispatch.submit(Verb.READ, [1], [3])) == [[OutcomeKind.CORRUPT]]
        assert dispatch.dispatcher.stats.tiers[0].quarantined == len(aside) == 1
