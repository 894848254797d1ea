"""Side by side in vLLM: one workload through vLLM's own tiering and through both seams of tierkv. Needs vLLM.

Real engines on the CPU, each in a process of its own, the stacks in turns: every round has all of them, in another
order. The limit of each figure is the same engine without offloading, in the same round. All stacks have the same
capacity: a CPU tier of N chunks, and a folder below it. All other settings are the defaults.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.measure import Settings
from benchmarks.rows import Row
from benchmarks.side_by_side.figures import Round, rows
from benchmarks.side_by_side.jobs import Job, Life, ModelShape, Sizes, StackName
from benchmarks.side_by_side.prompts import Shape

ROUNDS = 3
_TIMEOUT_S = 900
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # the other cores are for transfers, as a GPU would leave them
    "PYTHONHASHSEED": "0",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the meters sit on the scheduler's own objects
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

FULL = Sizes(
    ModelShape(layers=4, hidden=256, heads=16),
    Shape(
        personas=2,
        persona_chunks=8,
        conversations=14,
        turns=(2, 4),
        turn_chunks=(4, 9),
        one_shots=10,
        one_shot_chunks=(16, 32),
        output_tokens=8,
    ),
    device_chunks=320,
    host_chunks=256,
    long_host_chunks=64,
    long_chunks=100,
    alone=5,
    alone_chunks=32,
    concurrency=8,
    batch_tokens=1024,
    give_up_s=10,
    burst=160,
    burst_chunks=12,
)
QUICK = Sizes(
    ModelShape(layers=2, hidden=64, heads=2),
    Shape(
        personas=1,
        persona_chunks=1,
        conversations=3,
        turns=(2, 2),
        turn_chunks=(1, 2),
        one_shots=1,
        one_shot_chunks=(2, 3),
        output_tokens=2,
    ),
    device_chunks=48,
    host_chunks=12,
    long_host_chunks=8,
    long_chunks=12,
    alone=1,
    alone_chunks=4,
    concurrency=3,
    batch_tokens=256,
    give_up_s=2,
    burst=6,
    burst_chunks=4,
)


def run(settings: Settings) -> Iterator[Row]:
    """Yield all measures, after all rounds."""
    if importlib.util.find_spec("vllm") is None:
        sys.stderr.write("vllm_ab: vLLM is not installed here, so there is no limit to compare with\n")
        return
    sizes, count = settings.pick(FULL, QUICK), settings.pick(ROUNDS, 1)
    stacks = list(StackName)
    with (
        tempfile.TemporaryDirectory(dir=settings.directory, prefix="tierkv-benchmark-") as folder,
        _progress() as progress,
    ):
        runner = Runner(Path(folder), sizes)
        plan = [in_turns(number, stacks) for number in range(count)]
        task = progress.add_task("engines", total=sum(map(len, plan)))
        runner.write_model()
        rounds: list[Round] = []
        for number, lives in enumerate(plan):
            results: dict[tuple[StackName, Life], dict[str, Any]] = {}
            for stack, life in lives:
                progress.update(task, description=f"round {number + 1}: {stack.value}, {life.value}")
                results[stack, life] = runner.run(number, stack, life)
                progress.advance(task)
            rounds.append(results)
    yield from rows(rounds, stacks, sizes)


def in_turns(number: int, stacks: Sequence[StackName]) -> list[tuple[StackName, Life]]:
    """Order the processes of a round: each round begins with another stack, every second one goes backwards."""
    turned = [*stacks[number % len(stacks) :], *stacks[: number % len(stacks)]]
    order = turned[::-1] if number % 2 else turned
    again = [stack for stack in order if stack is not StackName.NONE]
    long = again if number == 0 else []
    return [(a, Life.FIRST) for a in order] + [(a, Life.RESTART) for a in again] + [(a, Life.LONG) for a in long]


class Runner:
    """Runs engine processes, one at a time, and reads their measurements."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self._folder = folder
        self._sizes = sizes
        self._model = folder / "model"

    def write_model(self) -> None:
        """Write the model, once for all processes."""
        write_model(self._model, self._sizes)

    def run(self, number: int, stack: StackName, life: Life) -> dict[str, Any]:
        """Run a process and read its phases. A restart finds on disk what the first life of its round has stored."""
        below = self._folder / f"round-{number}" / f"{stack.name.lower()}{'-long' if life is Life.LONG else ''}"
        below.mkdir(parents=True, exist_ok=True)
        job = Job(stack, life, self._sizes, str(self._model), str(below), number, counts_lookups=number == 0)
        job_path, result_path = self._folder / "job.json", self._folder / "result.json"
        job_path.write_text(json.dumps(asdict(job), default=lambda member: member.value), encoding="utf-8")
        result_path.unlink(missing_ok=True)
        _python("benchmarks.side_by_side.engine", job_path, result_path)
        result: dict[str, Any] = json.loads(result_path.read_text(encoding="utf-8"))
        return result


def write_model(folder: Path, sizes: Sizes) -> None:
    """Write the model of engines of these sizes, in a process of its own."""
    _python("benchmarks.side_by_side.model", folder, sizes.context_tokens, *astuple(sizes.model))


def engine_environment() -> dict[str, str]:
    """Environment of an engine process, without tierkv's own checks: the figures would be theirs."""
    inherited = {name: value for name, value in os.environ.items() if name != "TIERKV_VALIDATE"}
    return {**inherited, **_ENVIRONMENT}


def _python(module: str, *arguments: object) -> None:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(  # noqa: S603 - this interpreter, modules of this package
        command, env=engine_environment(), capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")


def _progress() -> Progress:
    """Progress bar, drawn only on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
