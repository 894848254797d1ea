"""Text for people: the story of a failure, and a summary of many seeds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from simulation.runner import Outcome

TRACE_LINES = 60
PROGRESS_S = 60.0
"""Seconds between two lines of progress."""


class Progress:
    """Lines of progress for a log, which shows no bar: one a minute, with totals and pace.

    Args:
        count: number of seeds.
        write: receives each line.
        clock: seconds; real ones, unless a test passes others.
    """

    def __init__(self, count: int, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._count = count
        self._write = write
        self._clock = clock
        self._started_s = self._told_s = clock()
        self._played = self._steps = self._failed = 0

    def add(self, outcome: Outcome) -> None:
        """Count one seed, and write a line if the last one is a minute old."""
        self._played += 1
        self._steps += outcome.steps
        self._failed += outcome.finding is not None
        now_s = self._clock()
        if now_s - self._told_s < PROGRESS_S:
            return
        self._told_s = now_s
        pace = self._steps / (now_s - self._started_s)
        counts = f"{self._played:,} of {self._count:,} seeds, {self._failed} failed"
        self._write(f"{counts}, {self._steps:,} steps, {pace:,.0f} a second\n")


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
