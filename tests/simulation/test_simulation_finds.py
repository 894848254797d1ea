"""Deliberate breaks must be found: a simulation that misses one proves nothing."""

from __future__ import annotations

import pytest

from simulation import simulate
from simulation.breaks import feature_breaks, load_breaks
from simulation.breaks.core_breaks import BREAKS, Break

STEPS = 150

assert feature_breaks.BREAKS is load_breaks.BREAKS is BREAKS  # importing them added theirs


@pytest.mark.parametrize("broken", [pytest.param(one, id=one.name) for one in BREAKS])
def test_it_is_found(broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each break is one careless line in tierkv, with the number of seeds within which it must be noticed."""
    broken.apply(monkeypatch)
    for seed in range(broken.seeds):
        finding = simulate(seed, scenario=broken.scenario, steps=STEPS).finding
        if finding is not None:
            assert finding.step, f"not even a stack can be opened: {finding.detail}"
            return
    pytest.fail(f"{broken.name} was not found in {broken.seeds} seeds of {broken.scenario!r}")


def test_there_are_enough_of_them() -> None:
    """At least one of each kind exists: fences, slots, bytes, completions, deadlines, events, capacity, durability."""
    assert len(BREAKS) >= 25
    assert len({one.name for one in BREAKS}) == len(BREAKS)
