"""Behaviour of vLLM 0.33 alone, in its engine: ``nox -s vllm-033``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from vllm.version import __version_tuple__ as vllm_version
from vllm_process import EngineProcess, PlainTokens, StartEngine
from vllm_setups import EngineSetup, cached_of, prompts, tokens_of

pytestmark = pytest.mark.skipif(vllm_version < (0, 33), reason="vLLM 0.33 brought it; nox -s vllm-033 has that")

CACHED = 192


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, start_engine: StartEngine) -> Iterator[EngineProcess]:
    """The spec seam in an engine that waits for small loads within the step that wants them."""
    place: Path = tmp_path_factory.mktemp("disk")
    tiers = [{"backend": "disk", "path": str(place), "capacity": "64MiB"}]
    stack = {"host": {"capacity": "16MiB"}, "tiers": tiers, "lookup": {"recompute": "off"}}
    setup = EngineSetup("spec", stack, blocks_per_chunk=2)
    transfer = setup.kv_transfer_config()
    transfer["kv_connector_extra_config"]["sync_load_budget_bytes"] = 1 << 30
    with start_engine(replace(setup, arguments={"kv_transfer_config": transfer})) as engine:
        yield engine


def test_a_load_that_a_step_waits_for(engine: EngineProcess, plain_tokens: PlainTokens) -> None:
    """VLLM submits it, waits, and computes on what it brought in the same step: it must be there, and be right."""
    asked = prompts("within a step", 3)
    engine.call("vllm_watching:count_expedited")
    first = engine.call("vllm_scenarios:serve", prompts=asked)
    second = engine.call("vllm_scenarios:serve_again", prompts=asked)
    engine.call("vllm_scenarios:forget_host")
    third = engine.call("vllm_scenarios:serve", prompts=asked)
    assert cached_of(second) == cached_of(third) == [CACHED] * 3
    assert tokens_of(first) == tokens_of(second) == tokens_of(third) == plain_tokens("llama", asked, 16)
    assert engine.call("vllm_watching:expedited") == 6


def test_the_configuration_is_published(engine: EngineProcess) -> None:
    """The labels that the spec declares are those that the manager fills; vLLM drops what does not fit, and warns."""
    engine.call("vllm_watching:step")
    (labels,) = engine.call("vllm_watching:labels_of", name="vllm:kv_offload_config_info")
    assert labels["tierkv_tiers"] == "host,disk"
    assert labels["tierkv_blocks_per_chunk"] == "2"
    assert all(labels.values())
