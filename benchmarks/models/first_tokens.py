"""Time to the first token of texts, in processes that start empty or after others: run them, and compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import Settings
from benchmarks.models.real_model import Tokenizer
from benchmarks.rows import Row
from benchmarks.texts import texts

_ROOT = Path(__file__).resolve().parents[2]
_PROCESS_TIMEOUT_S = 1200
_LOG_LINES = 40

Answers = Mapping[str, Mapping[str, Any]]
"""Kind of text -> ``ttft_s``, ``cached`` (prompt tokens that were not computed), ``tokens`` (generated).

Where an engine tells it, ``load_s``, too.
"""


class Processes:
    """Runs a program for each life of an engine: it answers every kind of text, pass by pass, and writes the answers.

    Args:
        program: module of benchmarks that takes the paths of a job and of a result.
        model: folder of the model.
        environment: of the program, on top of this process's.
    """

    def __init__(self, program: str, model: Path, settings: Settings, environment: Mapping[str, str]) -> None:
        self._program = program
        self._directory = settings.directory
        self._environment = environment
        # Not at the end of a block: an engine's own cache, which counts in blocks, then holds as much as chunks do.
        length, count = settings.pick((1226, 24), (202, 4))
        tokenizer = Tokenizer(model)
        prompts = {name: tokenizer.tokens(text, length) for name, text in texts().items()}
        begin, *others = next(iter(prompts.values()))
        # The cost of a process's first forward passes must not count for a first token.
        warm_up = [begin, *reversed(others)]
        self._job = {"model": str(model), "prompts": prompts, "count": count, "warm_up": warm_up}

    def run(self, **job: object) -> dict[str, Answers]:
        """Run the program. Returns name of a pass -> its answers.

        Args:
            **job: what the program has to know beside model and prompts.

        Raises:
            RuntimeError: the program failed; with the end of what it wrote.
        """
        with tempfile.TemporaryDirectory(dir=self._directory, prefix="first-tokens-") as folder:
            given, result, log = (Path(folder) / name for name in ("job.json", "result.json", "log.txt"))
            given.write_text(json.dumps({**self._job, **job}), encoding="utf-8")
            with log.open("wb") as output:
                done = subprocess.run(  # noqa: S603 - our own module
                    [sys.executable, "-m", self._program, str(given), str(result)],
                    cwd=_ROOT,
                    env={**os.environ, **self._environment},
                    stdout=output,
                    stderr=output,
                    timeout=_PROCESS_TIMEOUT_S,
                    check=False,
                )
            if done.returncode or not result.is_file():
                lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
                raise RuntimeError("\n".join([f"{self._program} failed; the end of what it wrote:", *lines]))
            found: dict[str, Answers] = json.loads(result.read_text(encoding="utf-8"))
            return found


def row(what: str, found: Answers, limit_name: str, limit: Answers, same: Mapping[str, Answers]) -> Row:
    """Row with milliseconds to the first token, the median over texts, with a ratio per text.

    Args:
        what: in words.
        found: what was measured.
        limit_name: the limit, in words.
        limit: answers of the limit.
        same: in words -> answers that the found ones are compared with.
    """
    ms, limit_ms = ([1e3 * one["ttft_s"] for one in answers.values()] for answers in (found, limit))
    extra = {"cached tokens of a prompt": float(median(one["cached"] for one in found.values()))}
    extra |= {f"of texts, answers are {name}, %": same_answers(found, expected) for name, expected in same.items()}
    if all("load_s" in one for one in found.values()):
        extra["of it loading, ms"] = 1e3 * median(one["load_s"] for one in found.values())
    ratios = [a / b for a, b in zip(ms, limit_ms, strict=True)]
    return Row(f"first token, {what}", "ms", median(ms), limit_name, median(limit_ms), ratios, extra=extra)


def same_answers(found: Answers, expected: Answers) -> float:
    """Percent of texts with equal generated tokens."""
    equal = [kind for kind, answer in found.items() if answer["tokens"] == expected[kind]["tokens"]]
    return 100 * len(equal) / len(found)
