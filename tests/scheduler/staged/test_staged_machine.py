"""Staged lookups under all events at once: requests arrive, wait, load, vanish; tiers answer, fail or hang."""

from __future__ import annotations

from core_parts import TierSpec, disk, make_core, objects
from group_parts import full, ssm, window
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from staged_bed import StagedBed, prefix

from tierkv.manager.contract import LoadGrant
from tierkv.types.keys import Key
from tierkv.types.tier_ops import OutcomeKind

DEADLINE_S = 5.0
BESIDE = {0: (), 1: (ssm(4),), 2: (window(8),)}
"""Groups beside attention, by the number of chunks that a hit needs of them."""
FAMILIES = "abc"
CHUNKS = 12
STEPS_S = (0.01, 0.5, 2.0)
"""A tier is read in the step after its answer: two of the longest ones may pass before the deadline runs."""


class StagedMachine(RuleBasedStateMachine):
    """A HIT can be loaded, whatever happens in between; every lookup ends; nothing stays held."""

    @initialize(
        tier=st.sampled_from([disk(write="read_only"), disk(), objects()]),
        slots=st.integers(6, 20),
        share=st.integers(1, 4),
        window=st.sampled_from(sorted(BESIDE)),
    )
    def open(self, tier: TierSpec, slots: int, share: int, window: int) -> None:
        """Open a host tier over one tier with given chunks."""
        groups = (full(4), *BESIDE[window])
        reserved = max(len(groups), slots * share // 4)
        self.bed = StagedBed(make_core(slots=slots, reserved=reserved, tiers=[tier], groups=groups), DEADLINE_S)
        self.window = window
        self.indexed = tier.capabilities.authoritative_index
        self.waiting: dict[str, str] = {}
        self.since: dict[str, float] = {}
        self.loads: list[LoadGrant] = []
        self.count = 0

    def keys(self, family: str) -> list[tuple[Key, ...]]:
        """Chunks of a prompt, per group."""
        return [prefix(CHUNKS, family, group) for group in range(2 if self.window else 1)]

    @rule(family=st.sampled_from(FAMILIES))
    def arrive(self, family: str) -> None:
        """Register a request for a prompt."""
        self.count += 1
        self.bed.add(f"r{self.count}")
        self.waiting[f"r{self.count}"] = family

    @rule(family=st.sampled_from(FAMILIES), first=st.integers(0, CHUNKS - 1), count=st.integers(1, CHUNKS))
    def put_below(self, family: str, first: int, count: int) -> None:
        """Put some chunks of a prompt into the lower tier."""
        if self.indexed:
            for keys in self.keys(family):
                self.bed.core.keep_below(keys[first : first + count])

    @rule(family=st.sampled_from(FAMILIES), first=st.integers(0, CHUNKS - 1), count=st.integers(1, 3))
    def store(self, family: str, first: int, count: int) -> None:
        """Store some chunks for another request, if there is room."""
        for group, keys in enumerate(self.keys(family)):
            ctx = self.bed.lookups.request_context("writer")
            grant = self.bed.core.manager.prepare_store([(key, group) for key in keys[first : first + count]], ctx)
            if grant is not None:
                self.bed.core.manager.complete_store(grant.slots)

    @rule(skip=st.sets(st.integers(0, 20)), allocates=st.booleans(), seconds=st.sampled_from(STEPS_S))
    def step(self, skip: set[int], seconds: float, *, allocates: bool) -> None:
        """Ask about some requests in order, and load the hits if there are blocks."""
        self.bed.begin(seconds)
        for number, (request_id, family) in enumerate(list(self.waiting.items())):
            if number in skip:
                continue
            groups = self.keys(family)
            if self.window:
                answer = self.bed.ask_both(request_id, *groups, self.window)
            else:
                answer = self.bed.ask(request_id, groups[0])
            if answer is None:
                began = self.since.setdefault(request_id, self.bed.now)
                began = max(began, self.bed.core.manager.step.answered_s)
                late_s = began + DEADLINE_S + 2 * max(STEPS_S)
                assert self.bed.now < late_s, "deferred, and no tier has answered anything"
                continue
            self.since.pop(request_id, None)
            if allocates:
                wanted = groups[0][:answer] + (groups[1][max(0, answer - self.window) : answer] if self.window else ())
                self.begin_load(request_id, wanted)
        self.bed.end()

    def begin_load(self, request_id: str, wanted: tuple[Key, ...]) -> None:
        """Begin a load; never an error, since all of its chunks were hits."""
        del self.waiting[request_id]
        if wanted:
            self.loads.append(self.bed.core.manager.prepare_load(wanted, self.bed.lookups.request_context(request_id)))
        self.bed.lookups.close_lookup(request_id)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        """End a load."""
        grant = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        self.bed.core.manager.complete_load(grant.slots)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def vanish(self, data: st.DataObject) -> None:
        """End a request whose client disconnected."""
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[request_id]
        self.since.pop(request_id, None)
        self.bed.lookups.finish_request(request_id)

    @rule(kind=st.sampled_from([OutcomeKind.OK, OutcomeKind.OK, OutcomeKind.ABSENT, OutcomeKind.CORRUPT]))
    def io(self, kind: OutcomeKind) -> None:
        """Let the tier complete operations, well or badly."""
        self.bed.run_io(kind)

    @invariant()
    def within_the_cap(self) -> None:
        """Checked at the end of each step; here also in between."""
        if hasattr(self, "bed"):
            self.bed.core.manager.validate()

    def teardown(self) -> None:
        """Check that nothing is held when all requests have ended."""
        if not hasattr(self, "bed"):
            return
        for request_id in list(self.waiting):
            self.bed.lookups.finish_request(request_id)
        self.bed.begin(2 * DEADLINE_S)
        self.bed.run_io()
        self.bed.end()
        for grant in self.loads:
            self.bed.core.manager.complete_load(grant.slots)
        assert self.bed.core.manager.passages.account.total == 0
        assert self.bed.held == 0


TestStagedMachine = StagedMachine.TestCase
TestStagedMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
