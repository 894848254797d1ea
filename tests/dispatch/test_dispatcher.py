"""Dispatcher with real threads and real files: outcomes, order, bounds, deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
from dispatch_bench import KEYS, PATIENCE_S, dispatching, wait_for
from plain_files import PlainFiles
from tier_bench import Bench, compressible, make_bench

from tierkv.abc import Capabilities, WriteRequest, WriteResult
from tierkv.dispatch import Dispatcher, TierLimits
from tierkv.frames.frame import HEADER_BYTES
from tierkv.testing import faults
from tierkv.tiers.retry import RetryLimits, Timing
from tierkv.types.tier_ops import OP_KEYS, OutcomeKind, TierHealth, TierOp, Verb

OK, ABSENT, CORRUPT = OutcomeKind.OK, OutcomeKind.ABSENT, OutcomeKind.CORRUPT
FAILED, TIMED_OUT, REFUSED = OutcomeKind.FAILED, OutcomeKind.TIMED_OUT, OutcomeKind.REFUSED
ONE_THREAD = Capabilities(preferred_batch=4, preferred_concurrency=1)


def test_every_verb_comes_back(bench: Bench) -> None:
    """Operations go down, outcomes return, and the counters match."""
    with dispatching(bench) as dispatch:
        written = [dispatch.write(number, number) for number in range(3)]
        assert dispatch.wait(*written) == [[OK]] * 3
        probe, read = dispatch.submit(Verb.PROBE, [1, 5]), dispatch.submit(Verb.READ, [2, 7, 0], [5, 6, 7])
        assert dispatch.wait(probe, read) == [[OK, ABSENT], [OK, ABSENT, OK]]
        assert (bench.payload(5, KEYS[2]), bench.payload(7, KEYS[0])) == (compressible(2), compressible(0))
        delete = dispatch.submit(Verb.DELETE, [0, 1])
        assert dispatch.wait(delete) == [[OK, OK]]
        assert not bench.file(KEYS[0]).exists()
        stats, frame_bytes = dispatch.dispatcher.stats.tiers[0], bench.file(KEYS[2]).stat().st_size
        assert (stats.ops, stats.keys) == (6, 10)
        assert stats.bytes_written == 3 * frame_bytes
        assert stats.bytes_read == stats.bytes_verified == 2 * frame_bytes
        assert dispatch.dispatcher.pending() == 0
        assert all(len(dispatch.completions(op_id)) == 1 for op_id in range(6))


def test_elapsed_time_is_on_the_stacks_clock(bench: Bench, gate: Event) -> None:
    """Load-or-recompute decisions use this number."""
    bench.backend.add("contains", faults.hang_until(gate))
    with dispatching(bench) as dispatch:
        probe = dispatch.submit(Verb.PROBE, [1])
        dispatch.clock.advance(2.5)
        gate.set()
        dispatch.wait(probe)
        assert dispatch.completions(probe)[0].elapsed_s == 2.5


def test_time_in_the_queue_is_told_apart(bench: Bench, gate: Event) -> None:
    """The speed of questions to a shared tier must not contain that of the calls ahead of them."""
    bench.backend.add("contains", faults.hang_until(gate))
    with dispatching(bench) as dispatch:
        probes = [dispatch.submit(Verb.PROBE, [number]) for number in range(3)]
        wait_for(lambda: len(bench.backend.calls) == 2, "both threads to hang")
        dispatch.clock.advance(2.5)
        gate.set()
        dispatch.wait(*probes)
        assert [dispatch.completions(probe)[0].elapsed_s for probe in probes] == [2.5] * 3
        assert [dispatch.completions(probe)[0].queued_s for probe in probes] == [0.0, 0.0, 2.5]


def test_time_of_the_engine_is_not_counted_as_the_tiers(bench: Bench) -> None:
    """A prefill step may last a second.

    A read that ended in its first milliseconds took milliseconds. Otherwise every tier would seem slower than computing
    exactly when computing is slow.
    """
    with dispatching(bench) as dispatch:
        dispatch.wait(dispatch.write(1, 1))
        read = dispatch.submit(Verb.READ, [1], [2])
        wait_for(lambda: bool(dispatch.dispatcher._done), "the read to end")
        dispatch.clock.advance(1.0)  # the engine's step
        dispatch.wait(read)
        assert dispatch.completions(read)[0].elapsed_s == 0.0


def test_a_wedged_backend_delays_neither_submit_nor_drain(bench: Bench, gate: Event) -> None:
    """Promise 2: with every call hung, submit and drain return, however often the engine calls them."""
    for verb in ("contains", "read_into", "write", "delete"):
        bench.backend.add(verb, faults.hang_until(gate))  # type: ignore[arg-type]  # literal names
    with dispatching(bench, limits=TierLimits(queue_ops_max=10, breaker_failures=1000)) as dispatch:
        stuck = [dispatch.submit(Verb.READ, [number], [number]) for number in range(2)]
        wait_for(lambda: len(bench.backend.calls) == 2, "both threads to hang")

        def engine() -> None:
            for number in range(500):
                dispatch.submit(Verb.READ, [number % 64], [number % 8])
                dispatch.drain()
                dispatch.clock.advance(1.0)

        steps = threading.Thread(target=engine, daemon=True)
        steps.start()
        steps.join(PATIENCE_S)
        assert not steps.is_alive(), "a call of the engine's thread waits for the backend"
        outcomes = [dispatch.kinds(op_id) for op_id in range(490)]
        assert {kind for (kind,) in outcomes} == {TIMED_OUT, REFUSED}
        # What never began ended at its deadline, or was refused.
        assert [op_id for op_id in range(490) if not dispatch.completions(op_id)[-1].ended] == stuck
        gate.set()
        assert dispatch.wait(*stuck) == [[TIMED_OUT]] * 2


@pytest.mark.parametrize("answers", [False, True])
def test_a_silent_tier_leaves_after_two_deadlines(bench: Bench, gate: Event, answers: bool) -> None:
    """Every request that arrives waits for a tier that hangs. With few operations in flight, five missed deadlines in a
    row would take a minute. A tier that answers meanwhile has lost two calls, and no more."""
    bench.backend.add("read_into", faults.hang_until(gate))
    with dispatching(bench, bench.tier(capabilities=replace(ONE_THREAD, preferred_concurrency=3))) as dispatch:
        state = dispatch.dispatcher._tier_states[0]
        dispatch.submit(Verb.READ, [0], [0], deadline_s=10.0)
        dispatch.clock.advance(5.0)
        dispatch.submit(Verb.READ, [1], [1], deadline_s=10.0)
        wait_for(lambda: bench.backend.calls.count("read_into") == 2, "both calls")
        dispatch.clock.advance(5.0)
        dispatch.drain()
        assert state.breaker.usable, "one call may have lost its connection"
        if answers:
            dispatch.wait(dispatch.submit(Verb.PROBE, [2]))
        dispatch.clock.advance(5.0)
        health = [report for report in dispatch.drain() if isinstance(report, TierHealth)]
        assert state.breaker.usable == answers
        assert (
            [report.reason for report in health] == []
            if answers
            else ["it has answered nothing for 10 s, and operations failed, the last with: deadline missed"]
        )
        gate.set()


def test_reads_of_a_tier_that_hangs_are_given_up_with_it(bench: Bench, gate: Event) -> None:
    """Requests wait for the reads under way. Once the tier counts as hanging these end at once as misses, the queued
    ones whole. Of a running one the slot stays in use until its call has ended, because that may still write there."""
    bench.backend.add("read_into", faults.hang_until(gate))
    with dispatching(bench, bench.tier(capabilities=replace(ONE_THREAD, preferred_concurrency=3))) as dispatch:
        silent = [dispatch.submit(Verb.READ, [number], [number]) for number in range(2)]
        wait_for(lambda: bench.backend.calls.count("read_into") == 2, "the silent calls")
        dispatch.clock.advance(9.0)
        running = dispatch.submit(Verb.READ, [2], [2])
        wait_for(lambda: bench.backend.calls.count("read_into") == 3, "all calls")
        queued, probe = dispatch.submit(Verb.READ, [3], [3]), dispatch.submit(Verb.PROBE, [4])
        write = dispatch.write(5, 5)
        dispatch.clock.advance(1.0)
        dispatch.drain()
        assert dispatch.health() == [False]
        assert [dispatch.kinds(op_id) for op_id in (running, queued)] == [[TIMED_OUT]] * 2
        ended = [[report.ended for report in dispatch.completions(op_id)] for op_id in (running, queued, probe, write)]
        assert ended == [[False], [True], [True], []]
        health = next(report for report in dispatch.reports if isinstance(report, TierHealth))
        assert dispatch.reports.index(health) < dispatch.reports.index(dispatch.completions(running)[0])
        gate.set()
        assert dispatch.wait(*silent, running) == [[TIMED_OUT]] * 3
        assert dispatch.dispatcher.pending_trials() == 0


@pytest.mark.parametrize("took_s", [0.5, 3.0])
def test_failures_after_long_tries_count_as_silence(bench: Bench, took_s: float) -> None:
    """A plugin whose own time limit is short fails before the deadline, after each of its tries. That is a hang, too.
    Errors that come back fast cost nothing, and five of them are needed."""
    with dispatching(bench) as dispatch:

        def time_passes(batch: Any, inner: Callable[[Any], Any]) -> object:
            dispatch.clock.advance(took_s)
            raise TimeoutError("no answer")

        bench.backend.add("read_into", time_passes)
        for number in range(2):
            dispatch.wait(dispatch.submit(Verb.READ, [number], [number], deadline_s=100.0))
        assert dispatch.dispatcher._tier_states[0].breaker.usable == (took_s == 0.5)


def test_one_wedged_tier_does_not_hold_up_another(bench: Bench, tmp_path: Any, gate: Event) -> None:
    """Each tier has its own threads: a dead object store must not delay the local disk."""
    other = make_bench(tmp_path / "other", beside=bench)
    bench.backend.add("contains", faults.hang_until(gate))
    with dispatching(bench, bench.tier(), other.tier()) as dispatch:
        stuck = [dispatch.submit(Verb.PROBE, [1]) for _ in range(20)]
        free = [dispatch.submit(Verb.PROBE, [1], tier=1) for _ in range(20)]
        assert dispatch.wait(*free) == [[ABSENT]] * 20
        assert not any(dispatch.completions(op_id) for op_id in stuck)
        gate.set()


def test_late_data_is_never_accepted(bench: Bench, gate: Event) -> None:
    """A missed deadline is reported at once. The slot is released when the call has ended, and its data is dropped."""
    with dispatching(bench) as dispatch:
        dispatch.wait(dispatch.write(0, 0))
        bench.backend.add("read_into", faults.hang_until(gate))
        read = dispatch.submit(Verb.READ, [0], [3], deadline_s=5.0)
        wait_for(lambda: "read_into" in bench.backend.calls, "the call")
        dispatch.clock.advance(4.9)
        assert dispatch.drain() == []
        dispatch.clock.advance(0.1)
        dispatch.drain()
        (early,) = dispatch.completions(read)
        assert (early.ended, dispatch.kinds(read), dispatch.dispatcher.pending()) == (False, [TIMED_OUT], 1)
        dispatch.clock.advance(100.0)
        assert dispatch.drain() == []
        gate.set()
        assert dispatch.wait(read) == [[TIMED_OUT]]
        assert [report.ended for report in dispatch.completions(read)] == [False, True]
        assert dispatch.dispatcher.pending() == 0
        stats = dispatch.dispatcher.stats.tiers[0]
        assert (stats.bytes_verified, stats.timed_out) == (0, 1)
        assert stats.bytes_read == stats.bytes_written > 0


def test_a_waiting_operation_is_cancelled_at_its_deadline(bench: Bench, gate: Event) -> None:
    """Its slots are free at once, and the backend is never called."""
    bench.backend.add("write", faults.hang_until(gate))
    with dispatching(bench, bench.tier(capabilities=ONE_THREAD)) as dispatch:
        running, waiting = dispatch.write(0, 0, deadline_s=50.0), dispatch.write(1, 1, deadline_s=5.0)
        wait_for(lambda: bench.backend.calls == ["write"], "the call")
        dispatch.clock.advance(5.0)
        dispatch.drain()
        assert (dispatch.kinds(waiting), dispatch.completions(waiting)[0].ended) == ([TIMED_OUT], True)
        assert dispatch.completions(running) == []
        gate.set()
        dispatch.wait(running, dispatch.submit(Verb.PROBE, [0]))
        assert bench.backend.calls == ["write", "contains"]
        assert not bench.file(KEYS[1]).exists()


def test_cancelled_operations_count_against_the_queue(bench: Bench, gate: Event) -> None:
    """Promise 6: queue_ops_max bounds the queue of a hanging tier, however many operations time out."""
    bench.backend.add("contains", faults.hang_until(gate))
    limits = TierLimits(queue_ops_max=3, breaker_failures=1000)
    with dispatching(bench, bench.tier(capabilities=ONE_THREAD), limits=limits) as dispatch:
        dispatch.submit(Verb.PROBE, [0])
        wait_for(lambda: bench.backend.calls == ["contains"], "the call")
        refused = []
        for _ in range(10):
            refused.append(dispatch.submit(Verb.PROBE, [1, 2]))
            dispatch.clock.advance(20.0)
            dispatch.drain()
        why = [dispatch.completions(op_id)[-1].outcomes[0].error for op_id in refused]
        assert ["before it was tried" in text for text in why] == [True] * 3 + [False] * 7
        assert ["3 operations wait" in text for text in why] == [False] * 3 + [True] * 7
        assert dispatch.dispatcher.stats.tiers[0].refused == 14
        gate.set()
        assert dispatch.wait(dispatch.submit(Verb.PROBE, [1]))[0] in ([ABSENT], [REFUSED])
        wait_for(lambda: dispatch.wait(dispatch.submit(Verb.PROBE, [1])) == [[ABSENT]], "room in the queue")


def test_answers_before_the_deadline_are_reported(bench: Bench, gate: Event) -> None:
    """A probe of twelve keys is three calls, and the second one hangs. Its deadline must not discard the four answers
    that arrived, nor count the four keys that were never asked for as absent."""
    calls: list[int] = []

    def second_hangs(batch: Any, inner: Callable[[Any], Any]) -> object:
        calls.append(len(batch))
        if len(calls) == 2:
            gate.wait()
        return inner(batch)

    limits = TierLimits(breaker_failures=1)
    with dispatching(bench, bench.tier(capabilities=ONE_THREAD), limits=limits) as dispatch:
        for number in (0, 3):
            dispatch.wait(dispatch.write(number, number))
        bench.backend.add("contains", second_hangs)
        probe = dispatch.submit(Verb.PROBE, range(12), deadline_s=2.0)
        wait_for(lambda: len(calls) == 2, "the second call")
        dispatch.clock.advance(2.0)
        dispatch.drain()
        assert not dispatch.completions(probe)[0].ended
        assert dispatch.kinds(probe) == [OK, ABSENT, ABSENT, OK] + [TIMED_OUT] * 4 + [REFUSED] * 4
        assert dispatch.health() == []
        gate.set()
        dispatch.wait(probe)


def test_loads_overtake_stores(bench: Bench, gate: Event) -> None:
    """Requests wait for loads and probes, not for stores. Operations of one kind keep their order."""
    order: list[bytes] = []

    def note(batch: Any, inner: Callable[[Any], Any]) -> object:
        order.extend(getattr(item, "key", item) for item in batch)
        return inner(batch)

    for verb in ("contains", "read_into", "write", "delete"):
        bench.backend.add(verb, note)  # type: ignore[arg-type]  # literal names
    with dispatching(bench, bench.tier(capabilities=ONE_THREAD)) as dispatch:
        hang = bench.backend.add("contains", faults.hang_until(gate), times=1)
        dispatch.submit(Verb.PROBE, [63])
        wait_for(lambda: hang.times_left == 0, "the call")
        ops = [
            dispatch.write(10, 0),
            dispatch.write(11, 1),
            dispatch.submit(Verb.DELETE, [20]),
            dispatch.submit(Verb.PROBE, [30]),
            dispatch.submit(Verb.READ, [40], [2]),
            dispatch.submit(Verb.DELETE, [21]),
            dispatch.submit(Verb.READ, [41], [3]),
            dispatch.submit(Verb.PROBE, [31]),
        ]
        gate.set()
        dispatch.wait(*ops)
    assert order == [KEYS[number] for number in (63, 30, 40, 41, 31, 20, 21, 10, 11)]


def test_drain_gives_no_more_than_asked(bench: Bench) -> None:
    """The engine's step has a budget. Further completions wait for the next step, in order."""
    with dispatching(bench) as dispatch:
        dispatch.dispatcher.close(PATIENCE_S)
        ops = [dispatch.submit(Verb.PROBE, [1]) for _ in range(10)]
        sizes = [len(dispatch.drain(4 * (1 + OP_KEYS))) for _ in range(4)]
        assert sizes == [4, 4, 2, 0]
        assert [report.op_id for report in dispatch.reports] == ops  # type: ignore[union-attr]  # completions only


