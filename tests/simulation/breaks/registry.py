"""Registry of deliberate breaks: each is one careless line in tierkv, with the invariant that must notice it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from simulation.runner import simulate

Patch = pytest.MonkeyPatch

SEEDS = 10
"""Seeds of its scenario within which a break must be found."""

STEPS = 150
"""Engine steps with faults in each of them."""


@dataclass(frozen=True, slots=True)
class Break:
    """Broken promise. scenario: in which it is sought. finds: the invariant that must notice it. first: first seed."""

    name: str
    apply: Callable[[Patch], None]
    scenario: str
    finds: str
    first: int = 0

    def play(self) -> list[str]:
        """Play its scenario until a seed finds it by its invariant. Returns all invariants that were broken by then."""
        findings: list[str] = []
        for seed in range(self.first, self.first + SEEDS):
            finding = simulate(seed, scenario=self.scenario, steps=STEPS).finding
            if finding is not None and finding.step:  # otherwise not even a stack could be opened
                findings.append(finding.invariant)
            if self.finds in findings:
                break
        return findings


BREAKS: list[Break] = []
"""All breaks whose modules were imported."""


def breaks(scenario: str, finds: str, first: int = 0) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register a break."""

    def register(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BREAKS.append(Break(apply.__name__, apply, scenario, finds, first))
        return apply

    return register
