"""Loaded tokens as tierkv counts them, external hits as vLLM counts them, and cached tokens that clients receive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_process import StartEngine
from vllm_setups import BLOCK_TOKENS, EngineSetup, Seam, cached_of, prompts, tokens_of

HERE = "vllm_numbers"
CHUNK_TOKENS = 2 * BLOCK_TOKENS
MEMORY = {"host": {"capacity": "16MiB"}, "lookup": {"recompute": "off"}}


def setup_of(seam: Seam, place: Path, **arguments: Any) -> EngineSetup:
    """Two blocks per chunk, over host memory and disk."""
    tiers = [{"backend": "disk", "path": str(place / "disk"), "capacity": "64MiB"}]
    stack = {"host": {"capacity": "16MiB"}, "tiers": tiers, "lookup": {"recompute": "off"}}
    return EngineSetup(seam, stack, blocks_per_chunk=2, arguments=arguments)


def test_loaded_tokens_are_the_external_hits_of_vllm(seam: Seam, start_engine: StartEngine, tmp_path: Path) -> None:
    """With prompts of many lengths, hits that begin inside a chunk, preempted requests, and hits from both tiers.

    VLLM counts the hits of preempted requests apart, and publishes only the others."""
    asked = [prompt[:length] for prompt, length in zip(prompts("numbers", 6), (200, 192, 128, 97, 65, 33), strict=True)]
    crowd = prompts("crowd", 8)
    with start_engine(setup_of(seam, tmp_path, max_num_seqs=8)) as engine:
        engine.call(f"{HERE}:count_preempted_hits")
        engine.call("vllm_scenarios:serve", prompts=asked + crowd, tokens=64)
        assert engine.call("vllm_scenarios:preemptions") > 0
        engine.call("vllm_scenarios:serve_again", prompts=[prompt[:40] for prompt in asked])
        engine.call("vllm_scenarios:serve", prompts=asked)  # the first block of each is on the device
        engine.call("vllm_scenarios:forget_host")
        engine.call("vllm_scenarios:serve", prompts=crowd + asked, tokens=64)
        told = engine.call(f"{HERE}:hits")
    assert told["preempted"] > 0
    assert told["published"] > 1000
    beyond = told["loaded"] - told["published"] - told["preempted"]
    if seam == "connector":
        assert beyond == 0
    else:  # VLLM names whole chunks to the spec: where the device has a part of the first one, it counts the rest alone
        assert 0 <= beyond < len(asked + crowd) * CHUNK_TOKENS
        assert beyond % BLOCK_TOKENS == 0


def test_clients_are_not_told_of_refused_tokens(start_engine: StartEngine) -> None:
    """The second chunk of three was damaged: only the one in front of it was cached, whatever had been offered."""
    asked = prompts("refused", 1)
    with start_engine(EngineSetup("connector", MEMORY, blocks_per_chunk=2)) as engine:
        first = engine.call(f"{HERE}:serve_and_damage_chunk", prompts=asked, number=1)
        second = engine.call("vllm_scenarios:serve_again", prompts=asked)
        told = engine.call(f"{HERE}:hits")
        third = engine.call("vllm_scenarios:serve_again", prompts=asked)
    assert tokens_of(second) == tokens_of(first) == tokens_of(third)
    assert cached_of(second) == [CHUNK_TOKENS]
    assert cached_of(third) == [3 * CHUNK_TOKENS], "what was computed instead was stored"
    assert told["loaded"] == told["published"] == 3 * CHUNK_TOKENS, "both count what was offered"


def test_the_spec_tells_the_prompt_tokens_that_were_computed(start_engine: StartEngine, tmp_path: Path) -> None:
    """Not those that the device or a tier had: they would make the engine look faster than any tier."""
    asked = [prompt[:length] for prompt, length in zip(prompts("computed", 4), (200, 150, 97, 33), strict=True)]
    setup = setup_of("spec", tmp_path, max_num_seqs=4, max_num_batched_tokens=64)
    told, computed = [], []
    with start_engine(setup) as engine:
        engine.call(f"{HERE}:count_prompt_tokens")
        for call, tokens in (("serve", 8), ("serve_again", 8), ("serve_only", 1), ("serve_again", 1)):
            answers = engine.call(f"vllm_scenarios:{call}", prompts=asked, tokens=tokens)
            computed.append(sum(map(len, asked)) - sum(cached_of(answers)))
            told.append(engine.call(f"{HERE}:prompt_tokens") - 3)
    assert computed[0] == sum(map(len, asked))
    assert computed[1] < computed[0] / 4
    assert told == computed