def test_a_step_takes_few_small_operations(bench: Bench) -> None:
    """An operation costs as much as its keys and some sixteen more: a step with writes to fifty tiers was long."""
    with dispatching(bench) as dispatch:
        dispatch.dispatcher.close(PATIENCE_S)
        ops = [dispatch.submit(Verb.WRITE, range(8), range(8)) for _ in range(57)]
        taken, is_behind = [len(dispatch.drain(512))], [dispatch.dispatcher.is_behind]
        while taken[-1]:
            taken.append(len(dispatch.drain(512)))
            is_behind.append(dispatch.dispatcher.is_behind)
        assert taken == [21, 21, 15, 0]
        assert is_behind == [True, True, False, False], "no tier is late while its completions wait"
        assert [report.op_id for report in dispatch.reports] == ops  # type: ignore[union-attr]  # none is passed over


def test_drain_counts_keys(bench: Bench) -> None:
    """Promise 5: the engine's thread spends its time on keys, not on operations. A large operation still proceeds."""
    with dispatching(bench) as dispatch:
        dispatch.dispatcher.close(PATIENCE_S)
        for count in (8, 8, 8, 30, 8):
            dispatch.submit(Verb.PROBE, range(count))
        drained = [dispatch.drain(20 + 2 * OP_KEYS) for _ in range(4)]
        assert [[report.num_keys - OP_KEYS for report in reports] for reports in drained] == [[8, 8], [8], [30], [8]]


