"""One process of vLLM that serves a job: ``python -m benchmarks.models.model_engine JOB.json RESULT.json``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 32
"""Smallest block that vLLM supports on a CPU."""
CONTEXT_TOKENS = 2048
KV_BYTES = 320 << 20
_SETTLE_S = 120.0
_REST_S = 0.001
"""Seconds that vLLM's own loop sleeps after a step without work."""


class Engine:
    """VLLM in this process, at its defaults but for sizes.

    Args:
        model: folder of the model.
        transfer: vLLM's ``kv_transfer_config``; None: it keeps its KV on the device alone.
    """

    def __init__(self, model: str, transfer: Mapping[str, Any] | None) -> None:
        vllm: Any = import_module("vllm")
        config: Any = import_module("vllm.config")
        self._parameters = vllm.SamplingParams
        self._engine = vllm.LLMEngine.from_engine_args(
            vllm.EngineArgs(
                model=model,
                dtype="bfloat16",
                seed=0,
                enforce_eager=True,
                block_size=BLOCK_TOKENS,
                kv_cache_memory_bytes=KV_BYTES,
                max_model_len=CONTEXT_TOKENS,
                max_num_batched_tokens=CONTEXT_TOKENS,
                max_num_seqs=4,
                enable_prefix_caching=True,
                skip_tokenizer_init=True,
                disable_log_stats=True,
                kv_transfer_config=None if transfer is None else config.KVTransferConfig(**transfer),
            )
        )
        self._core = self._engine.engine_core.engine_core
        self._served = 0

    def serve(self, prompt: Sequence[int], count: int) -> dict[str, Any]:
        """Serve one prompt alone: seconds to its first token, tokens that were not computed, and generated tokens."""
        self._served += 1
        parameters = self._parameters(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        began_s, first_s = time.perf_counter(), None
        self._engine.add_request(f"request {self._served}", {"prompt_token_ids": list(prompt)}, parameters)
        while True:
            outputs = self._engine.step()
            for output in outputs:
                if output.outputs[0].token_ids and first_s is None:
                    first_s = time.perf_counter() - began_s
                if output.finished:
                    tokens, cached = list(output.outputs[0].token_ids), output.num_cached_tokens or 0
                    return {"ttft_s": first_s, "cached": cached, "tokens": tokens}
            if not outputs:
                time.sleep(_REST_S)

    def settle(self) -> None:
        """Step until stores, and the writes to the tier below, have ended.

        Raises:
            TimeoutError: they do not.
        """
        deadline_s = time.perf_counter() + _SETTLE_S
        while self._core.scheduler.has_requests():
            self._engine.step()
            time.sleep(_REST_S)
            if time.perf_counter() > deadline_s:
                raise TimeoutError(f"work is left {_SETTLE_S} s after the last request")

    def forget(self) -> None:
        """Empty the device's prefix cache.

        Raises:
            RuntimeError: vLLM refuses.
        """
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache cannot be emptied: blocks are in use")

    def close(self) -> None:
        """Shut down engine, connector and tiers."""
        self._core.shutdown()


def main() -> None:
    """Warm up, then serve all prompts once per pass; some passes begin with an empty prefix cache."""
    job, result = map(Path, sys.argv[1:])
    what = json.loads(job.read_text(encoding="utf-8"))
    engine = Engine(what["model"], what["transfer"])
    for _ in range(2):
        engine.serve(what["warm_up"], 2)
    answers: dict[str, dict[str, Any]] = {}
    for name, begins_empty in what["passes"]:
        engine.settle()
        if begins_empty:
            engine.forget()
        answers[name] = {kind: engine.serve(prompt, what["count"]) for kind, prompt in what["prompts"].items()}
    engine.settle()
    engine.close()
    result.write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
