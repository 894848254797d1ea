"""Run of a seed, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

from simulation.checks.failure import Violation
from simulation.checks.trace import Trace
from simulation.drawing.run_spec import RunSpec, draw_run_spec
from simulation.world.world import World
from tierkv.manager.passages import passage
from tierkv.testing.manual_clock import ManualClock

STEPS = 200
"""Engine steps with faults; afterwards there are none until the run has come to rest."""
FRONT_CHUNKS_MIN = 2
"""Smallest front of a hit that is copied while the rest is read: the prompts of a simulation are short."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Broken promise. invariant: its name. step: in which it was seen. trace: notes before it, oldest first."""

    invariant: str
    detail: str
    step: int
    trace: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one seed.

    setup: what it was made of, in a line. steps: engine steps in all. digest: of everything that happened; equal runs
    have equal ones. totals: counts of what was reached. finding: None where everything held.
    """

    seed: int
    scenario: str
    setup: str
    steps: int
    simulated_s: float
    digest: str
    totals: Mapping[str, int]
    finding: Finding | None

    @property
    def reproduce(self) -> str:
        """Command that reproduces this run."""
        return f"python -m nox -s simulate -- --seed {self.seed} --scenario {self.scenario}"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "reproduce": self.reproduce}


def simulate(seed: int, *, steps: int = STEPS, scenario: str | None = None) -> Outcome:
    """Play one run: ``steps`` engine steps of fault, then peace until nothing is left to do.

    Args:
        seed: decides everything.
        steps: engine steps with fault.
        scenario: one of :data:`~simulation.drawing.scenarios.SCENARIOS`; None: the one that the seed chooses.
    """
    setup = draw_run_spec(seed, scenario)
    clock = ManualClock(0.0)
    trace = Trace(clock)
    world: World | None = None
    finding: Finding | None = None
    try:
        with mock.patch.object(passage, "FRONT_CHUNKS_MIN", FRONT_CHUNKS_MIN):
            world = World(setup, clock, trace)
            for _ in range(steps):
                world.step()
            world.settle()
    except Violation as violation:
        finding = Finding(violation.invariant, violation.detail, trace.step, tuple(trace.lines()))
    finally:
        if world is not None:
            world.abandon()
    return _outcome(setup, trace, {} if world is None else world.totals, finding)


def _outcome(setup: RunSpec, trace: Trace, totals: Mapping[str, int], finding: Finding | None) -> Outcome:
    return Outcome(
        seed=setup.seed,
        scenario=setup.scenario.name,
        setup=setup.describe(),
        steps=trace.step,
        simulated_s=trace.clock(),
        digest=trace.digest,
        totals=totals,
        finding=finding,
    )
