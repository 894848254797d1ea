"""``nox -s soak``: traffic and faults over a whole stack for minutes, and what grows meanwhile."""

from __future__ import annotations

import errno
import gc
import logging
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness.lanes import Verdict
from harness.system_calls import ALL_CALLS, NO_CALLS, Action, Call, SystemCalls
from harness.traffic import LogLines, Traffic, open_engine

BACKENDS = ("disk", "lmdb", "fsspec")
PROMPTS = 120
SAMPLE_S = 1.0
SAMPLES_MIN = 180
"""Number of samples below which growth is not judged."""
LINES_PER_FAULT_MAX = 3
"""Log lines that a fault may cost: one that says so, and one when it has ended, for each tier that it hits."""
LINES_MAX = 30
"""Further log lines of a run."""
SLACK = {"memory_bytes": 24 << 20, "objects": 6000, "descriptors": 6, "threads": 2, "pending": 64}
"""Growth from the first third to the last that is no leak: of pools, caches and what is in flight."""
FAULT_SHARE = 0.1
"""Share of the turns that arm a single fault."""
SHARE = 0.05
"""Growth that is no leak, as a share of the first third."""


@dataclass(slots=True)
class Samples:
    """Measurements of this process, one row a second."""

    rows: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SLACK})

    def take(self, pending: int) -> None:
        """Measure. pending: operations in flight."""
        resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        values = {
            "memory_bytes": resident,
            "objects": len(gc.get_objects()),
            "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208  names, no paths
            "threads": threading.active_count(),
            "pending": pending,
        }
        for name, value in values.items():
            self.rows[name].append(value)

    def growth(self) -> dict[str, tuple[float, float]]:
        """Medians of the first and the last third of each measurement."""
        thirds = {name: (row[: len(row) // 3], row[-(len(row) // 3) :]) for name, row in self.rows.items()}
        return {name: (statistics.median(a), statistics.median(b)) for name, (a, b) in thirds.items() if a and b}

    def leaks(self) -> list[str]:
        """Measurements that grew from the first third to the last; none in a run too short to fill the tiers."""
        if len(self.rows["threads"]) < SAMPLES_MIN:
            return []
        return [
            f"{name} grew from {first:.0f} to {last:.0f}"
            for name, (first, last) in self.growth().items()
            if last > first * (1 + SHARE) + SLACK[name]
        ]


class Weather:
    """Faults of system calls: single ones all the time, and a second without writes now and then."""

    def __init__(self, calls: SystemCalls | None, seed: int) -> None:
        self._calls = calls
        self._rng = random.Random(seed)
        self.faults = 0
        self._calm_at_s = 0.0

    def turn(self, now_s: float) -> None:
        """Choose the next fault."""
        if self._calls is None:
            return
        if self._calm_at_s:
            if now_s >= self._calm_at_s:
                self._calls.refuse(NO_CALLS)
                self._calm_at_s = 0.0
            return
        if self._rng.random() < 0.002:
            self._calls.refuse(Call.WRITE | Call.SYNC | Call.OPEN, self._rng.choice((errno.EIO, errno.EROFS)))
            self._calm_at_s = now_s + 1.0
        elif self._rng.random() < FAULT_SHARE:
            action = self._rng.choice((Action.FAIL, Action.FAIL, Action.SHORTEN))
            self._calls.arm(self._rng.randrange(1, 20), action, self._rng.choice((errno.EIO, errno.ENOSPC)), ALL_CALLS)
        else:
            return
        self.faults += 1

    def end(self) -> None:
        """End all faults."""
        if self._calls is not None:
            self._calls.refuse(NO_CALLS)
            self._calls.arm(-1, Action.FAIL)


def soak(
    place: Path, calls: SystemCalls | None, seed: int, minutes: float, tell: Callable[[float], None]
) -> tuple[Verdict, dict[str, object]]:
    """Run traffic over a stack of three tiers. Returns the verdict, and the figures.

    Args:
        place: empty directory.
        calls: for the faults; None: there are none.
        seed: determines traffic and faults.
        minutes: length.
        tell: called with the share that is done.
    """
    lines = LogLines()
    logging.getLogger().addHandler(lines)
    if calls is not None:
        calls.watch(place)
    engine = open_engine(place, BACKENDS)
    traffic, weather, samples = Traffic(engine, seed, PROMPTS), Weather(calls, seed), Samples()
    began_s = time.monotonic()
    sample_s, end_s = began_s, began_s + 60 * minutes
    while (now_s := time.monotonic()) < end_s:
        weather.turn(now_s)
        traffic.turn()
        if now_s >= sample_s:
            sample_s = now_s + SAMPLE_S
            samples.take(engine.stack.introspection.stack().pending_ops)
            tell((now_s - began_s) / (end_s - began_s))
    weather.end()
    broken = samples.leaks()
    give_up_s = time.monotonic() + 10
    while not all(condition.writable for condition in engine.stack.tiers.health().values()):
        if time.monotonic() > give_up_s:
            broken.append(f"not healed: {engine.stack.tiers.health()}")
            break
        traffic.store_new()
    logged = sum(lines.counts.values())
    if logged > LINES_MAX + LINES_PER_FAULT_MAX * weather.faults:
        broken.append(f"{logged} log lines: {lines.counts.most_common(3)}")
    engine.stack.close(timeout_s=20)
    figures: dict[str, object] = {
        "chunks stored": traffic.stored,
        "chunks loaded": traffic.loaded,
        "faults": weather.faults,
        "log lines": logged,
        "first and last third": samples.growth(),
    }
    return Verdict("; ".join(broken)), figures
