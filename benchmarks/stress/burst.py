"""Many prompts at once after a restart, all of them on disk: the share of their tokens that is not computed.

First in the reference engine: a model of plain torch that runs four requests at a time, over a real disk tier. Then,
if vLLM is installed, in vLLM with both seams of tierkv and with vLLM's own tiering over its file tier, each in a
process of its own, in turns: one process serves and stores the prompts, the next one gets them all at once. Every stack
has the same capacity, and all other settings are the defaults. The limit of a seam is the share of vLLM's own tiering
in the same round.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import Settings, progress
from benchmarks.rows import Row, Target
from benchmarks.side_by_side.figures import cacheable_tokens, cached_tokens
from benchmarks.side_by_side.jobs import Life, Sizes, StackName
from benchmarks.side_by_side.vllm_ab import FULL, QUICK, Runner
from tierkv.frames.frame import HEADER_BYTES
from tierkv.stack.opening import open_stack
from tierkv.stack.stack import Stack

ROUNDS = 3
ODD_TOKENS = 5
PREFILL_TOKENS_PER_S = 1_000.0
LONG_ANSWERS = replace(FULL, shape=replace(FULL.shape, output_tokens=48), host_chunks=1024)
"""Sizes of ``vllm_ab``, but for two. The answers are so long that prompts wait longer than a lookup's deadline. The CPU
tier has room for half of the chunks, because a small one costs vLLM's own tiering most of its hits."""
OFFLOADING = (StackName.VLLM, StackName.SPEC, StackName.CONNECTOR)


@dataclass(frozen=True, slots=True)
class Burst:
    """Prompts for the reference engine, in chunks of one block, and chunks of its host tier."""

    prompts: int
    chunks: int
    host_chunks: int
    output_tokens: int


def run(settings: Settings) -> Iterator[Row]:
    """Measure the reference engine, then vLLM."""
    with tempfile.TemporaryDirectory(dir=settings.directory, prefix="tierkv-benchmark-") as folder:
        if importlib.util.find_spec("torch") is None:
            sys.stderr.write("burst: torch is not installed here, so there is no reference engine\n")
        else:
            yield _in_reference(Path(folder) / "reference", settings.pick(Burst(160, 12, 48, 64), Burst(6, 3, 6, 2)))
        if importlib.util.find_spec("vllm") is None:
            sys.stderr.write("burst: vLLM is not installed here, so there is no peer to compare with\n")
            return
        sizes = settings.pick(LONG_ANSWERS, QUICK)
        yield from _in_vllm(Runner(Path(folder), sizes), sizes, settings.pick(ROUNDS, 1))


def _in_reference(path: Path, burst: Burst) -> Row:
    """Serve prompts, then serve them again with a new engine and stack on the same disk, all at once."""
    import torch  # noqa: PLC0415 - not everywhere

    from tierkv.reference.configs import EngineConfig, ModelConfig  # noqa: PLC0415 - needs torch
    from tierkv.reference.engine import Engine  # noqa: PLC0415 - needs torch

    model = ModelConfig(layers=2, heads=2, kv_heads=1, hidden=16, intermediate=32, vocab=512)
    blocks = burst.chunks + 2 + (ODD_TOKENS + burst.output_tokens) // 16  # nothing is preempted
    config = EngineConfig(model=model, num_blocks=1 + 4 * blocks, max_running=4, max_batched_tokens=512)
    draw = random.Random(1)
    length = burst.chunks * config.block_tokens + ODD_TOKENS
    prompts = [draw.choices(range(model.vocab), k=length) for _ in range(burst.prompts)]

    def open_it(host_chunks: int) -> Stack:
        spec = config.engine_spec()
        # So small a model computes faster than a disk reads; it states the rate of one for which loading is worth it.
        spec = replace(spec, capabilities=replace(spec.capabilities, prefill_tokens_per_s=PREFILL_TOKENS_PER_S))
        slot_bytes = HEADER_BYTES + sum(spec.groups[0].page_bytes)
        disk = {"backend": "disk", "path": str(path), "capacity": "256MiB", "min_free_bytes": 0}
        host = {"capacity": host_chunks * slot_bytes}
        return open_stack({"host": host, "tiers": [{**disk, "segment_bytes": "16MiB"}]}, spec)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second one waits for the core of the I/O threads
    try:
        with open_it(2 * burst.prompts * burst.chunks) as stack:  # so that every chunk is on disk at its end
            Engine(config, connector=stack).generate(prompts, 1)
        progress(f"burst: {burst.prompts} prompts are stored")
        with open_it(burst.host_chunks) as stack:
            began_s = time.perf_counter()
            records = Engine(config, connector=stack).generate(prompts, burst.output_tokens)
            took_s = time.perf_counter() - began_s
            counters = stack.metrics.counters
    finally:
        torch.set_num_threads(threads)
    return Row(
        f"reference engine: {burst.prompts} prompts of {burst.chunks} chunks at once, host tier of {burst.host_chunks}",
        "tokens loaded",
        sum(record.tokens_loaded for record in records),
        "whole chunks of all prompts",
        burst.prompts * burst.chunks * config.block_tokens,
        target=Target("ratio", ">=", 0.95),
        extra={
            "seconds": took_s,
            "lookups that missed their deadline": counters.deadlines_expired,
            "chunks read per chunk loaded": counters.promotions["disk"] / max(1, counters.chunks_loaded),
        },
    )


def _in_vllm(runner: Runner, sizes: Sizes, count: int) -> Iterator[Row]:
    runner.write_model()
    rounds: list[dict[StackName, Mapping[str, Any]]] = []
    for number in range(1, count + 1):
        results = {}
        for stack in (*OFFLOADING[number % 3 :], *OFFLOADING[: number % 3]):
            runner.run(number, stack, Life.STORED)
            results[stack] = runner.run(number, stack, Life.BURST)["burst"]
            progress(f"burst: round {number}, {stack.value}, {100 * _share(results[stack]):.1f} % cached")
        rounds.append(results)
    for stack in OFFLOADING:
        yield _vllm_row(stack, rounds, sizes)


def _vllm_row(stack: StackName, rounds: Sequence[Mapping[StackName, Mapping[str, Any]]], sizes: Sizes) -> Row:
    phases = [results[stack] for results in rounds]
    shares = [_share(phase) for phase in phases]
    peers = [_share(results[StackName.VLLM]) for results in rounds]
    is_peer = stack is StackName.VLLM
    limits = [1.0] * len(shares) if is_peer else peers
    return Row(
        f"vLLM: {sizes.burst} prompts of {sizes.burst_chunks} chunks at once: {stack.value}",
        "% of tokens cached",
        100 * median(shares),
        "whole chunks of all prompts" if is_peer else "vLLM's tiering",
        100 * median(limits),
        [a / b for a, b in zip(shares, limits, strict=True)],
        None if is_peer else Target("ratio", ">=", 1.0),
        {
            "seconds until all have ended": median(phase["wall_s"] for phase in phases),
            "median seconds to the first token": median(
                median(one["ttft_s"] for one in phase["requests"]) for phase in phases
            ),
            "deferrals": median(phase["counts"].get("deferrals", 0) for phase in phases),
            "bytes read, MiB": median(phase["bytes_read"] for phase in phases) / (1 << 20),
            "scheduling in all steps, ms of processor time": 1e3
            * median(phase["scheduling_cpu"]["total_s"] for phase in phases),
        },
    )


def _share(phase: Mapping[str, Any]) -> float:
    return cached_tokens(phase) / cacheable_tokens(phase)