def test_finished_operations_are_collected_by_keys(bench: Bench) -> None:
    """Promise 5: what has finished beyond the budget stays with the lanes, and is not reported late."""
    with dispatching(bench) as dispatch:
        ops = [dispatch.submit(Verb.PROBE, range(8)) for _ in range(6)]
        wait_for(lambda: len(dispatch.dispatcher._done) == 6, "the calls to end")
        dispatch.clock.advance(1e6)
        for left in (4, 2, 0):
            assert [report.num_keys for report in dispatch.drain(2 * (8 + OP_KEYS))] == [8 + OP_KEYS] * 2
            assert len(dispatch.dispatcher._done) == left
        assert [dispatch.kinds(op) for op in ops] == [[ABSENT] * 8] * 6


def test_reports_of_missed_deadlines_keep_the_limit(bench: Bench, gate: Event) -> None:
    """A thousand operations that expire together must not make one step long."""
    bench.backend.add("contains", faults.hang_until(gate))
    with dispatching(bench, limits=TierLimits(breaker_failures=1000)) as dispatch:
        for _ in range(100):
            dispatch.submit(Verb.PROBE, [1])
        wait_for(lambda: len(bench.backend.calls) == 2, "both threads to hang")
        dispatch.clock.advance(60.0)
        keys_max, stats = 30 * (1 + OP_KEYS), dispatch.dispatcher.stats.tiers[0]
        counts = [(len(dispatch.drain(keys_max)), stats.timed_out) for _ in range(5)]
        assert counts == [(30, 30), (30, 60), (30, 90), (10, 100), (0, 100)]
        gate.set()


