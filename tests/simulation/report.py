"""Text for people: the story of a failure, and a summary of many seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from simulation.runner import Outcome

TRACE_LINES = 60


def story(outcome: Outcome, lines: int = TRACE_LINES) -> str:
    """Text of a failed run: the violation, the notes before it, and the command that reproduces it."""
    finding = outcome.finding
    if finding is None:
        return f"seed {outcome.seed}: all held"
    before = "\n".join(f"  {line}" for line in finding.trace[-lines:])
    return (
        f"seed {outcome.seed} broke at step {finding.step}: {finding.invariant}\n"
        f"  {finding.detail}\n"
        f"setup: {outcome.setup}\n"
        f"what happened before (oldest first):\n{before}\n"
        f"again: {outcome.reproduce}"
    )


def summary(outcomes: Sequence[Outcome]) -> str:
    """Summary of many runs, in a few lines."""
    failed = [outcome for outcome in outcomes if outcome.finding is not None]
    totals = total(outcomes)
    scenarios = Counter(outcome.scenario for outcome in outcomes)
    reached = ", ".join(f"{value:,} {name}" for name, value in sorted(totals.items()) if value)
    simulated_s = sum(outcome.simulated_s for outcome in outcomes)
    return (
        f"{len(outcomes)} seeds, {len(failed)} failed; {sum(outcome.steps for outcome in outcomes):,} engine steps, "
        f"{simulated_s / 60:,.0f} simulated minutes\n"
        f"scenarios: {', '.join(f'{name} {count}' for name, count in sorted(scenarios.items()))}\n"
        f"reached: {reached}"
        + (f"\nfailed seeds: {', '.join(str(outcome.seed) for outcome in failed)}" if failed else "")
    )


def total(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Sums of the counts of all runs."""
    totals: Counter[str] = Counter()
    for outcome in outcomes:
        totals.update(outcome.totals)
    return dict(totals)
