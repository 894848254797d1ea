"""The store half under any schedule, with groups of every kind, over real bytes (spec, S121 and section 18).

The worker compares the bytes of every chunk that it stores with what they must be, and refuses to read a block while
somebody writes it. Loads, tiers and faults are the matter of test_machine.py, under the same plans.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from store_bench import LAYOUTS, StoreBench, drive

from tierkv.scheduler.limits import StorePlanName

picks = st.integers(0, 20)


class StoreMachine(RuleBasedStateMachine):
    """A failing schedule is cut down to the few moves that matter."""

    bench: StoreBench

    @initialize(
        layout=st.integers(0, len(LAYOUTS) - 1), plan=st.sampled_from(["immediate", "eager", "lazy"]),
        holds=st.booleans(),
    )  # fmt: skip
    def open(self, layout: int, plan: StorePlanName, holds: bool) -> None:
        self.bench = StoreBench(layout, plan, holds=holds)

    @rule(family=st.integers(0, 2), shared=st.integers(0, 40), own=st.integers(0, 12), new=st.integers(1, 20))
    def arrive(self, family: int, shared: int, own: int, new: int) -> None:
        self.bench.arrive(family, shared, own, new)

    @rule(counts=st.lists(st.sampled_from([0, 1, 4, 16]), max_size=6), preempt=st.sampled_from([False, False, True]))
    def step(self, counts: list[int], preempt: bool) -> None:
        self.bench.step(counts, preempt=preempt)

    @rule(pick=picks, failing=st.lists(st.booleans(), max_size=3))
    def transfer(self, pick: int, failing: list[bool]) -> None:
        self.bench.transfer(pick, failing)

    @rule(count=st.integers(1, 4))
    def report(self, count: int) -> None:
        self.bench.report(count)

    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        self.bench.abort(pick)

    @rule(room=st.integers(0, 5))
    def block(self, room: int) -> None:
        self.bench.block(room)

    @rule()
    def unblock(self) -> None:
        self.bench.unblock()

    @rule()
    def reset(self) -> None:
        self.bench.reset()

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "bench"):
            self.bench.check()

    def teardown(self) -> None:
        """Let everything end, and look for leaks."""
        if hasattr(self, "bench"):
            self.bench.end()


def test_s121_nothing_is_left_after_any_schedule() -> None:
    """S121: after any schedule of store, preempt, abort, finish and reset every hold is zero, every slot is free or
    cached, and all maps are empty. (The lineage audits reference counts of host and GPU blocks; ours has holds on slots
    and fences on blocks.)"""
    run_state_machine_as_test(StoreMachine, settings=settings(stateful_step_count=50))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("plan", ["immediate", "eager", "lazy"])
def test_s121_random_schedules(plan: StorePlanName, rng: random.Random) -> None:
    """S121, D6: seeded runs are long enough that blocks change hands many times. A failure names the seed."""
    stored = loaded = 0
    for i in range(len(LAYOUTS) * max(2, settings().max_examples // 50)):
        bench = StoreBench(i % len(LAYOUTS), plan, holds=i % 3 == 2)
        drive(bench, rng, 250)
        stored, loaded = stored + bench.stored, loaded + bench.loaded
    assert stored, "a bench that stores nothing proves nothing"
    assert loaded, "nor does one that loads nothing"
