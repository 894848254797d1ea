"""Decode steps of a stack under tierkv's own scheduler, without vLLM: calls and processor time."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.call_meters import Calls, CallTimes
from benchmarks.core.counted_calls import CHUNK_TOKENS, CountedStack, Meter
from benchmarks.core.rig import BLOCK_TOKENS
from benchmarks.core.step_calls import RUNNING, Decoding, open_stack
from benchmarks.measure import Settings
from benchmarks.rows import Row

CHUNKS = 3
"""Chunks that each request completes."""


def rows_alone(settings: Settings) -> Iterator[Row]:
    """A row per unit and kind of step; the limit is a quiet step."""
    rounds = settings.pick(5, 1)
    gc.collect()
    gc.disable()
    try:
        with (
            tempfile.TemporaryDirectory(dir=settings.directory, prefix="tierkv-benchmark-") as folder,
            open_stack(Path(folder) / "alone", 1024) as stack,
        ):
            counted = CountedStack(stack)
            calls = [_costs(counted, Calls) for _ in range(rounds)]
            times = [_costs(counted, CallTimes) for _ in range(rounds)]
    finally:
        gc.enable()
    for unit, costs in (("calls", calls), ("us", times)):
        for kind in ("gets a block", "completes a chunk", "none"):
            measured = median(one[kind] for one in costs)
            quiet = median(one["none"] for one in costs)
            what = "of which none gets a block" if kind == "none" else f"one of which {kind}"
            yield Row(
                f"a decode step of {RUNNING} requests, {what}, tierkv alone", unit, measured, "a quiet one", quiet
            )


def _costs(counted: CountedStack, meter: type[Meter]) -> dict[str, float]:
    """Median cost of each kind of step in a run of requests."""
    decoding = Decoding(counted, CHUNKS + 1)
    costs: dict[str, list[float]] = {"none": [], "gets a block": [], "completes a chunk": []}
    for number in range((CHUNKS - 1) * CHUNK_TOKENS):
        blocks, chunks, cost = decoding.step(meter)
        if number < BLOCK_TOKENS:
            continue
        kind = "completes a chunk" if chunks else "gets a block" if blocks else "none"
        costs[kind].append(cost.total)
    decoding.finish()
    return {kind: median(one) for kind, one in costs.items()}
