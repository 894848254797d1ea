"""Settings of vLLM under which loaded tokens would be wrong, requests would fail, or stores would be lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm_process import EngineError, StartEngine
from vllm_setups import EngineSetup, Seam, cached_of, prompts, tokens_of

MEMORY = {"host": {"capacity": "16MiB"}, "lookup": {"recompute": "off"}}
LATENT = {"block_size": 16, "num_gpu_blocks_override": 100}
CACHED = 192


def test_latent_attention_that_cannot_go_on_behind_a_prefix_is_refused(seam: Seam, start_engine: StartEngine) -> None:
    """On a CPU without AMX vLLM takes a loaded prefix, and computes other tokens: there is no engine then."""
    setup = EngineSetup(seam, MEMORY, model="deepseek", arguments=LATENT)
    if " amx_tile " in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        asked = prompts("latent", 3)
        with start_engine(setup) as engine:
            first = engine.call("vllm_scenarios:serve", prompts=asked)
            second = engine.call("vllm_scenarios:serve_again", prompts=asked)
        assert cached_of(second) == [CACHED] * 3
        assert tokens_of(second) == tokens_of(first)
        return
    with pytest.raises(EngineError) as caught:
        start_engine(setup)
    assert "enable_prefix_caching = False and enable_chunked_prefill = False" in str(caught.value)
    assert "multi-head latent attention" in str(caught.value)


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


def test_stores_that_a_stop_would_lose_are_told_at_start(seam: Seam, start_engine: StartEngine, tmp_path: Path) -> None:
    """With vLLM's default it ends at once: what only the host tier holds is lost at every normal stop."""
    tiers = [{"backend": "disk", "path": str(tmp_path / "disk"), "capacity": "64MiB", "write": "back"}]
    told = {}
    for timeout_s in (0, 30):
        setup = EngineSetup(seam, {**MEMORY, "tiers": tiers}, arguments={"shutdown_timeout": timeout_s})
        with start_engine(setup) as engine:
            told[timeout_s] = "--shutdown-timeout 30" in engine.log.read_text(encoding="utf-8")
    assert told == {0: True, 30: False}
