"""Random histories of the dispatcher without threads: every operation gets its words, whatever happens and when.

Each example is replayed exactly: the test owns the clock, the moments at which I/O threads run, and the faults.
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
class Asked:
    """What the manager would remember of an operation."""

    op: TierOp
    announced: bool = False
    ended: bool = False


class Stories(RuleBasedStateMachine):
    """The manager's slots hang on these words: one too few leaks a slot, one too many frees it twice."""

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
        self.asked: dict[int, Asked] = {}
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
        op = TierOp(len(self.asked), tier, verb, keys, slots, self.bench.clock() + deadline_s)
        self.asked[op.op_id] = Asked(op)
        self.dispatcher.submit(op)

    @rule(name=st.sampled_from(["a0", "a1", "b0", "b1"]))
    def io_thread_runs(self, name: str) -> None:
        self.stepper.step(name)

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.bench.clock.advance(seconds)

    @rule(tier=st.integers(0, 1), verb=st.sampled_from(["contains", "read_into", "write", "delete"]))
    def something_breaks(self, tier: int, verb: str) -> None:
        fault = faults.raise_error(lambda: OSError("gone"))
        self.benches[tier].backend.add(verb, fault, times=3)  # type: ignore[arg-type]  # literal names

    @rule(limit=st.integers(1, 5))
    def drain(self, limit: int) -> None:
        completion = self.dispatcher.drain(limit)
        assert len(completion) <= limit
        for said in completion:
            if isinstance(said, TierHealth):
                assert said.usable != self.usable[said.tier], "health was told twice"
                self.usable[said.tier] = said.usable
            else:
                self.hear(said)

    def hear(self, said: Completion) -> None:
        asked = self.asked[said.op_id]
        kinds = {outcome.kind for outcome in said.outcomes}
        assert len(said.outcomes) == len(asked.op.keys)
        assert not asked.ended, "a word after the last"
        if said.ended:
            assert not asked.announced or kinds == {OutcomeKind.TIMED_OUT}, "late data was accepted"
            asked.ended = True
        else:
            assert not asked.announced, "the deadline was told twice"
            assert kinds == {OutcomeKind.TIMED_OUT}
            assert said.elapsed_s >= 0.5
            asked.announced = True

    @invariant()
    def in_flight_is_bounded(self) -> None:
        """Two tiers with two threads each, none of which is inside a call between steps, and four waiting each."""
        if hasattr(self, "dispatcher"):
            assert self.dispatcher.pending() <= 2 * LIMITS.queue_ops_max + len(self.dispatcher._done)

    def teardown(self) -> None:
        """When everybody runs and time passes, every operation comes to its end."""
        if hasattr(self, "dispatcher"):
            try:
                self.come_to_an_end()
            finally:
                for bench in self.benches:
                    bench.files.close()  # type: ignore[unused-coroutine]  # the blocking kind
                self.bench.arena.close()
                shutil.rmtree(self.place)

    def come_to_an_end(self) -> None:
        """Let all run."""
        for _ in range(200):
            self.stepper.step_all()
            self.drain(limit=5)
        unanswered = [number for number, asked in self.asked.items() if not asked.ended]
        assert unanswered == []
        assert self.dispatcher.pending() == 0
        for _ in range(20):
            self.bench.clock.advance(10.0)
            self.drain(limit=5)
            self.stepper.step_all()
            self.drain(limit=5)
        assert self.usable == [True, True], "a tier did not recover although it works"
        stats = self.dispatcher.stats.tiers
        keys = sum(len(asked.op.keys) for asked in self.asked.values())
        assert sum(tier.keys + tier.refused for tier in stats.values()) == keys
        assert self.dispatcher.close(1.0) == 0


TestStories = Stories.TestCase
TestStories.settings = settings(max_examples=int(os.environ.get("TIERKV_STORIES", "30")), stateful_step_count=40)
