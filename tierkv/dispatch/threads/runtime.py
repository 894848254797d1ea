"""Source of time, randomness and threads of a stack: real or simulated."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

from tierkv.dispatch.threads.spawn import Spawn, start_thread


@dataclass(frozen=True, slots=True)
class Runtime:
    """Every input of a stack apart from the engine's calls and the backends' results."""

    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds; the clock of every deadline."""
    engine_sleep: Callable[[float], None] = time.sleep
    """Waits on the engine's thread. Used by open, flush and close only."""
    io_sleep: Callable[[float], None] = time.sleep
    """Waits on an I/O thread, between two tries of an operation."""
    wait: Callable[[Collection[futures.Future[Any]]], object] = futures.wait
    """Waits on the engine's thread for copies that must end before the forward pass."""
    spawn: Spawn = start_thread
    """Starts threads."""
    rng: random.Random = field(default_factory=random.Random)
    """Jitter of retries."""
