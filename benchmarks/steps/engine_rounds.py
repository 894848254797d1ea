"""One engine process that runs rounds on request: ``python -m benchmarks.steps.engine_rounds JOB.json FD``.

It reads the number of a round from each line of its input, and writes a line of JSON with the costs to the descriptor.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from benchmarks.side_by_side.engine import Engine, Served
from benchmarks.side_by_side.jobs import BLOCK_TOKENS, Job
from benchmarks.side_by_side.prompts import Prompt, Texts
from benchmarks.steps.step_meter import MeteredStep, StepMeter, What

STAGGER_TOKENS = 2
"""Tokens by which each request is ahead of the previous one: each completes its block in a step of its own."""
PROMPT_TOKENS = 3 * BLOCK_TOKENS + 1
DECODED_TOKENS = 82
"""Two spans in which the requests complete blocks, and two quiet ones."""
SETTLED_STEPS = 4
"""Steps after a completed block in which it may still be copied and written."""
BUSY_PROMPTS = 16
BUSY_STORED_CHUNKS, BUSY_NEW_CHUNKS = 16, 4
"""Chunks of a prompt that tiers have, and chunks that are computed."""
BUSY_TOKENS = 8


class Rounds:
    """Runs rounds in one engine."""

    def __init__(self, job: Job, engine: Engine, meter: StepMeter) -> None:
        self._job, self._engine, self._meter = job, engine, meter
        self._texts = Texts(job.seed, job.sizes.model.vocabulary)

    def run(self, number: int) -> dict[str, Any]:
        """Costs of one round, by unit and kind of step."""
        whats: Sequence[What] = ("cpu_us", "calls")
        return {what: self._measure(what, f"{what} {number}") for what in whats}

    def _measure(self, what: What, name: str) -> dict[str, Any]:
        self._meter.what = what
        return {**self._decode(name), **self._busy(name)}

    def _decode(self, name: str) -> dict[str, Any]:
        running = self._job.sizes.concurrency
        prompts = [
            Prompt(f"{name} {i}", self._texts.text(f"{name} {i}", PROMPT_TOKENS + STAGGER_TOKENS * i))
            for i in range(running)
        ]
        self._meter.take()
        self._serve(prompts, running, DECODED_TOKENS)
        steps = self._meter.take()
        self._engine.settle()
        quiet, completing = split_steps(steps, running)
        return {"quiet": quiet, "completing": completing}

    def _busy(self, name: str) -> dict[str, Any]:
        stored = [self._texts.text(f"{name} busy {i}", BUSY_STORED_CHUNKS * BLOCK_TOKENS) for i in range(BUSY_PROMPTS)]
        new = [self._texts.text(f"{name} new {i}", BUSY_NEW_CHUNKS * BLOCK_TOKENS + 5) for i in range(BUSY_PROMPTS)]
        once = [Prompt(f"{name} first {i}", (*text, 3)) for i, text in enumerate(stored)]
        again = [Prompt(f"{name} again {i}", stored[i] + new[i]) for i in range(BUSY_PROMPTS)]
        self._serve(once, self._job.sizes.concurrency, 1)
        self._engine.settle()
        self._engine.forget()
        self._meter.take()
        served = self._serve(again, self._job.sizes.concurrency, BUSY_TOKENS)
        self._engine.settle()
        steps = self._meter.take()
        cached = sum(one.cached_tokens for one in served)
        possible = BUSY_PROMPTS * BUSY_STORED_CHUNKS * BLOCK_TOKENS
        self._engine.forget()
        return {
            "busy": [step.cost for step in steps if step.tokens],
            "waiting": [step.cost for step in steps if not step.tokens],
            "cached share": cached / possible,
        }

    def _serve(self, prompts: Sequence[Prompt], at_once: int, output_tokens: int) -> list[Served]:
        return list(self._engine.serve(prompts, at_once, output_tokens=output_tokens))


def split_steps(steps: Sequence[MeteredStep], running: int) -> tuple[list[float], list[float]]:
    """Costs of the steps in which all requests decode: quiet ones, and those that complete a block or soon after one.

    Steps soon after the prompts count as neither.
    """
    quiet: list[float] = []
    completing: list[float] = []
    since = since_prompt = 0
    for step in steps:
        decodes = step.running == running == step.tokens and not step.prompts
        since_prompt = since_prompt + 1 if decodes else 0
        since = 0 if step.chunks else since + 1
        if since_prompt > SETTLED_STEPS:
            (quiet if since > SETTLED_STEPS else completing).append(step.cost)
    return quiet, completing


def main() -> None:
    """Run rounds until the input ends."""
    job = Job.of_json(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    meter = StepMeter(BLOCK_TOKENS)
    with closing(Engine(job, meter)) as engine, os.fdopen(int(sys.argv[2]), "w", encoding="utf-8") as answers:
        connector = engine.scheduler.connector
        meter.watch(engine.scheduler, () if connector is None else (connector, get_kv_transfer_group()))
        rounds = Rounds(job, engine, meter)
        for line in sys.stdin:
            answers.write(json.dumps(rounds.run(int(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
