"""Timing: the sides of a ratio take turns in one run, and the median over the rounds counts."""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of a run.

    quick: sizes at which every row comes out within a second or so, and means nothing.
    directory: where rows that need a disk make their temporary folder.
    trace: requests to replay; None where none was given.
    slow_down: factor of the trace's times.
    model: folder of a real model; None where none was given.
    """

    quick: bool
    directory: Path
    trace: Path | None = None
    model: Path | None = None
    slow_down: float = 1.0

    def pick(self, full: _T, quick: _T) -> _T:
        """Choose the size for this run."""
        return quick if self.quick else full

    @property
    def rounds(self) -> int:
        """Number of turns of each side."""
        return self.pick(7, 1)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one turn: seconds of wall time, and of processor time over all threads of this process."""

    wall_s: float
    cpu_s: float = 0.0


Turn = Callable[[], Cost]


def has_gpu() -> bool:
    """Whether there is a CUDA device, and torch to use it."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch  # noqa: PLC0415 - an extra

    return torch.cuda.is_available()


def progress(text: str) -> None:
    """Report how far long work is, beside the result."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def timed(work: Callable[[], object]) -> Cost:
    """Do some work, and return its cost."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def take_turns(sides: Sequence[Turn], rounds: int) -> list[list[Cost]]:
    """Measure the costs of each side, round by round.

    A round before the first warms up and does not count. Each round begins with another side, so that none profits
    from always being after the same one.
    """
    costs: list[list[Cost]] = [[] for _ in sides]
    for number in range(-1, rounds):
        for place in range(len(sides)):
            side = (place + max(0, number)) % len(sides)
            cost = sides[side]()
            if number >= 0:
                costs[side].append(cost)
    return costs


def medians(costs: Sequence[Cost]) -> Cost:
    """Median of each figure over the rounds."""
    return Cost(statistics.median(cost.wall_s for cost in costs), statistics.median(cost.cpu_s for cost in costs))


def cpu_s_per_gb(cost: Cost, total_bytes: int) -> float:
    """Seconds of processor time per billion bytes moved."""
    return cost.cpu_s / (total_bytes / 1e9)


def wall_ratios(over: Sequence[Cost], under: Sequence[Cost]) -> list[float]:
    """Ratio of one side's wall time to the other's, round by round."""
    return [a.wall_s / b.wall_s for a, b in zip(over, under, strict=True)]


def cpu_ratios(over: Sequence[Cost], under: Sequence[Cost]) -> list[float]:
    """Ratio of processor times: for work of one thread, which other processes can only delay."""
    return [a.cpu_s / b.cpu_s for a, b in zip(over, under, strict=True)]
