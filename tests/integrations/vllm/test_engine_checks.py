"""Settings of vLLM under which loaded tokens would be wrong, requests would fail, or stores would be lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm_process import EngineError, PlainTokens, StartEngine
from vllm_setups import EngineSetup, Seam, cached_of, prompts, tokens_of

MEMORY = {"host": {"capacity": "16MiB"}, "lookup": {"recompute": "off"}}
LATENT = {"dtype": "bfloat16", "num_gpu_blocks_override": 100}
CACHED = 192


HAS_AMX = " amx_tile " in Path("/proc/cpuinfo").read_text(encoding="utf-8")


@pytest.mark.skipif(HAS_AMX, reason="vLLM can compute behind a prefix of latent attention on this CPU: it has AMX")
def test_latent_attention_that_cannot_go_on_behind_a_prefix_is_refused(seam: Seam, start_engine: StartEngine) -> None:
    """On a CPU without AMX vLLM takes a loaded prefix, and computes other tokens: there is no engine then."""
    setup = EngineSetup(seam, MEMORY, model="deepseek", arguments=LATENT)
    with pytest.raises(EngineError) as caught:
        start_engine(setup)
    assert "enable_prefix_caching = False and enable_chunked_prefill = False" in str(caught.value)
    assert "multi-head latent attention" in str(caught.value)


@pytest.mark.skipif(not HAS_AMX, reason="vLLM cannot compute behind a prefix of latent attention without AMX")
def test_latent_attention_goes_on_behind_a_loaded_prefix(seam: Seam, start_engine: StartEngine) -> None:
    """The tokens are those behind a hit in vLLM's own cache. In bfloat16, which its AMX kernels need, a prompt that is
    computed in one pass may have others, so prompts come one by one, and a hit is compared with a hit."""
    asked = prompts("latent", 4)
    with start_engine(EngineSetup(seam, MEMORY, model="deepseek", arguments=LATENT)) as engine:

        def served(name: str) -> list[Any]:
            return [engine.call(f"vllm_scenarios:{name}", prompts=[prompt])[0] for prompt in asked]

        served("serve")
        own, loaded = served("serve"), served("serve_again")
        engine.call("vllm_scenarios:overwrite_host")
        changed = served("serve_again")
    assert cached_of(own) == cached_of(loaded) == [CACHED] * 4
    assert tokens_of(loaded) == tokens_of(own)
    if seam == "connector":
        assert cached_of(changed) == [0] * 4, "its loads are verified, so changed chunks must be refused"
    else:
        assert cached_of(changed) == [CACHED] * 4
        assert tokens_of(changed) != tokens_of(own), "the tokens must depend on what was loaded"


@pytest.mark.parametrize("flags", [{}, {"enable_prefix_caching": False, "enable_chunked_prefill": True}])
def test_pooling_of_all_tokens_is_refused(seam: Seam, start_engine: StartEngine, flags: dict[str, bool]) -> None:
    """With chunked prefill, vLLM serves this alone; behind a loaded prefix its pooler raised and the engine ended."""
    pooling = {"runner": "pooling", "pooler_config": {"pooling_type": "MEAN"}}
    with pytest.raises(EngineError) as caught:
        start_engine(EngineSetup(seam, MEMORY, arguments={**pooling, **flags}))
    assert "seq_pooling_type = 'MEAN'" in str(caught.value)
    assert "removing kv_transfer_config" in str(caught.value)


def test_pooling_of_the_last_token_is_served_from_the_tiers(seam: Seam, start_engine: StartEngine) -> None:
    """An embedding behind a loaded prefix is the one that was computed from the whole prompt."""
    asked = prompts("pooling", 3)
    with start_engine(EngineSetup(seam, MEMORY, arguments={"runner": "pooling"})) as engine:
        first = engine.call("vllm_scenarios:embed", prompts=asked)
        again = engine.call("vllm_scenarios:embed_again", prompts=asked)
        engine.call("vllm_scenarios:overwrite_host")
        changed = engine.call("vllm_scenarios:embed_again", prompts=asked)
    assert cached_of(again) == [CACHED] * 3
    for one, other in zip(first, again, strict=True):
        assert other["embedding"] == pytest.approx(one["embedding"], abs=1e-4)
    # The connector refuses the changed chunks, the spec trusts its host tier.
    assert cached_of(changed) == ([0] * 3 if seam == "connector" else [CACHED] * 3)
    unlike = [
        max(abs(a - b) for a, b in zip(x["embedding"], y["embedding"], strict=True))
        for x, y in zip(first, changed, strict=True)
    ]
    assert (min(unlike) > 0.01) is (seam == "spec"), "the embedding must depend on what was loaded"


def test_pictures_without_hashes_are_refused(seam: Seam, start_engine: StartEngine) -> None:
    """Numbers tell them apart in one process only: after a restart, a picture had the KV of another one."""
    numbered = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0, "limit_mm_per_prompt": {"image": 1}}
    with pytest.raises(EngineError) as caught:
        start_engine(EngineSetup(seam, MEMORY, model="idefics", arguments=numbered))
    assert "enable_prefix_caching = False and mm_processor_cache_gb = 0" in str(caught.value)


def test_a_role_that_only_stores_is_refused(seam: Seam, start_engine: StartEngine) -> None:
    """VLLM's OffloadingConnector takes any role and does both; tierkv promises nothing that it does not do."""
    setup = EngineSetup(seam, MEMORY)
    producer = {**setup.kv_transfer_config(), "kv_role": "kv_producer"}
    with pytest.raises(EngineError) as caught:
        start_engine(replace(setup, arguments={"kv_transfer_config": producer}))
    assert 'kv_role = "kv_producer"' in str(caught.value)
    assert '"kv_role": "kv_both"' in str(caught.value)


