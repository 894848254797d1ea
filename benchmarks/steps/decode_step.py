"""Cost of a decode step of eight requests: of tierkv's own scheduler, and inside real vLLM beside vLLM's own tiering.

Costs are function calls and processor time of the engine's thread, in turns. Without vLLM, the limit is what a quiet
step costs. With vLLM, there is one engine process per stack, all at the same time, and every round has all of them in
turn. A figure is what a step costs beyond the same engine without offloading in the same round; its limit is the same
of vLLM's own tiering. *Quiet* steps decode only; *completing* ones are those in which each request completes a block,
until its copy and its write have ended; *busy* ones compute and load prompts whose beginnings tiers have.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median
from typing import IO, Any, Self

from benchmarks.measure import Settings, progress
from benchmarks.rows import Row, Target
from benchmarks.side_by_side.jobs import Job, Life, StackName
from benchmarks.side_by_side.vllm_ab import FULL, engine_environment, in_turns, write_model
from benchmarks.steps.alone import rows_alone

ROUNDS = 5
EXIT_S = 60
"""Time for an engine to write back and exit when its last round has ended."""
UNITS = {"calls": "calls", "cpu_us": "us"}
KINDS = {
    "quiet": "a quiet decode step of 8 requests",
    "completing": "a decode step of 8 requests that complete blocks, in turn",
    "busy": "a busy step, with prompts and loads",
}
SEAMS = (StackName.SPEC, StackName.CONNECTOR)

Costs = Mapping[str, Mapping[str, Any]]
"""Unit -> kind of step -> cost of each step."""


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of tierkv alone, then those of both seams where vLLM is installed."""
    yield from rows_alone(settings)
    if importlib.util.find_spec("vllm") is None:
        sys.stderr.write("decode_step: vLLM is not installed here, so its own tiering is not measured\n")
        return
    with tempfile.TemporaryDirectory(dir=settings.directory, prefix="tierkv-benchmark-") as folder:
        rounds = _measure(Path(folder), settings.pick(ROUNDS, 1))
    yield from rows_in_vllm(rounds)


def _measure(folder: Path, count: int) -> list[dict[StackName, Costs]]:
    sizes = replace(FULL, device_chunks=400, host_chunks=1200)
    model = folder / "model"
    write_model(model, sizes)
    stacks = list(StackName)
    rounds: list[dict[StackName, Costs]] = []
    with ExitStack() as open_engines:
        engines = {
            stack: open_engines.enter_context(
                EngineProcess(
                    Job(
                        stack,
                        Life.FIRST,
                        sizes,
                        str(model),
                        str(folder / stack.name),
                        0,
                        counts_lookups=False,
                        prompt_only=False,
                    ),
                    folder,
                )
            )
            for stack in stacks
        }
        for number in range(-1, count):  # the first one warms up
            costs: dict[StackName, Costs] = {}
            for stack in [stack for stack, life in in_turns(number, stacks) if life is Life.FIRST]:
                costs[stack] = engines[stack].run(number)
                progress(f"decode_step: round {number + 1} of {count}, {stack.value}: ended")
            if number >= 0:
                rounds.append(costs)
    return rounds


class EngineProcess:
    """One engine process, which runs a round at a time."""

    def __init__(self, job: Job, folder: Path) -> None:
        Path(job.directory).mkdir()
        path = folder / f"{job.stack.name}.json"
        path.write_text(json.dumps(asdict(job), default=lambda member: member.value), encoding="utf-8")
        orders, told = os.pipe()
        reader, writer = os.pipe()
        self._log: IO[bytes] = (folder / f"{job.stack.name}.log").open("w+b")
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, a module of this package
            [sys.executable, "-m", "benchmarks.steps.engine_rounds", str(path), str(writer)],
            env=engine_environment(),
            stdin=orders,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[writer],
        )
        os.close(orders)
        os.close(writer)
        self._orders = os.fdopen(told, "w", encoding="utf-8")
        self._answers = os.fdopen(reader, encoding="utf-8")

    def run(self, number: int) -> Costs:
        """Run a round.

        Raises:
            RuntimeError: the process has ended; with the end of its log.
        """
        self._orders.write(f"{number}\n")
        self._orders.flush()
        line = self._answers.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"an engine has ended:\n{self._log.read()[-4000:].decode()}")
        costs: Costs = json.loads(line)
        return costs

    def __enter__(self) -> Self:
        """Return the process."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._orders.close()
        end_process(self._process, EXIT_S)
        self._answers.close()
        self._log.close()


def end_process(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Wait until an engine has exited. One that does not is killed: its rounds are measured, and must not be lost."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"decode_step: an engine did not exit within {timeout_s:.0f} s, so it was killed\n")
        process.kill()
        process.wait()


def rows_in_vllm(rounds: Sequence[Mapping[StackName, Costs]]) -> Iterator[Row]:
    """Rows of both seams beside vLLM's own tiering."""
    for kind, what in KINDS.items():
        for unit, name in UNITS.items():
            for seam in SEAMS:
                yield _row(rounds, seam, kind, what, unit, name)


def _row(  # noqa: PLR0913, PLR0917 - one cell of a table
    rounds: Sequence[Mapping[StackName, Costs]], seam: StackName, kind: str, what: str, unit: str, name: str
) -> Row:
    whole = {stack: [_cost(costs[stack], unit, kind) for costs in rounds] for stack in StackName}
    added = {
        stack: [ours - bare for ours, bare in zip(whole[stack], whole[StackName.NONE], strict=True)] for stack in whole
    }
    extra = {
        f"the whole step, {name}": median(whole[seam]),
        f"the whole step with vLLM's tiering, {name}": median(whole[StackName.VLLM]),
        f"the whole step without offloading, {name}": median(whole[StackName.NONE]),
    }
    if kind == "busy":
        for stack in (seam, StackName.VLLM):
            all_of = [sum(costs[stack][unit]["busy"]) + sum(costs[stack][unit]["waiting"]) for costs in rounds]
            extra[f"all steps of a round, {stack.value}, {name}"] = median(all_of)
            extra[f"cached share, {stack.value}"] = median(costs[stack][unit]["cached share"] for costs in rounds)
    ratios = [ours / theirs for ours, theirs in zip(added[seam], added[StackName.VLLM], strict=True)]
    return Row(
        f"{what}, added by {seam.value}",
        name,
        median(added[seam]),
        "vLLM's own tiering",
        median(added[StackName.VLLM]),
        ratios,
        Target("ratio", "<=", 1.0),
        extra,
    )


def _cost(costs: Costs, unit: str, kind: str) -> float:
    """Cost of a usual quiet step, or the mean of the others, which differ from step to step."""
    steps: Sequence[float] = costs[unit][kind]
    return median(steps) if kind == "quiet" else mean(steps)