def test_a_result_in_time_is_accepted_in_a_late_step(bench: Bench) -> None:
    """An engine may pause for seconds. Data read meanwhile is valid, and reading it again would cost as much."""
    with dispatching(bench) as dispatch:
        probes = [dispatch.submit(Verb.PROBE, [1]) for _ in range(5)]
        wait_for(lambda: len(dispatch.dispatcher._done) == 5, "the calls to end")
        dispatch.clock.advance(1e6)
        for _ in range(5):
            assert len(dispatch.drain(1)) == 1
        assert [dispatch.kinds(op_id) for op_id in probes] == [[ABSENT]] * 5


@pytest.mark.parametrize(("io_threads", "preferred", "expected"), [(None, 3, 3), (2, 3, 2), (5, 3, 3)])
def test_threads_are_named_daemons_and_few(bench: Bench, io_threads: int | None, preferred: int, expected: int) -> None:
    """preferred_concurrency is a promise to the backend's author.

    Names help to read stack dumps. Daemons let a process exit.
    """
    tier = bench.tier(capabilities=Capabilities(preferred_concurrency=preferred))
    with dispatching(bench, tier, limits=TierLimits(io_threads=io_threads)):
        ours = sorted((t for t in threading.enumerate() if t.name.startswith("tierkv-files")), key=lambda t: t.name)
        assert [thread.name for thread in ours] == [f"tierkv-files-{number}" for number in range(expected)]
        assert all(thread.daemon for thread in ours)
    assert not [t for t in threading.enumerate() if t.name.startswith("tierkv-files")]


