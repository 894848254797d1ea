"""A day of faults in a second: scheduler, manager, dispatch and worker under simulated time, from one seed.

The scheduler, manager, dispatcher, tiers, frames, worker and step loop are the real ones. Simulated are time, threads,
the engine above and the backends below; bytes are real, and a pure function says what each must be.

:func:`simulate` plays one seed; ``python -m simulation`` plays many. docs/explanation/simulation.md
tells what is checked and how to add to it.
"""

from __future__ import annotations

from simulation.checks.failure import Violation
from simulation.drawing.scenarios import SCENARIOS, Scenario
from simulation.runner import Finding, Outcome, simulate

__all__ = ["SCENARIOS", "Finding", "Outcome", "Scenario", "Violation", "simulate"]
