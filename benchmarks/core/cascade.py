"""Steady state: every step stores 128 chunks, the host tier is full, and so is the tier below.

The tier below has to evict as many chunks as it takes in. Its I/O threads could do far more than that, so what is not
written is the manager's doing: it made no room in time, and the host tier evicted the chunk first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.core.engine_calls import BATCH, CallTimes, Steps
from benchmarks.measure import Settings
from benchmarks.rows import Row, Target

STEP_S = 0.02
COPY_BYTES = 64 << 10


def run(settings: Settings) -> Iterator[Row]:
    """Measure one row."""
    steps = Steps(settings.pick(20_000, 2_000), COPY_BYTES)
    try:
        for _ in range(settings.pick(300, 10)):
            steps.step(CallTimes())
            time.sleep(STEP_S)
    finally:
        steps.busy.close()
    counters = steps.core.counters
    yield Row(
        f"{BATCH} chunks stored in each step of {1e3 * STEP_S:.0f} ms",
        "chunks written",
        counters.cascades["copying"],
        "chunks stored",
        counters.chunks_stored,
        target=Target("ratio", ">=", 0.95),
        extra={"evicted from the host tier before they were written": counters.cascades_dropped["copying"]},
    )