def test_no_more_calls_at_once_than_preferred(bench: Bench) -> None:
    """Some libraries fail with too many concurrent calls."""
    inside, most, lock = [0], [0], threading.Lock()

    def gauge(batch: Any, inner: Callable[[Any], Any]) -> object:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.002)
        try:
            return inner(batch)
        finally:
            with lock:
                inside[0] -= 1

    bench.backend.add("contains", gauge)
    with dispatching(bench, bench.tier(capabilities=Capabilities(preferred_concurrency=3))) as dispatch:
        dispatch.wait(*[dispatch.submit(Verb.PROBE, [1]) for _ in range(60)])
    assert most[0] == 3


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError])
def test_an_exit_in_a_plugin_ends_neither_thread_nor_operation(bench: Bench, error: type[BaseException]) -> None:
    """Promise 3: a thread that ends silently would leave its tier without answers."""
    bench.backend.add("contains", faults.raise_error(error), times=4)
    with dispatching(bench, limits=TierLimits(breaker_failures=1000)) as dispatch:
        failed = [dispatch.submit(Verb.PROBE, [1]) for _ in range(4)]
        assert dispatch.wait(*failed) == [[FAILED]] * 4
        assert dispatch.wait(*[dispatch.submit(Verb.PROBE, [1]) for _ in range(4)]) == [[ABSENT]] * 4


