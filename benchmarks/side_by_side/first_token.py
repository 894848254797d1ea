"""First token from disk in vLLM: both seams of tierkv beside vLLM's own tiering. Needs vLLM.

One process serves and stores prompts. The next one finds them on disk, with an empty page cache: otherwise a stack that
reads through it would not read the disk. It gets some of them one by one, and then the others at once, more than it can
run. The stacks take turns in each round, and all settings but the sizes are the defaults. The limit of a seam is vLLM's
own tiering in the same round.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import Settings, has_gpu, progress
from benchmarks.rows import Row, Target
from benchmarks.side_by_side.figures import cacheable_tokens, cached_tokens, first_token_ms
from benchmarks.side_by_side.jobs import Life, ModelShape, Sizes, StackName
from benchmarks.side_by_side.vllm_ab import FULL, QUICK, Runner

ROUNDS = 3
SIZES = replace(FULL, alone=12, burst=36, burst_chunks=32, concurrency=4)
GPU_SIZES = replace(
    SIZES,
    model=ModelShape(layers=16, hidden=2048, heads=8, head_dim=128),
    device_chunks=4096,
    host_chunks=2048,
    long_chunks=256,
    alone=6,
    alone_chunks=256,
    batch_tokens=8192,
    burst=16,
    burst_chunks=256,
    concurrency=4,
)
"""On a GPU: prompts of 8,192 tokens in chunks of 2 MiB."""
OFFLOADING = (StackName.VLLM, StackName.SPEC, StackName.CONNECTOR)
_WHAT = {"alone, from disk": "one at a time", "queue, from disk": "all at once"}

Phases = Mapping[StackName, Mapping[str, Any]]
"""Phases of one round, by stack and by name."""


def run(settings: Settings) -> Iterator[Row]:
    """Yield a row per phase and stack, after all rounds."""
    if importlib.util.find_spec("vllm") is None:
        sys.stderr.write("first_token: vLLM is not installed here, so there is no peer to compare with\n")
        return
    sizes = settings.pick(GPU_SIZES if has_gpu() else SIZES, QUICK)
    with tempfile.TemporaryDirectory(dir=settings.directory, prefix="tierkv-benchmark-") as folder:
        runner = Runner(Path(folder), sizes)
        runner.write_model()
        rounds = [_round(runner, number) for number in range(settings.pick(ROUNDS, 1))]
    for phase in _WHAT:
        yield from (_row(phase, stack, rounds, sizes) for stack in OFFLOADING)


def _round(runner: Runner, number: int) -> Phases:
    order = (*OFFLOADING[number % 3 :], *OFFLOADING[: number % 3])
    for stack in order:
        runner.run(number, stack, Life.STORED)
    results = {}
    for stack in order:
        results[stack] = runner.run(number, stack, Life.DISK)
        figures = ", ".join(f"{_WHAT[name]} {first_token_ms(results[stack][name]):.1f} ms" for name in _WHAT)
        progress(f"first_token: round {number + 1}, {stack.value}: {figures}")
    return results


def _row(phase: str, stack: StackName, rounds: Sequence[Phases], sizes: Sizes) -> Row:
    count = sizes.alone if phase.startswith("alone") else sizes.burst - sizes.alone
    phases = [results[stack][phase] for results in rounds]
    ours = [first_token_ms(one) for one in phases]
    peers = [first_token_ms(results[StackName.VLLM][phase]) for results in rounds]
    is_peer = stack is StackName.VLLM
    return Row(
        f"first token, {count} prompts of {sizes.burst_chunks} chunks from disk, {_WHAT[phase]}: {stack.value}",
        "ms, median",
        median(ours),
        "" if is_peer else StackName.VLLM.value,
        None if is_peer else median(peers),
        () if is_peer else [a / b for a, b in zip(ours, peers, strict=True)],
        None if is_peer else Target("ratio", "<=", 0.9),
        {
            "slowest, ms": median(first_token_ms(one, max) for one in phases),
            "whole phase, s": median(one["wall_s"] for one in phases),
            "of the prompts cached, %": median(100 * cached_tokens(one) / cacheable_tokens(one) for one in phases),
            "steps": median(one["steps"] for one in phases),
        },
    )
