"""A real model in vLLM with tierkv, by both seams (``--model FOLDER``): computed, loaded from memory, loaded from disk.

Seconds to the first token, prompt by prompt: of one that is new, of the same one when the device has forgotten it, and
of the same one in the next process, when only the disk knows it. Whether answers stay the same is told beside it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import Settings
from benchmarks.real_model import Tokenizer
from benchmarks.rows import Row
from benchmarks.texts import texts

SEAMS = ("connector", "spec")
_MODULE = "tierkv.integrations.vllm"
_ROOT = Path(__file__).resolve().parents[1]
_ENGINE_TIMEOUT_S = 1200
_LOG_LINES = 40
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",  # vLLM's hashes of blocks begin with it: without it no process knows another's
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

Answers = Mapping[str, Mapping[str, Any]]
"""Kind of text -> ``ttft_s``, ``cached``, ``tokens``."""


def run(settings: Settings) -> Iterator[Row]:
    """Without tierkv, then with it by each seam: a process that begins with nothing, and the next one."""
    if settings.model is None:
        _say("no model was given (--model FOLDER), so nothing is measured")
        return
    if importlib.util.find_spec("vllm") is None:
        _say("vLLM is not installed here, so nothing is measured")
        return
    length, count = settings.pick((1200, 24), (200, 4))
    tokenizer = Tokenizer(settings.model)
    prompts = {name: tokenizer.tokens(text, length) for name, text in texts().items()}
    engines = _Engines(settings.model, prompts, count, settings.directory)
    _say("vLLM alone")
    alone = engines.run(None, [("computed", True), ("device", False)])
    for seam in SEAMS:
        with tempfile.TemporaryDirectory(dir=settings.directory, prefix="model-vllm-") as place:
            transfer = transfer_config(seam, Path(place))
            _say(f"{seam}, a process that begins with nothing")
            first = engines.run(transfer, [("computed", True), ("memory", True)])
            _say(f"{seam}, the next process")
            second = engines.run(transfer, [("disk", True)])
        computed = first["computed"]
        yield row(f"{seam}, computed", computed, "vLLM without tierkv", alone["computed"], alone["computed"])
        yield row(f"{seam}, from memory", first["memory"], "computed", computed, alone["device"])
        yield row(f"{seam}, from disk after a restart", second["disk"], "computed", computed, alone["device"])


def transfer_config(seam: str, place: Path) -> dict[str, Any]:
    """What stands behind ``--kv-transfer-config``: 256 MiB of memory, a folder below it."""
    disk = {"backend": "disk", "path": str(place), "capacity": "1GiB", "min_free_bytes": 0}
    stack = {"host": {"capacity": "256MiB"}, "chunk": {"blocks": 2}, "tiers": [disk]}
    if seam == "connector":
        return {
            "kv_connector": "TierKVConnector",
            "kv_connector_module_path": _MODULE,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"tierkv": stack},
        }
    extra = {"spec_name": "TierKVSpec", "spec_module_path": _MODULE, "tierkv": stack}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


class _Engines:
    """Runs engines, one process each."""

    def __init__(self, model: Path, prompts: Mapping[str, Sequence[int]], count: int, directory: Path) -> None:
        self._job = {"model": str(model), "prompts": dict(prompts), "count": count}
        # Of a length of its own: what a first forward pass of a kind costs must not be anybody's first token.
        first, *_ = prompts.values()
        self._job["warm_up"] = [*first[:1], *reversed(first[1 : len(first) // 2])]
        self._directory = directory

    def run(self, transfer: Mapping[str, Any] | None, passes: Sequence[tuple[str, bool]]) -> dict[str, Answers]:
        """Name of a pass -> its answers.

        Raises:
            RuntimeError: the engine failed; with the end of what it wrote.
        """
        with tempfile.TemporaryDirectory(dir=self._directory, prefix="model-vllm-job-") as folder:
            job, result, log = (Path(folder) / name for name in ("job.json", "result.json", "log.txt"))
            job.write_text(json.dumps({**self._job, "transfer": transfer, "passes": passes}), encoding="utf-8")
            with log.open("wb") as output:
                done = subprocess.run(  # noqa: S603 - our own module
                    [sys.executable, "-m", "benchmarks.model_engine", str(job), str(result)],
                    cwd=_ROOT,
                    env={**os.environ, **_ENVIRONMENT},
                    stdout=output,
                    stderr=output,
                    timeout=_ENGINE_TIMEOUT_S,
                    check=False,
                )
            if done.returncode or not result.is_file():
                lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
                raise RuntimeError("\n".join(["vLLM failed; the end of what it wrote:", *lines]))
            found: dict[str, Answers] = json.loads(result.read_text(encoding="utf-8"))
            return found


def row(what: str, found: Answers, limit_name: str, limit: Answers, expected: Answers) -> Row:
    """A row about seconds to the first token, a ratio per text. expected: whose tokens are the right ones."""
    ms, limit_ms = ([1e3 * one["ttft_s"] for one in answers.values()] for answers in (found, limit))
    extra = {
        "cached tokens of a prompt": median(one["cached"] for one in found.values()),
        "of texts, answers are equal, %": same_answers(found, limit),
        "of texts, answers are equal to vLLM's without tierkv, %": same_answers(found, expected),
    }
    ratios = [a / b for a, b in zip(ms, limit_ms, strict=True)]
    return Row(f"first token, {what}", "ms", median(ms), limit_name, median(limit_ms), ratios, extra=extra)


def same_answers(found: Answers, expected: Answers) -> float:
    """Percent of texts after which the same tokens came."""
    equal = [kind for kind, answer in found.items() if answer["tokens"] == expected[kind]["tokens"]]
    return 100 * len(equal) / len(found)


def _say(what: str) -> None:
    sys.stderr.write(f"model_vllm: {what}\n")
    sys.stderr.flush()