def test_an_invalid_operation_fails(bench: Bench) -> None:
    """A slot outside the arena is a bug of the framework. The thread must survive it, and the error must name it."""
    with dispatching(bench) as dispatch:
        read = dispatch.submit(Verb.READ, [1], [10**6])
        dispatch.wait(read)
        assert "slot 1000000 is outside" in dispatch.completions(read)[0].outcomes[0].error
        assert dispatch.wait(dispatch.submit(Verb.READ, [1, 2], [1])) == [[FAILED, FAILED]]
        assert dispatch.wait(dispatch.submit(Verb.PROBE, [])) == [[]]


def test_outcomes_and_retries_are_counted(bench: Bench) -> None:
    """Operators must be able to distinguish the kinds of failures."""
    timing = Timing(bench.clock, sleep=lambda _: None)
    with dispatching(bench, bench.tier(retry=RetryLimits(3), timing=timing)) as dispatch:
        dispatch.wait(dispatch.write(0, 0), dispatch.write(1, 1))
        content = bytearray(bench.file(KEYS[1]).read_bytes())
        content[HEADER_BYTES] ^= 1
        bench.file(KEYS[1]).write_bytes(content)
        assert dispatch.wait(dispatch.submit(Verb.READ, [0, 1, 2], [3, 4, 5])) == [[OK, CORRUPT, ABSENT]]
        bench.backend.add("contains", faults.raise_error(ConnectionError), times=2)
        assert dispatch.wait(dispatch.submit(Verb.PROBE, [2, 3])) == [[ABSENT, ABSENT]]
        bench.backend.add("delete", faults.raise_error(ValueError))
        assert dispatch.wait(dispatch.submit(Verb.DELETE, [0])) == [[FAILED]]
        bench.backend.add("write", faults.raise_error(lambda: OSError(28, "full")))
        assert dispatch.wait(dispatch.write(7, 7)) == [[OutcomeKind.NO_SPACE]]
        stats = dispatch.dispatcher.stats.tiers[0]
        assert (stats.corrupt, stats.failed, stats.no_space, stats.retries) == (1, 1, 1, 2 + 4)
        assert (stats.timed_out, stats.refused, stats.breaker_opens) == (0, 0, 0)


def test_the_deadline_heap_stays_small(bench: Bench) -> None:
    """Deadlines are far away and operations short: ended tickets must not stay until their deadline."""
    with dispatching(bench) as dispatch:
        for _ in range(40):
            dispatch.wait(*[dispatch.submit(Verb.PROBE, [1], deadline_s=1e9) for _ in range(20)])
        assert len(dispatch.dispatcher._deadlines) <= 2 * 20 + 64


