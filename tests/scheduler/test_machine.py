"""Everything at once: engine, worker and tiers in any order, with any failure, over real bytes (spec, section 18).

:meth:`core_bed.Bed.check` checks after every move, with assertions of the scripted engine, worker and tiers, and the
core's own ``validate()``; :meth:`core_bed.Bed.check_end` checks at the end.
"""

from __future__ import annotations

import random

import pytest
from core_bed import BedSpec
from core_moves import FAULTS, HINTS, PACES, PROMPTS, SPECS, Moves, drive
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tierkv.types.tier_ops import OutcomeKind

picks = st.integers(0, 20)
faults = st.lists(st.none() | st.sampled_from(FAULTS), max_size=4)


class CoreMachine(RuleBasedStateMachine):
    """A failing history is reduced to the few moves that matter, which no seeded run can do."""

    moves: Moves

    @initialize(spec=st.sampled_from(SPECS))
    def open(self, spec: BedSpec) -> None:
        self.moves = Moves(spec)

    @rule(
        family=st.integers(0, PROMPTS - 1), shared=st.integers(0, 40), own=st.integers(0, 12), new=st.integers(1, 12),
        cap=st.sampled_from([-1, -1, -1, 0, 9]), wish=st.integers(0, len(HINTS) - 1),
    )  # fmt: skip
    def arrive(self, family: int, shared: int, own: int, new: int, cap: int, wish: int) -> None:
        if len(self.moves.bed.engine.sequences) < 12:
            self.moves.arrive(family, shared, own, new, cap, wish)

    @rule(family=st.integers(0, PROMPTS - 1), tokens=st.integers(8, 64), tier=st.integers(0, 1), gap=st.integers(0, 40))
    def preload(self, family: int, tokens: int, tier: int, gap: int) -> None:
        self.moves.preload(family, tokens, tier, gap)

    @rule(
        ticks=st.sampled_from([0, 1, 10]), budget=st.sampled_from([4, 16, 64]), asks=st.sampled_from([0, 1, 100]),
        accepts=st.sampled_from([50, 100, 100]), preempt=st.sampled_from([0, 0, 0, 1]), rests=st.booleans(),
    )  # fmt: skip
    def step(self, ticks: int, budget: int, asks: int, accepts: int, preempt: int, rests: bool) -> None:
        self.moves.step(ticks, budget=budget, asks=asks, accepts=accepts, preempt=preempt, rests=rests)

    @rule()
    def plain_step(self) -> None:
        self.moves.step(1)

    @rule()
    def report_one(self) -> None:
        self.moves.report_one()

    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        self.moves.abort(pick)

    @rule(pick=picks, failing=st.lists(st.booleans(), max_size=4))
    def transfer(self, pick: int, failing: list[bool]) -> None:
        self.moves.transfer(pick, failing)

    @rule(pick=picks)
    def io(self, pick: int) -> None:
        self.moves.io(pick)

    @rule(pick=picks, failing=faults)
    def bad_io(self, pick: int, failing: list[OutcomeKind | None]) -> None:
        self.moves.io(pick, failing)

    @rule(pick=picks)
    def late(self, pick: int) -> None:
        self.moves.late(pick)

    @rule()
    def all_io(self) -> None:
        self.moves.all_io()

    @rule(tier=st.integers(0, 1), usable=st.booleans())
    def health(self, tier: int, usable: bool) -> None:
        self.moves.health(tier, usable)

    @rule(tier=st.integers(0, 1), elapsed_s=st.sampled_from(PACES))
    def pace(self, tier: int, elapsed_s: float) -> None:
        self.moves.pace(tier, elapsed_s)

    @rule(pick=picks, tier=st.integers(-1, 1))
    def damage(self, pick: int, tier: int) -> None:
        self.moves.damage(pick, tier)

    @rule()
    def reset(self) -> None:
        self.moves.reset()

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "moves"):
            self.moves.bed.check()

    def teardown(self) -> None:
        """Let everything end, and look for leaks."""
        if hasattr(self, "moves"):
            self.moves.end()


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=2 * settings().max_examples, stateful_step_count=60)


@pytest.mark.parametrize("spec", range(len(SPECS)))
def test_s121_random_days(spec: int, rng: random.Random) -> None:
    """S121, D6: for any schedule, nothing is held at its end, and no foreign byte was stored or read.

    The lineage audits reference counts of blocks; here slots are held and blocks fenced. Seeded runs are a hundred
    times faster than the machine's examples, so they reach rarer combinations. Their number follows the profile; a
    failure names the seed.
    """
    for _ in range(max(1, settings().max_examples // 5)):
        moves = Moves(SPECS[spec])
        drive(moves, rng, 300)
        counters = moves.bed.core.counters
        assert counters.lookups


def test_random_days_reach_every_state(rng: random.Random) -> None:
    """A driver that never loads, defers, drops, evicts, fails or expires anything would prove nothing."""
    totals: dict[str, int] = {}
    payloads = 0
    for spec in SPECS * 3:
        moves = Moves(spec)
        drive(moves, rng, 300)
        payloads += moves.bed.mirror.payloads
        for name, value in moves.bed.core.counters.as_dict().items():
            totals[name] = totals.get(name, 0) + (value if isinstance(value, int) else sum(value.values()))
    # The last two are of policies; those of the bed neither fail nor refuse chunks.
    unlikely = {"events_dropped", "payloads_forgotten", "tokens_not_kept", "entries_dropped", "observations_failed"}
    unlikely |= {"admissions_refused", "policies_failed", "requests_dropped", "errors_contained"}
    # The bed's host tiers are too small to read ahead, and its tiers rarely deliver nothing for a whole deadline.
    unlikely |= {"chunks_read_ahead", "chunks_read_in_vain", "deadlines_expired"}
    # Speeds that change by so much are of the simulation, on days of tiers that fade.
    unlikely |= {"slowdowns", "recoveries"}
    never = {name for name, value in totals.items() if not value} - unlikely
    assert not never
    assert payloads
