"""Totals of the harness's programs: progress on a terminal, a table or JSON at the end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from harness.lanes import Verdict

BROKEN_MAX = 20
"""Findings of one total that are kept; the rest is counted."""


@dataclass(slots=True)
class Total:
    """Outcome of all seeds of one mode on one target."""

    name: str
    """Target and mode."""
    count: int = 0
    """Number of kills, faults or cuts."""
    broken_count: int = 0
    """Number of seeds that broke a promise."""
    broken: list[tuple[int, str]] = field(default_factory=list)
    """Seed and broken promise of the first findings."""
    notes: dict[str, int] = field(default_factory=dict)
    """Number of plays with each note."""
    slowest_open_s: float = 0.0
    """Longest time of opening in seconds."""
    slowest_heal_s: float = 0.0
    """Longest time in seconds from a fault to the first write of everything."""
    seconds: float = 0.0
    """Time of all plays."""
    skipped: str = ""
    """Reason why nothing was played; empty: it was."""

    def add(self, seed: int, verdict: Verdict) -> None:
        """Count a verdict."""
        self.count += verdict.count
        self.slowest_open_s = round(max(self.slowest_open_s, verdict.open_s), 3)
        self.slowest_heal_s = round(max(self.slowest_heal_s, verdict.heal_s), 3)
        if verdict.note:
            self.notes[verdict.note] = self.notes.get(verdict.note, 0) + 1
        if verdict.broken:
            self.broken_count += 1
            self.broken = [*self.broken, (seed, verdict.broken)][:BROKEN_MAX]

    def line(self) -> str:
        """One line of the table."""
        if self.skipped:
            return f"{self.name:16} skipped: {self.skipped}"
        notes = ", ".join(f"{count} {note}" for note, count in sorted(self.notes.items()))
        times = f"slowest open {self.slowest_open_s:.2f} s, slowest healing {self.slowest_heal_s:.2f} s"
        line = f"{self.name:16} {self.count:6} played, {self.broken_count} broken, {times}, {self.seconds:.0f} s in all"
        return f"{line} ({notes})" if notes else line


class Board:
    """Progress of a program."""

    def __init__(self, *, quiet: bool) -> None:
        columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.console = Console(stderr=True)
        self._progress = Progress(*columns, console=self.console, disable=quiet or not sys.stderr.isatty())
        self.totals: list[Total] = []

    def play(self, name: str, play: Callable[[int], Verdict], seeds: Iterable[int], plays_max: int) -> Total:
        """Play seeds until their counts reach ``plays_max``."""
        total = Total(name)
        self.totals.append(total)
        started = time.monotonic()
        with self._progress:
            bar = self._progress.add_task(name, total=plays_max)
            for seed in seeds:
                verdict = play(seed)
                total.add(seed, verdict)
                self._progress.update(bar, completed=total.count)
                if verdict.broken:
                    self.console.print(f"{name}, seed {seed}: {verdict.broken}", markup=False, highlight=False)
                if total.count >= plays_max:
                    break
        total.seconds = round(time.monotonic() - started, 1)
        return total

    def skip(self, name: str, reason: str) -> None:
        """Enter a reason why nothing is played."""
        self.totals.append(Total(name, skipped=reason))

    def finish(self, *, as_json: bool) -> int:
        """Print the totals. Returns the exit status: 1 if a promise broke."""
        if as_json:
            sys.stdout.write(json.dumps([asdict(total) for total in self.totals], indent=1) + "\n")
        else:
            sys.stdout.write("".join(f"{total.line()}\n" for total in self.totals))
        return int(any(total.broken_count for total in self.totals))