def test_flush_waits_for_writes_only(bench: Bench, gate: Event) -> None:
    """A flush waits for pending stores. A hung probe is no reason to wait."""
    bench.backend.add("contains", faults.hang_until(gate))
    with dispatching(bench) as dispatch:
        dispatch.submit(Verb.PROBE, [1], deadline_s=1e9)
        for number in range(8):
            dispatch.write(number, number, deadline_s=1e9)
        assert dispatch.dispatcher.flush(PATIENCE_S)
        assert all(bench.file(KEYS[number]).exists() for number in range(8))
        bench.backend.add("write", faults.hang_until(gate))
        dispatch.write(9, 0, deadline_s=1e9)
        assert not dispatch.dispatcher.flush(0.05)
        gate.set()
        assert dispatch.dispatcher.flush(PATIENCE_S)


def test_limits_are_one_per_tier(bench: Bench) -> None:
    """A tier without bounds would break promise 6."""
    with pytest.raises(ValueError, match="1 tiers came with 0 limits"):
        Dispatcher([bench.tier()], [], bench.clock)


def test_tier_and_dispatcher_read_one_clock(bench: Bench) -> None:
    """With two clocks, every deadline would have passed before its operation began, or would never pass."""
    with pytest.raises(ValueError, match="tier 'files' reads another clock"):
        Dispatcher([bench.tier()], [TierLimits()], time.monotonic)


@pytest.mark.parametrize(
    "limits",
    [
        {"queue_ops_max": 0},
        {"io_threads": 0},
        {"breaker_failures": 0},
        {"breaker_cooldown_s": -1.0},
        {"trial_deadline_s": 0},
    ],
)
def test_invalid_limits_are_refused(limits: dict[str, Any]) -> None:
    """A tier with zero threads would never answer."""
    with pytest.raises(ValueError, match="must be"):
        TierLimits(**limits)


def test_a_duplicate_op_is_just_another_op(bench: Bench) -> None:
    """The manager chooses operation ids. Dispatch keeps no index by them."""
    with dispatching(bench) as dispatch:
        op = TierOp(7, 0, Verb.PROBE, (KEYS[0],), (), 1e9)
        dispatch.dispatcher.submit(op)
        dispatch.dispatcher.submit(op)
        wait_for(lambda: bool(dispatch.drain()) or len(dispatch.completions(7)) == 2, "both completions")
        wait_for(lambda: dispatch.drain() == [] and len(dispatch.completions(7)) == 2, "both completions")


def test_successful_deletions_do_not_hide_failed_writes(bench: Bench) -> None:
    """Each failed write is followed by a deletion.

    If those counted as successes, the breaker of a full disk would never open.
    """
    tier = bench.tier(retry=RetryLimits(1))
    with dispatching(bench, tier, limits=TierLimits(breaker_failures=3)) as dispatch:
        bench.backend.add("write", faults.raise_error(lambda: OSError("no route to disk")))
        for number in range(3):
            assert dispatch.wait(dispatch.write(number, number)) == [[FAILED]]
            dispatch.wait(dispatch.submit(Verb.DELETE, [number]))
        dispatch.wait_health(False)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])
def test_ranks_reach_the_backend(request: pytest.FixtureRequest, *, asynchronous: bool) -> None:
    """The place of a chunk in its prompt goes down with its frame: the token as it is, the request in disguise."""
    used: Bench = request.getfixturevalue("async_bench" if asynchronous else "bench")
    written: list[int] = []
    write = PlainFiles.write

    def noting(files: PlainFiles, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        written.extend(request.rank for request in requests)
        return write(files, requests)

    with pytest.MonkeyPatch.context() as patch, dispatching(used, used.tier(asynchronous=asynchronous)) as dispatch:
        patch.setattr(PlainFiles, "write", noting)
        refs = tuple(used.fill(slot, KEYS[slot], compressible(slot)) for slot in range(3))
        ranks = (7 << 32 | 16, 0, 7 << 32 | 48)
        dispatch.dispatcher.submit(TierOp(1000, 0, Verb.WRITE, tuple(KEYS[:3]), refs, 10.0, ranks))
        dispatch.wait(1000)
    assert [rank & 0xFFFF_FFFF for rank in written] == [16, 0, 48]
    assert written[1] == 0
    assert written[0] >> 32 == written[2] >> 32
