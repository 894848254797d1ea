"""Simulation: a day of faults in a second, for scheduler, manager, dispatch and worker, from one seed.

Nouns: a *seed* determines a *run spec* and a *workload* (``drawing``). A *world* plays the run in steps (``world``): a
*process* is one stack with its *batching engine* (``engine``); a *storage* holds the frames of one tier and outlives
processes; a *fault schedule* gives each tier spells of faults; the *executor* steps simulated threads. A *monitor*
observes every message, and *checks* compare the state after each step (``checks``). Deliberate *breaks* of the core
show that the checks notice (``breaks``).

Flow of a step: time and faults move, users act, the engine schedules and computes over real bytes, the executor runs
threads that are due, and all invariants are checked. After the last fault the run must come to rest and close.

Invariants: scheduler, manager, dispatcher, tiers, frames, worker and step loop are the real ones; only time, threads,
engine and backends are simulated. Equal seeds give equal traces, in every process and on every machine: no object
address, set order or clock of the computer reaches a trace. The right bytes are a pure function, never a record.

:func:`simulate` plays one seed; ``python -m simulation`` plays many. docs/explanation/simulation.md has the invariants
and how to add to them.
"""

from __future__ import annotations

from simulation.checks.failure import Violation
from simulation.drawing.scenarios import SCENARIOS, Scenario
from simulation.runner import Finding, Outcome, simulate

__all__ = ["SCENARIOS", "Finding", "Outcome", "Scenario", "Violation", "simulate"]
