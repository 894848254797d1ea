"""Random histories of the dispatcher without threads: every operation gets its completions.

Each example is replayed exactly: the test owns the clock, the times at which I/O threads run, and the faults.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dispatch_bench import KEYS
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tier_bench import ONCE, Bench, compressible, make_bench

from tierkv.abc import Capabilities
from tierkv.dispatch import Dispatcher, TierLimits
from tierkv.testing import faults
from tierkv.testing.manual_clock import Stepper
from tierkv.types.tier_ops import Completion, OutcomeKind, TierHealth, TierOp, Verb
from tierkv.types.transfers import SlotRef

LIMITS = TierLimits(queue_ops_max=4, breaker_failures=3, breaker_cooldown_s=5.0, trial_deadline_s=2.0)


@dataclass
class SubmittedOp:
    """Record of one operation, as the manager would keep it."""

    op: TierOp
    deadline_reported: bool = False
    ended: bool = False


class DispatcherMachine(RuleBasedStateMachine):
    """State machine of two tiers. One missing completion leaks a slot, one too many frees it twice."""

    @initialize()
    def open(self) -> None:
        self.place = Path(tempfile.mkdtemp())
        self.bench: Bench = make_bench(self.place / "one")
        beside = make_bench(self.place / "two", beside=self.bench)
        self.benches = [self.bench, beside]
        self.stepper = Stepper(self.bench.clock)
        batches = Capabilities(preferred_batch=2, preferred_concurrency=2)
        tiers = [bench.tier(capabilities=batches, retry=ONCE) for bench in self.benches]
        self.dispatcher = Dispatcher(
            tiers, [LIMITS] * 2, self.bench.clock, spawn=self.stepper, engine_sleep=self.stepper.engine_sleep
        )
        for handle, name in zip(self.stepper.handles, ("a0", "a1", "b0", "b1"), strict=True):
            handle.name = name
        self.submitted: dict[int, SubmittedOp] = {}
        self.usable = [True, True]

    @rule(
        tier=st.integers(0, 1),
        verb=st.sampled_from(list(Verb)),
        numbers=st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True),
        deadline_s=st.sampled_from([0.5, 3.0, 20.0]),
    )
    def submit(self, tier: int, verb: Verb, numbers: list[int], deadline_s: float) -> None:
        slots: tuple[SlotRef, ...] = ()
        if verb is Verb.WRITE:
            slots = tuple(self.bench.fill(number, KEYS[number], compressible(number)) for number in numbers)
        elif verb is Verb.READ:
            slots = tuple(SlotRef(number, 1) for number in numbers)
        keys = tuple(KEYS[number] for number in numbers)
        op = TierOp(len(self.submitted), tier, verb, keys, slots, deadline_s)
        self.submitted[op.op_id] = SubmittedOp(op)
        self.dispatcher.submit(op)

    @rule(name=st.sampled_from(["a0", "a1", "b0", "b1"]))
    def io_thread_runs(self, name: str) -> None:
        self.stepper.step(name)

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.bench.clock.advance(seconds)

    @rule(tier=st.integers(0, 1), verb=st.sampled_from(["contains", "read_into", "write", "delete"]))
    def inject_fault(self, tier: int, verb: str) -> None:
        fault = faults.raise_error(lambda: OSError("gone"))
        self.benches[tier].backend.add(verb, fault, times=3)  # type: ignore[arg-type]  # literal names

    @rule(limit=st.integers(1, 5))
    def drain(self, limit: int) -> None:
        reports = self.dispatcher.drain(limit)
        assert len(reports) <= limit
        for report in reports:
            if isinstance(report, TierHealth):
                assert report.usable != self.usable[report.tier], "health was reported twice"
                self.usable[report.tier] = report.usable
            else:
                self.check_completion(report)

    def check_completion(self, completion: Completion) -> None:
        submitted = self.submitted[completion.op_id]
        kinds = {outcome.kind for outcome in completion.outcomes}
        assert len(completion.outcomes) == len(submitted.op.keys)
        assert not submitted.ended, "a completion after the last"
        if completion.ended:
            assert not submitted.deadline_reported or kinds == {OutcomeKind.TIMED_OUT}, "late data was accepted"
            submitted.ended = True
        else:
            assert not submitted.deadline_reported, "the deadline was reported twice"
            assert kinds == {OutcomeKind.TIMED_OUT}
            assert completion.elapsed_s >= 0.5
            submitted.deadline_reported = True

    @invariant()
    def in_flight_is_bounded(self) -> None:
        """Two tiers with two threads each, no running call between steps; of each kind four operations wait."""
        if hasattr(self, "dispatcher"):
            assert self.dispatcher.pending() <= 2 * 2 * LIMITS.queue_ops_max + len(self.dispatcher._done)

    def teardown(self) -> None:
        """Every operation ends when all threads run and time passes."""
        if hasattr(self, "dispatcher"):
            try:
                self.run_to_end()
            finally:
                for bench in self.benches:
                    bench.files.close()  # type: ignore[unused-coroutine]  # the blocking kind
                self.bench.arena.close()
                shutil.rmtree(self.place)

    def run_to_end(self) -> None:
        """Run all threads until no operation is in flight."""
        for _ in range(200):
            self.stepper.step_all()
            self.drain(limit=5)
        unanswered = [number for number, submitted in self.submitted.items() if not submitted.ended]
        assert unanswered == []
        assert self.dispatcher.pending() == 0
        for _ in range(20):
            self.bench.clock.advance(10.0)
            self.drain(limit=5)
            self.stepper.step_all()
            self.drain(limit=5)
        assert self.usable == [True, True], "a tier did not recover although it works"
        stats = self.dispatcher.stats.tiers
        keys = sum(len(submitted.op.keys) for submitted in self.submitted.values())
        assert sum(tier.keys + tier.refused for tier in stats.values()) == keys
        assert self.dispatcher.close(1.0) == 0


TestDispatcherMachine = DispatcherMachine.TestCase
TestDispatcherMachine.settings = settings(
    max_examples=int(os.environ.get("TIERKV_STORIES", "30")), stateful_step_count=40
)
