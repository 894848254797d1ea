"""One process of transformers that answers a job: ``python -m benchmarks.models.model_generate JOB RESULT``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any


class FirstToken:
    """Streamer that takes the time of the first generated token; the prompt is streamed before it."""

    def __init__(self) -> None:
        self._calls = 0
        self.at_s: float | None = None

    def put(self, _value: object) -> None:
        """Called by ``generate`` with the prompt, then with each token."""
        self._calls += 1
        if self._calls == 2:  # noqa: PLR2004 - the prompt, and the first token
            self.at_s = time.perf_counter()

    def end(self) -> None:
        """Called by ``generate`` at its end."""


class Generator:
    """Model with and without a prefix cache."""

    def __init__(self, model: str, place: str) -> None:
        self._torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
        tierkv: Any = import_module("tierkv.integrations.transformers")
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=self._torch.bfloat16).eval()
        disk = {"backend": "disk", "path": place, "capacity": "1GiB", "min_free_bytes": 0}
        self.cache = tierkv.TieredPrefixCache(self._model, {"host": {"capacity": "256MiB"}, "tiers": [disk]})

    def answer(self, prompt: Sequence[int], count: int, *, cached: bool) -> dict[str, Any]:
        """Answer one prompt alone: seconds to its first token, tokens not computed, and generated tokens."""
        first, began_s = FirstToken(), time.perf_counter()
        generate = self.cache.generate if cached else self._model.generate
        out = generate(
            self._torch.tensor([list(prompt)]),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            streamer=first,
        )
        if first.at_s is None:
            raise RuntimeError("no token was generated")
        found = {"ttft_s": first.at_s - began_s, "cached": 0, "tokens": out[0, len(prompt) :].tolist()}
        if cached:
            (report,) = self.cache.last_prompts
            found |= {"cached": report.loaded_tokens, "load_s": report.load_s}
        return found


def main() -> None:
    """Warm up, then answer all prompts once per pass: ``alone`` without the cache, all others with it."""
    given, result = map(Path, sys.argv[1:])
    job = json.loads(given.read_text(encoding="utf-8"))
    generator = Generator(job["model"], job["place"])
    for _ in range(2):
        generator.answer(job["warm_up"], 2, cached=True)
    answers = {
        name: {
            kind: generator.answer(prompt, job["count"], cached=name != "alone")
            for kind, prompt in job["prompts"].items()
        }
        for name in job["passes"]
    }
    if not generator.cache.close():
        raise RuntimeError("not everything reached the disk")
    result.write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
