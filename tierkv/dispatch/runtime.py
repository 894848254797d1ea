"""Where a stack gets time, chance and threads from: the real ones, or those of a simulation."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

from tierkv.dispatch.spawn import Spawn, start_thread


@dataclass(frozen=True, slots=True)
class Runtime:
    """All that is not decided by what an engine asks and what tiers answer.

    clock: seconds, monotonic; every deadline is on it.
    engine_sleep: waits on the engine's thread, where opening, flushing and closing may.
    io_sleep: waits on an I/O thread, between two tries of an operation.
    wait: waits on the engine's thread for copies that must have ended before the forward pass.
    spawn: starts threads.
    rng: jitter of retries.
    """

    clock: Callable[[], float] = time.monotonic
    engine_sleep: Callable[[float], None] = time.sleep
    io_sleep: Callable[[float], None] = time.sleep
    wait: Callable[[Collection[futures.Future[Any]]], object] = futures.wait
    spawn: Spawn = start_thread
    rng: random.Random = field(default_factory=random.Random)
