"""Metrics and published events of an engine that serves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm_process import EngineProcess, StartEngine
from vllm_setups import BLOCK_TOKENS, EngineSetup, Seam, flip_bytes, prompts

PROMPT_BLOCKS = 200 // BLOCK_TOKENS


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory, seam: Seam) -> Path:
    """Directory of the disk tier."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def engine(seam: Seam, disk: Path, start_engine: StartEngine) -> Iterator[EngineProcess]:
    """Llama over host memory and disk, two blocks per chunk, publishing events."""
    stack: dict[str, Any] = {
        "host": {"capacity": "16MiB"},
        "tiers": [{"backend": "disk", "path": str(disk), "capacity": "64MiB"}],
        "lookup": {"recompute": "off"},
    }
    if seam == "connector":
        stack["events"] = {"self_describing": True}
    arguments = {
        "kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://127.0.0.1:*"}
    }
    setup = EngineSetup(seam, stack, blocks_per_chunk=2, arguments=arguments)
    if seam == "spec":
        transfer = setup.kv_transfer_config()
        transfer["kv_connector_extra_config"]["self_describing_kv_events"] = True
        setup = replace(setup, arguments={**arguments, "kv_transfer_config": transfer})
    with start_engine(setup) as engine:
        yield engine


def test_metrics_follow_a_chunk_from_the_device_to_the_disk_and_back(engine: EngineProcess, disk: Path) -> None:
    """Each series moves with what it names, in vLLM's registry, and by as much as the stack counted."""
    asked = prompts("observed", 2)
    before = engine.call("vllm_watching:metrics")
    engine.call("vllm_scenarios:serve", prompts=asked)
    engine.call("vllm_scenarios:forget_host")
    engine.call("vllm_scenarios:serve", prompts=asked)
    engine.call("vllm_watching:step")
    after = engine.call("vllm_watching:metrics")
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    whole_chunks = len(asked) * (PROMPT_BLOCKS // 2 * 2) * BLOCK_TOKENS
    assert grown["tierkv_tokens_stored_total"] == whole_chunks
    assert grown["tierkv_tokens_loaded_total tier=disk"] == whole_chunks
    assert grown["tierkv_tier_bytes_written_total tier=disk"] > 0
    assert grown["tierkv_tier_bytes_read_total tier=disk"] > 0
    assert grown["tierkv_promotions_total tier=disk"] > 0
    assert grown["tierkv_tier_read_seconds_count tier=disk"] > 0
    assert grown["vllm:kv_offload_load_bytes_total"] > 0
    assert grown["vllm:kv_offload_store_bytes_total"] > 0
    counted = engine.call("vllm_scenarios:counters")
    for name, value in counted.items():
        for tier, count in value.items() if isinstance(value, dict) else [("", value)]:
            assert after.get(f"tierkv_{name}_total" + (f" tier={tier}" if tier else ""), 0) == count, name


def test_metrics_tell_of_refused_chunks(engine: EngineProcess, disk: Path) -> None:
    """A rotten disk shows on the dashboard: corrupt chunks, by tier."""
    asked = prompts("observed damage", 2)
    engine.call("vllm_scenarios:serve", prompts=asked)
    engine.call("vllm_scenarios:forget_host")
    before = engine.call("vllm_watching:metrics")
    assert flip_bytes(disk)
    engine.call("vllm_scenarios:serve", prompts=asked)
    engine.call("vllm_watching:step")
    after = engine.call("vllm_watching:metrics")
    for name in ("tierkv_chunks_corrupt_total tier=disk", "tierkv_tier_corrupt_total tier=disk"):
        assert after[name] > before.get(name, 0)


def test_a_router_hears_where_a_prompt_lies(engine: EngineProcess) -> None:
    """From the events alone, over vLLM's socket: which tokens, in which tier; and that a reset host tier is empty."""
    asked = prompts("heard", 2)
    engine.call("vllm_watching:listen")
    engine.call("vllm_scenarios:serve", prompts=asked)
    assert engine.call("vllm_scenarios:flush")
    engine.call("vllm_watching:step")
    places = engine.call("vllm_watching:heard", prompts=asked)
    chunks_blocks = PROMPT_BLOCKS // 2 * 2
    assert places["CPU"] == [chunks_blocks] * 2
    assert places["STORAGE disk LOCAL"] == [chunks_blocks] * 2
    assert places["GPU"] == [PROMPT_BLOCKS] * 2
    engine.call("vllm_scenarios:forget_host")
    engine.call("vllm_watching:step")
    assert "CPU" not in engine.call("vllm_watching:heard", prompts=asked)
