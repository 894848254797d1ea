"""Breaker: its table, and a tier that is left alone and recovers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from threading import Event
from typing import Any

import pytest
from dispatch_bench import KEYS, dispatching, wait_for
from hypothesis import given
from hypothesis import strategies as st
from tier_bench import Bench, compressible

from tierkv.abc import Capabilities
from tierkv.dispatch import TierLimits
from tierkv.dispatch.health.breaker import TABLE, Breaker, State
from tierkv.dispatch.health.breaker import Event as Happened
from tierkv.errors import BackendUnavailableError, IllegalTransitionError, PartUnavailableError
from tierkv.frames.frame import HEADER_BYTES
from tierkv.testing import faults
from tierkv.types.keys import Key
from tierkv.types.tier_ops import Completion, OutcomeKind, TierHealth, Verb

FAILED, REFUSED, ABSENT = [OutcomeKind.FAILED], [OutcomeKind.REFUSED], [OutcomeKind.ABSENT]
LIMITS = TierLimits(breaker_failures=3, breaker_cooldown_s=10.0, trial_deadline_s=2.0)
STATES = {
    State.CLOSED: (),
    State.OPEN: (Happened.TRIPPED,),
    State.HALF_OPEN: (Happened.TRIPPED, Happened.TRIAL_BEGAN),
}


@pytest.mark.parametrize(("state", "event"), list(product(State, Happened)))
def test_every_cell_of_the_table(state: State, event: Happened) -> None:
    """Each event leads to the state in the table. An event that the table lacks raises."""
    breaker = Breaker("disk", 10, 1.0)
    for past in STATES[state]:
        breaker._on(past, 0.0)
    if (state, event) in TABLE:
        breaker._on(event, 0.0)
        assert breaker.state is TABLE[state, event]
    else:
        with pytest.raises(IllegalTransitionError, match=f"breaker 'disk' is {state.value}: event '{event.value}'"):
            breaker._on(event, 0.0)


def test_an_illegal_transition_shows_the_log() -> None:
    """An illegal transition is a bug of the framework, and hard to find without the previous transitions."""
    breaker = Breaker("disk", 1, 0.0)
    breaker.failed(1.0)
    breaker.trial_began(2.0)
    breaker.trial_ended(3.0, answered=True)
    with pytest.raises(
        IllegalTransitionError, match=r"tripped -> open; trial began -> half_open; trial succeeded -> closed$"
    ):
        breaker.trial_began(4.0)


@given(st.lists(st.sampled_from(["ok", "bad", "wait"]), max_size=60))
def test_it_opens_exactly_after_failures_in_a_row(story: list[str]) -> None:
    """The breaker agrees with a counting model: never early, never late, and not usable again without a trial."""
    breaker, in_a_row, opened_s, now_s = Breaker("disk", 3, 5.0), 0, None, 0.0
    for word in story:
        if word == "wait":
            now_s += 2.0
        elif word == "ok":
            breaker.succeeded()
            in_a_row = 0
        else:
            breaker.failed(now_s)
            in_a_row += 1
        if in_a_row >= 3 and opened_s is None:
            opened_s = now_s
        assert breaker.usable == (opened_s is None)
        assert breaker.trial_is_due(now_s) == (opened_s is not None and now_s >= opened_s + 5.0 / 8)


def test_a_short_outage_ends_soon_and_a_tier_that_flaps_rests() -> None:
    """A disk that was full for 0.7 s was not written for five: trials come soon at first, then at longer intervals."""
    breaker, now_s, pauses = Breaker("disk", 1, 8.0), 0.0, []

    def outage(trials: int) -> None:
        """Let some trials fail, and one succeed; note the time before each."""
        nonlocal now_s
        breaker.failed(now_s)
        for number in range(trials + 1):
            opened_s = now_s
            while not breaker.trial_is_due(now_s):
                now_s += 1 / 64
            pauses.append(now_s - opened_s)
            breaker.trial_began(now_s)
            breaker.trial_ended(now_s, answered=number == trials)

    outage(12)
    growing = [1.25**number for number in range(10)]
    assert pauses == pytest.approx([*growing, 8.0, 8.0, 8.0], abs=1 / 64)
    now_s += 7.9  # fails again soon: the tier flaps
    outage(0)
    now_s += 8.0
    outage(0)
    now_s += 1.0
    outage(1)
    assert pauses[13:] == pytest.approx([8.0, 1.0, 2.0, 2.5], abs=1 / 64)


def test_few_failing_trials_delay_the_return_little() -> None:
    """A storage that fails a number of times, and not for a time, loses one failure per trial. Pauses that doubled made
    four of them 14.4 s."""
    breaker, now_s = Breaker("disk", 1, 5.0), 0.0
    breaker.failed(now_s)
    for number in range(5):
        while not breaker.trial_is_due(now_s):
            now_s += 1 / 64
        breaker.trial_began(now_s)
        breaker.trial_ended(now_s, answered=number == 4)
    assert breaker.usable
    assert 3.0 < now_s < 6.0


def test_it_starts_counting_anew() -> None:
    """Failures from before the trial must not open it at the first failure after it."""
    breaker = Breaker("disk", 3, 0.0)
    for now_s in range(3):
        breaker.failed(now_s)
    breaker.trial_began(3.0)
    breaker.failed(3.5)  # a straggler
    breaker.trial_ended(4.0, answered=True)
    for now_s in range(5, 7):
        breaker.failed(now_s)
        assert breaker.usable
    breaker.failed(7.0)
    assert not breaker.usable


def test_it_opens_is_reported_once_and_recovers(bench: Bench) -> None:
    """A dead tier must not cost a deadline per request, and must recover without intervention."""
    rule = bench.backend.add("contains", faults.raise_error(lambda: OSError("gone")))
    with dispatching(bench, limits=LIMITS) as dispatch:
        assert dispatch.wait(*[dispatch.submit(Verb.PROBE, [1]) for _ in range(3)]) == [FAILED] * 3
        dispatch.wait_health(False)
        (health,) = [report for report in dispatch.reports if isinstance(report, TierHealth)]
        assert health.tier == 0
        assert health.reason == "3 operations in a row failed, the last with: OSError: gone"
        assert dispatch.wait(dispatch.submit(Verb.PROBE, [1]), dispatch.submit(Verb.DELETE, [1])) == [REFUSED] * 2
        calls = len(bench.backend.calls)
        dispatch.clock.advance(1.2)
        dispatch.drain()
        assert dispatch.dispatcher.pending_trials() == 0
        dispatch.clock.advance(0.05)  # the first trial fails
        dispatch.drain()
        wait_for(lambda: len(bench.backend.calls) == calls + 1, "the trial")
        wait_for(lambda: dispatch.drain() == [] and dispatch.dispatcher._in_flight == 0, "its end")
        assert dispatch.health() == [False]
        assert dispatch.wait(dispatch.submit(Verb.PROBE, [1])) == [REFUSED]
        bench.backend.rules.remove(rule)
        dispatch.clock.advance(2.5)  # the second one does not
        dispatch.wait_health(False, True)
        assert dispatch.wait(dispatch.submit(Verb.PROBE, [1])) == [ABSENT]
        stats = dispatch.dispatcher.stats.tiers[0]
        assert (stats.breaker_opens, stats.ops, stats.failed) == (1, 4, 3)
        assert all(report.op_id >= 0 for report in dispatch.reports if isinstance(report, Completion))


def test_a_tier_of_several_servers_returns_when_one_lives(bench: Bench) -> None:
    """Each trial asks for another key, so for another server: one that stays dead must not keep the tier out."""
    first: list[Key] = []

    def one_server_is_dead(keys: Sequence[Key], inner: Callable[[Any], object]) -> object:
        """Keys of a dead server fail: the first that was asked for after the outage began, and no other."""
        first.extend(keys[:1] if not first else ())
        if first[0] in keys:
            raise OSError("its server is dead")
        return inner(keys)

    with dispatching(bench, limits=LIMITS) as dispatch:
        outage = bench.backend.add("contains", faults.raise_error(lambda: OSError("all are gone")))
        dispatch.wait(*[dispatch.submit(Verb.PROBE, [1]) for _ in range(3)])
        dispatch.wait_health(False)
        bench.backend.rules.remove(outage)
        bench.backend.add("contains", one_server_is_dead)
        for _ in range(2):  # the first trial meets the dead server
            dispatch.clock.advance(10.0)
            dispatch.drain()
            wait_for(lambda: dispatch.drain() == [] and dispatch.dispatcher._in_flight == 0, "end of the trial")
        dispatch.wait_health(False, True)
        assert dispatch.wait(dispatch.submit(Verb.PROBE, [1])) == [ABSENT]


def test_a_success_in_between_keeps_it_closed(bench: Bench) -> None:
    """A tier that fails occasionally stays usable."""
    with dispatching(bench, limits=LIMITS) as dispatch:
        for _ in range(5):
            bench.backend.add("contains", faults.raise_error(lambda: OSError("hiccup")), times=2)
            assert dispatch.wait(dispatch.submit(Verb.PROBE, [1])) == [FAILED]
            assert dispatch.wait(dispatch.submit(Verb.PROBE, [1])) == [FAILED]
            assert dispatch.wait(dispatch.submit(Verb.PROBE, [1])) == [ABSENT]
        assert dispatch.health() == []


def test_misses_damage_and_fullness_are_answers(bench: Bench) -> None:
    """A tier that answers works. Opening on corrupt chunks would turn damage to one file into loss of the tier."""
    with dispatching(bench, limits=LIMITS) as dispatch:
        dispatch.wait(dispatch.write(0, 0))
        content = bytearray(bench.file(KEYS[0]).read_bytes())
        content[HEADER_BYTES] ^= 1
        bench.file(KEYS[0]).write_bytes(content)
        bench.backend.add("write", faults.raise_error(lambda: OSError(28, "full")))
        for _ in range(4):
            assert dispatch.wait(dispatch.submit(Verb.READ, [0], [1])) == [[OutcomeKind.CORRUPT]]
            assert dispatch.wait(dispatch.submit(Verb.READ, [1], [1])) == [ABSENT]
            assert dispatch.wait(dispatch.write(2, 2)) == [[OutcomeKind.NO_SPACE]]
        assert dispatch.health() == []


def test_one_answered_key_is_an_answer(bench: Bench) -> None:
    """One bad key in every batch must not make a tier unusable for all others."""
    bench.backend.add("contains", faults.return_error(lambda: OSError("bad key"), index=0))
    with dispatching(bench, limits=LIMITS) as dispatch:
        for _ in range(6):
            dispatch.wait(dispatch.submit(Verb.PROBE, [1, 2]))
        assert dispatch.health() == []


def test_one_dead_server_of_several_takes_no_tier_out(bench: Bench) -> None:
    """Operations may concern the dead one alone: chunks of the others are asked for once, and not written again."""
    with dispatching(bench, limits=LIMITS) as dispatch:
        away = faults.raise_error(lambda: PartUnavailableError("node 2 is dead, others serve"))
        verbs: list[Any] = ["contains", "read_into", "write"]
        rules = [bench.backend.add(verb, away) for verb in verbs]
        for _ in range(4):
            assert dispatch.wait(dispatch.submit(Verb.PROBE, [1])) == [FAILED]
            assert dispatch.wait(dispatch.submit(Verb.READ, [1], [1])) == [FAILED]
            assert dispatch.wait(dispatch.write(1, 1)) == [FAILED]
        assert dispatch.health() == []
        assert dispatch.dispatcher.health()[0] == (True, True, False)
        for rule in rules:
            bench.backend.rules.remove(rule)
        bench.backend.add("contains", faults.raise_error(lambda: BackendUnavailableError("all are dead")))
        for _ in range(3):
            dispatch.wait(dispatch.submit(Verb.PROBE, [1]))
        dispatch.wait_health(False)


def test_missed_deadlines_open_it_and_a_hung_trial_keeps_it_open(bench: Bench, gate: Event) -> None:
    """A dead mount or bucket usually does not answer at all, trials included."""
    bench.backend.add("read_into", faults.hang_until(gate))
    bench.backend.add("contains", faults.hang_until(gate))
    with dispatching(bench, limits=LIMITS) as dispatch:
        reads = [dispatch.submit(Verb.READ, [number], [number]) for number in range(3)]
        wait_for(lambda: len(bench.backend.calls) == 2, "two hung calls")
        dispatch.clock.advance(10.0)
        dispatch.drain()
        assert [dispatch.completions(op_id)[0].ended for op_id in reads] == [False, False, True]
        assert dispatch.health() == [False]
        for _ in range(4):  # trials wait for a thread that never comes
            dispatch.clock.advance(10.0)
            dispatch.drain()
            dispatch.clock.advance(2.0)
            dispatch.drain()
        assert dispatch.health() == [False]
        assert dispatch.dispatcher.pending() == 2
        gate.set()
        dispatch.wait(*reads[:2])
        dispatch.clock.advance(10.0)
        dispatch.wait_health(False, True)
        assert dispatch.dispatcher.pending() == 0


@pytest.mark.parametrize("moves", [True, False])
def test_a_long_queue_is_no_failure(bench: Bench, gate: Event, *, moves: bool) -> None:
    """A probe waits behind reads for longer than its deadline: while these end, it is not late. If none of them ends
    for as long, the tier hangs."""
    second, begun = Event(), list[object]()

    def waits(batch: Any, inner: Callable[[Any], Any]) -> object:
        begun.append(batch)
        (gate if len(begun) == 1 else second).wait()
        return inner(batch)

    bench.backend.add("read_into", waits)
    tier = bench.tier(capabilities=Capabilities(preferred_concurrency=1))
    with dispatching(bench, tier, limits=TierLimits(breaker_failures=1)) as dispatch:
        reads = [dispatch.submit(Verb.READ, [number], [number], deadline_s=1e6) for number in range(2)]
        probe = dispatch.submit(Verb.PROBE, [2], deadline_s=5.0)
        wait_for(lambda: len(begun) == 1, "the first read")
        dispatch.clock.advance(3.0)
        if moves:
            gate.set()
            dispatch.wait(reads[0])
            wait_for(lambda: len(begun) == 2, "the second read")
        dispatch.clock.advance(2.0)
        dispatch.drain()
        assert [report.ended for report in dispatch.completions(probe)] == ([] if moves else [True])
        assert dispatch.health() == ([] if moves else [False])
        dispatch.clock.advance(3.0)
        dispatch.drain()
        assert dispatch.kinds(probe) == REFUSED
        assert dispatch.health() == [False]
        gate.set()
        second.set()
        dispatch.wait(*reads)


def test_trials_of_a_dead_tier_do_not_pile_up(bench: Bench, gate: Event) -> None:
    """Promise 6: with a trial every few seconds for a week, the queue of a hung tier stays bounded."""
    bench.backend.add("contains", faults.hang_until(gate))
    limits = TierLimits(queue_ops_max=4, breaker_failures=1, breaker_cooldown_s=1.0, trial_deadline_s=1.0)
    tier = bench.tier(capabilities=Capabilities(preferred_concurrency=1))
    with dispatching(bench, tier, limits=limits) as dispatch:
        dispatch.submit(Verb.PROBE, [1])
        wait_for(lambda: bool(bench.backend.calls), "the hung call")
        for _ in range(200):
            dispatch.clock.advance(60.0)
            dispatch.drain()
        lane = dispatch.dispatcher._tier_states[0].lane
        assert len(lane.tickets) == 4
        assert dispatch.health() == [False]
        gate.set()

        def recovered() -> bool:
            dispatch.clock.advance(1.0)
            dispatch.drain()
            return dispatch.health() == [False, True]

        wait_for(recovered, "recovery")


def test_late_stragglers_do_not_close_it(bench: Bench, gate: Event) -> None:
    """A call that began before the breaker opened proves nothing. Only a trial closes it."""
    with dispatching(bench, limits=LIMITS) as dispatch:
        dispatch.wait(dispatch.write(0, 0))
        bench.fill(0, KEYS[0], compressible(0))
        hang = bench.backend.add("read_into", faults.hang_until(gate), times=1)
        straggler = dispatch.submit(Verb.READ, [0], [1], deadline_s=1e6)
        wait_for(lambda: hang.times_left == 0, "the hung call")
        bench.backend.add("contains", faults.raise_error(lambda: OSError("gone")), times=3)
        dispatch.wait(*[dispatch.submit(Verb.PROBE, [1]) for _ in range(3)])
        dispatch.wait_health(False)
        gate.set()
        assert dispatch.wait(straggler) == [[OutcomeKind.OK]]
        assert dispatch.wait(dispatch.submit(Verb.PROBE, [1])) == [REFUSED]
