"""Whole stacks over the local backends, with an engine that stores and loads prompts."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tierkv import Stack, open_stack
from tierkv.testing.engines.hand_engine import SLOT_BYTES, HandEngine, Prompt, engine_spec

COOLDOWN_S = 0.5
HOST_SLOTS = 24
CAPACITY = "24MiB"


def open_engine(place: Path, backends: Sequence[str]) -> HandEngine:
    """Open a stack with a tier for each backend, named like it, below ``place``."""
    config = {
        "host": {"capacity": HOST_SLOTS * SLOT_BYTES},
        "lookup": {"deadline_s": 2.0, "recompute": "off"},
        "tiers": [_tier(place, backend) for backend in backends],
    }
    return HandEngine(open_stack(config, engine_spec("harness")))


def _tier(place: Path, backend: str) -> dict[str, object]:
    common = {"name": backend, "backend": backend, "breaker_failures": 3, "breaker_cooldown_s": COOLDOWN_S}
    if backend == "fsspec":
        return {**common, "url": f"file://{place}/{backend}"}
    own = {"segment_bytes": "1MiB", "min_free_bytes": 0} if backend == "disk" else {}
    return {**common, "path": str(place / backend), "capacity": CAPACITY, **own}


class Traffic:
    """Prompts that are stored once, and some of which are loaded again.

    Args:
        engine: drives the stack.
        seed: determines the prompts.
        prompts: number of the texts.
    """

    def __init__(self, engine: HandEngine, seed: int, prompts: int) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._prompts = prompts
        self.stored = self.loaded = 0
        self._next = 0

    def store_new(self) -> Prompt:
        """Store a prompt that was never stored before."""
        self._next += 1
        prompt = Prompt(self._prompts + self._next, 2)
        self._engine.store(prompt)
        self._engine.step()
        self.stored += prompt.chunks
        return prompt

    def turn(self) -> None:
        """Store or load one of the prompts; every byte that is loaded is compared."""
        prompt = Prompt(self._rng.randrange(self._prompts), self._rng.randrange(1, 7))
        if self._rng.random() < 0.4:
            self._engine.store(prompt)
            self.stored += prompt.chunks
        else:
            self.loaded += self._engine.load(prompt)
        for _ in range(3):
            self._engine.step()


class LogLines(logging.Handler):
    """Count of log lines at WARNING and above, by logger and format; and the first ones."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Count a line."""
        self.counts[f"{record.name}: {record.msg}"] += 1
        if len(self.lines) < 50:
            self.lines.append(record.getMessage())


def bytes_written(stack: Stack) -> dict[str, int]:
    """Bytes that each tier has written."""
    return {name: stats["bytes_written"] for name, stats in stack.tiers.stats().items()}
