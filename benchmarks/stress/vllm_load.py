"""Real vLLM under load: a burst, prompts of 32,768 tokens, a host tier of a tenth of the working set. Needs vLLM.

Both seams of tierkv beside vLLM's own tiering, in turns, each engine in a process of its own, as in ``vllm_ab``. All
stacks have the same capacity, and all other settings are the defaults. The limit of a seam is vLLM's own tiering in the
same round.

- *burst*: a process serves and stores prompts; the next one gets all of them at once.
- *long prompts*: the same with a very small model; one prompt alone, then the others at once. The page cache is empty.
- *small host tier*: the workload of ``vllm_ab``, twice in one process; in between the engine's own cache is emptied.
  Almost all hits come from the disk. A request that has no answer after a minute is taken back.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import Settings, progress
from benchmarks.rows import Row, Target
from benchmarks.side_by_side.figures import MIB, cacheable_tokens, cached_tokens, first_token_ms
from benchmarks.side_by_side.jobs import Life, ModelShape, Sizes, StackName
from benchmarks.side_by_side.vllm_ab import FULL, QUICK, Runner

ROUNDS = 3
OFFLOADING = (StackName.VLLM, StackName.SPEC, StackName.CONNECTOR)


@dataclass(frozen=True, slots=True)
class Load:
    """One workload. lives: processes, one after the other on one disk. phases: those of the last one that count."""

    sizes: Sizes
    lives: tuple[Life, ...]
    phases: tuple[str, ...]


_LONG = replace(
    FULL,
    model=ModelShape(layers=1, hidden=64, heads=1),
    device_chunks=2_200,
    host_chunks=2_048,
    long_chunks=1_030,
    alone=1,
    burst=4,
    burst_chunks=1_024,
    concurrency=2,
    batch_tokens=2_048,
)

LOADS: Mapping[str, Load] = {
    "burst": Load(FULL, (Life.STORED, Life.BURST), ("burst",)),
    "long prompts": Load(_LONG, (Life.STORED, Life.DISK), ("alone, from disk", "queue, from disk")),
    "small host tier": Load(replace(FULL, host_chunks=50), (Life.PASSES,), ("load, second pass",)),
}
QUICK_LOADS: Mapping[str, Load] = {
    "burst": Load(QUICK, (Life.STORED, Life.BURST), ("burst",)),
    "long prompts": Load(replace(QUICK, alone=1, burst=2), (Life.STORED, Life.DISK), ("alone, from disk",)),
    "small host tier": Load(QUICK, (Life.PASSES,), ("load, second pass",)),
}

Phases = Mapping[StackName, Mapping[str, Any]]
"""Phases of one round, by stack and by name."""


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of each workload, after all of its rounds."""
    if importlib.util.find_spec("vllm") is None:
        sys.stderr.write("vllm_load: vLLM is not installed here, so there is no peer to compare with\n")
        return
    for name, load in settings.pick(LOADS, QUICK_LOADS).items():
        with tempfile.TemporaryDirectory(dir=settings.directory, prefix="tierkv-benchmark-") as folder:
            runner = Runner(Path(folder), load.sizes)
            runner.write_model()
            rounds = [_round(runner, number, name, load) for number in range(settings.pick(ROUNDS, 1))]
        for phase in load.phases:
            yield from (_row(name, phase, stack, rounds) for stack in OFFLOADING)


def _round(runner: Runner, number: int, name: str, load: Load) -> Phases:
    results = {}
    for stack in (*OFFLOADING[number % 3 :], *OFFLOADING[: number % 3]):
        for life in load.lives:
            results[stack] = runner.run(number, stack, life)
        figures = ", ".join(f"{phase} {_first_ms(results[stack][phase]):.0f} ms" for phase in load.phases)
        progress(f"vllm_load: {name}, round {number + 1}, {stack.value}: {figures}")
    return results


def _row(name: str, phase: str, stack: StackName, rounds: Sequence[Phases]) -> Row:
    phases = [results[stack][phase] for results in rounds]
    ours = [_first_ms(one) for one in phases]
    peers = [_first_ms(results[StackName.VLLM][phase]) for results in rounds]
    is_peer = stack is StackName.VLLM
    return Row(
        f"{name}, {phase}: {stack.value}",
        "ms to the first token, median",
        median(ours),
        "" if is_peer else StackName.VLLM.value,
        None if is_peer else median(peers),
        () if is_peer else [a / b for a, b in zip(ours, peers, strict=True)],
        None if is_peer else Target("ratio", "<=", 0.9),
        {
            "slowest, ms": median(_first_ms(one, max) for one in phases),
            "whole phase, s": median(one["wall_s"] for one in phases),
            "answered, %": median(100 * len(one["requests"]) / one["asked"] for one in phases),
            "of the prompts cached, %": median(_cached_percent(one) for one in phases),
            "MiB read": median(one["bytes_read"] / MIB for one in phases),
        },
    )


def _first_ms(phase: Mapping[str, Any], of: Any = median) -> float:  # noqa: ANN401 - median, or max
    """Milliseconds to the first token of the requests that were answered; the whole phase if none was."""
    return first_token_ms(phase, of) if phase["requests"] else 1e3 * float(phase["wall_s"])


def _cached_percent(phase: Mapping[str, Any]) -> float:
    return 100 * cached_tokens(phase) / max(1, cacheable_tokens(phase))
