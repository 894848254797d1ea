"""Models of other families: equal tokens from the tiers through both seams, and other tokens from other bytes."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_process import StartEngine
from vllm_setups import EngineSetup, Seam, cached_of, prompts, tokens_of

pytestmark = pytest.mark.long

STACK = {"host": {"capacity": "64MiB"}, "lookup": {"recompute": "off"}}
# vLLM chooses the blocks of a model with states itself: 128 tokens here, or 16 where no attention is beside them.
HYBRID: dict[str, Any] = {
    "block_size": None, "num_gpu_blocks_override": 60, "kv_cache_memory_bytes": 256 << 20, "max_model_len": 2048,
}  # fmt: skip
ROOMY: dict[str, Any] = {"num_gpu_blocks_override": 200}
MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...], list[int]]] = {
    "qwen3": ({}, (200, 257, 333, 65, 100, 470), [192, 256, 320, 64, 96, 448]),
    "gemma2": (ROOMY, (200, 257, 333, 65, 100, 470), [192, 256, 320, 64, 96, 448]),
    "gemma3n": (ROOMY, (200, 257, 333, 65, 100, 470), [192, 256, 320, 64, 96, 448]),
    "llama4": (ROOMY, (200, 257, 333, 65, 100, 470), [192, 256, 320, 64, 96, 448]),
    "mamba2": (HYBRID, (900, 1200, 1500, 700), [896, 1184, 1488, 688]),
    "falcon": (HYBRID, (900, 1200, 1500, 700), [896, 1152, 1408, 640]),
    "jamba": (HYBRID, (900, 1200, 1500, 700), [896, 1152, 1408, 640]),
}
"""Arguments of vLLM, lengths of prompts, and how many of their tokens are found."""


@pytest.mark.parametrize("model", MODELS)
def test_another_model_is_served_from_the_tiers(seam: Seam, model: str, start_engine: StartEngine) -> None:
    """One by one and all at once; then the host tier has other bytes: one seam refuses them, the other loads them."""
    arguments, lengths, found = MODELS[model]
    asked = [prompts(f"{model} {length}", 1, length)[0] for length in lengths]
    with start_engine(EngineSetup(seam, STACK, model=model, arguments=arguments)) as engine:

        def served(name: str) -> list[Any]:
            return [engine.call(f"vllm_scenarios:{name}", prompts=[prompt])[0] for prompt in asked]

        first, again = served("serve"), served("serve_again")
        together = engine.call("vllm_scenarios:serve_again", prompts=asked)
        engine.call("vllm_scenarios:overwrite_host")
        changed = served("serve_again")
        counters = engine.call("vllm_scenarios:counters")
    assert cached_of(again) == found
    assert tokens_of(first) == tokens_of(again) == tokens_of(together)
    assert cached_of(changed) == ([0] * len(asked) if seam == "connector" else found)
    assert (tokens_of(changed) == tokens_of(first)) is (seam == "connector")
    assert (counters["requests_dropped"], counters["errors_contained"]) == (0, 0)