def test_a_mistake_in_the_stack_is_named_with_its_place(seam: Seam, start_engine: StartEngine, tmp_path: Path) -> None:
    """A stack inside vLLM's arguments has no file, so the key that holds it is named."""
    tiers = [{"backend": "dsik", "path": str(tmp_path), "capacity": "64MiB"}]
    with pytest.raises(EngineError) as caught:
        start_engine(EngineSetup(seam, {**MEMORY, "tiers": tiers}))
    assert 'kv_connector_extra_config.tierkv: tiers[0].backend = "dsik"' in str(caught.value)


def inside_multi_connector(setup: EngineSetup) -> EngineSetup:
    """The same connector as the only one of vLLM's ``MultiConnector``, with vLLM's default policy."""
    inner = setup.kv_transfer_config()
    inner.pop("kv_load_failure_policy", None)
    outer: dict[str, Any] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [inner]},
    }
    return replace(setup, arguments={**setup.arguments, "kv_transfer_config": outer})


def test_a_refused_chunk_inside_a_multi_connector_is_computed(start_engine: StartEngine) -> None:
    """VLLM's scheduler reads the policy of the outer configuration, the inner connector has a copy."""
    asked = prompts("multi", 3)
    setup = inside_multi_connector(EngineSetup("connector", MEMORY, blocks_per_chunk=2))
    with start_engine(setup) as engine:
        first = engine.call("vllm_scenarios:serve", prompts=asked)
        engine.call("vllm_scenarios:overwrite_host")
        second = engine.call("vllm_scenarios:serve_again", prompts=asked)
        assert engine.call("vllm_scenarios:counters")["loads_failed"] > 0
    assert tokens_of(second) == tokens_of(first)


def test_a_load_that_fails_inside_a_multi_connector_is_computed(start_engine: StartEngine) -> None:
    """The spec reports it through the connector that created its worker, and that is one of several here."""
    asked = prompts("multi", 3)
    setup = inside_multi_connector(EngineSetup("spec", MEMORY))
    with start_engine(setup, {"TIERKV_VALIDATE": "0"}) as engine:
        told = engine.call("vllm_faults:serve_with_broken_loads", prompts=asked)
    assert tokens_of(told["known"]) == tokens_of(told["first"])
    assert len(told["failed"]) == len(asked)


def test_stores_that_a_stop_would_lose_are_told_at_start(seam: Seam, start_engine: StartEngine, tmp_path: Path) -> None:
    """With vLLM's default it ends at once: what only the host tier holds is lost at every normal stop."""
    tiers = [{"backend": "disk", "path": str(tmp_path / "disk"), "capacity": "64MiB", "write": "back"}]
    told = {}
    for timeout_s in (0, 30):
        setup = EngineSetup(seam, {**MEMORY, "tiers": tiers}, arguments={"shutdown_timeout": timeout_s})
        with start_engine(setup) as engine:
            told[timeout_s] = "--shutdown-timeout 30" in engine.log.read_text(encoding="utf-8")
    assert told == {0: True, 30: False}


def test_a_connector_beside_one_that_requires_a_layout_serves(
    start_engine: StartEngine, plain_tokens: PlainTokens
) -> None:
    """VLLM refuses two connectors with different requirements, and others of its connectors require one."""
    setup = EngineSetup("connector", MEMORY)
    outer = inside_multi_connector(setup).arguments["kv_transfer_config"]
    outer["kv_connector_extra_config"]["connectors"].append(EngineSetup("spec", MEMORY).kv_transfer_config())
    asked = prompts("beside another connector", 3)
    with start_engine(replace(setup, arguments={"kv_transfer_config": outer})) as engine:
        first = engine.call("vllm_scenarios:serve", prompts=asked)
        second = engine.call("vllm_scenarios:serve_again", prompts=asked)
    assert tokens_of(first) == tokens_of(second) == plain_tokens("llama", asked, 16)
    assert cached_of(second) == [CACHED] * 3
