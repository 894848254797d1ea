"""Abilities of the connector alone: report failed loads, survive resets and aborts during loads, use hints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_process import EngineProcess, PlainTokens, StartEngine
from vllm_setups import BLOCK_TOKENS, EngineSetup, cached_of, prompts, tokens_of

CACHED = 192
HERE = "vllm_connector_scenarios"
MODELS = {"llama": 60, "gemma": 160}
"""One KV cache group, and three; with enough blocks of the device for every test."""


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    """Each of the models."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def engine(model: str, start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine over host memory and disk."""
    tiers = [{"backend": "disk", "path": str(tmp_path_factory.mktemp("disk")), "capacity": "128MiB"}]
    stack = {"host": {"capacity": "32MiB"}, "tiers": tiers, "lookup": {"recompute": "off"}}
    arguments: dict[str, Any] = {"num_gpu_blocks_override": MODELS[model], "max_num_seqs": 16}
    setup = EngineSetup("connector", stack, model=model, arguments=arguments)
    with start_engine(setup) as engine:
        yield engine


def test_both_sides_see_one_engine(engine: EngineProcess) -> None:
    """Scheduler and worker have configurations of their own; a chunk must mean the same to both."""
    shapes = engine.call(f"{HERE}:shapes")
    assert shapes["scheduler"] == shapes["worker"]
    assert "kv=unknown" not in shapes["scheduler"]
    assert (shapes["policy"], shapes["recomputes"]) == ("recompute", True)


def test_vllm_hears_which_tier_served(engine: EngineProcess) -> None:
    """Its own metric of cached tokens tells host memory from disk."""
    asked = prompts("sources", 2)
    engine.call("vllm_scenarios:serve", prompts=asked)
    engine.call("vllm_scenarios:serve_again", prompts=asked)
    before = engine.call(f"{HERE}:sources")
    engine.call("vllm_scenarios:forget_host")
    engine.call("vllm_scenarios:serve", prompts=asked)
    after = engine.call(f"{HERE}:sources")
    assert before.get("host", 0) >= 2 * CACHED
    assert after.get("disk", 0) - before.get("disk", 0) == 2 * CACHED
    assert "external_unspecified" not in after


def test_one_damaged_chunk_costs_what_it_has_to(engine: EngineProcess) -> None:
    """A load with one failed chunk is reported to vLLM, by block or as a whole, and the answer is right."""
    asked = prompts("one chunk", 1)
    engine.call("vllm_scenarios:forget_host")
    before = engine.call("vllm_scenarios:counters")["loads_failed"]
    first = engine.call(f"{HERE}:serve_and_damage", prompts=asked)
    second = engine.call("vllm_scenarios:serve_again", prompts=asked)
    assert engine.call("vllm_scenarios:counters")["loads_failed"] - before == 1
    assert tokens_of(second) == tokens_of(first)
    third = engine.call("vllm_scenarios:serve_again", prompts=asked)
    assert cached_of(third) == [CACHED]
    assert tokens_of(third) == tokens_of(first)


def test_aborted_while_loading(engine: EngineProcess, model: str, plain_tokens: PlainTokens) -> None:
    """The client disconnects while its blocks are being filled: no other request may get these blocks meanwhile."""
    asked, others = prompts("aborted", 3), prompts("others", 3)
    engine.call("vllm_scenarios:serve", prompts=asked)
    answers = engine.call(f"{HERE}:abort_while_loading", prompts=asked, then=others)
    assert tokens_of(answers) == plain_tokens(model, others, 16)
    assert engine.call("vllm_scenarios:free_blocks") == engine.call("vllm_scenarios:usable_blocks")


def test_reset_while_loading(engine: EngineProcess, model: str, plain_tokens: PlainTokens) -> None:
    """A load in flight when the cache is emptied is stale: it fails, and is computed."""
    asked = prompts("reset", 3)
    engine.call("vllm_scenarios:serve", prompts=asked)
    answers = engine.call(f"{HERE}:reset_while_loading", prompts=asked)
    assert tokens_of(answers) == plain_tokens(model, asked, 16)
    assert engine.call("vllm_scenarios:free_blocks") == engine.call("vllm_scenarios:usable_blocks")


def test_hints_of_a_request(engine: EngineProcess) -> None:
    """``kv_transfer_params`` of the sampling parameters reach tierkv's scheduler."""
    unstored, bounded = prompts("hints", 2)
    engine.call(f"{HERE}:hinted", prompt=unstored, hints={"store": False})
    assert engine.call(f"{HERE}:hinted", prompt=unstored, hints={})["cached"] == 0
    engine.call(f"{HERE}:hinted", prompt=bounded, hints={})
    few = engine.call(f"{HERE}:hinted", prompt=bounded, hints={"max_load_tokens": 2 * BLOCK_TOKENS})
    assert few["cached"] == 2 * BLOCK_TOKENS


def test_an_engine_that_ends_after_one_step_has_stored(tmp_path: Path, start_engine: StartEngine) -> None:
    """In one process vLLM takes no step beyond the last token: what that step computed must not be lost with it."""
    asked = prompts("one step", 2)
    stack = {
        "host": {"capacity": "16MiB"},
        "tiers": [{"backend": "disk", "path": str(tmp_path / "disk"), "capacity": "64MiB"}],
        "lookup": {"recompute": "off"},
    }
    with start_engine(EngineSetup("connector", stack)) as engine:
        first = engine.call(f"{HERE}:serve_and_leave", prompts=asked)
    with start_engine(EngineSetup("connector", stack)) as engine:
        second = engine.call("vllm_scenarios:serve", prompts=asked, tokens=1)
    assert cached_of(second) == [CACHED] * 2
    assert tokens_of(second) == tokens_of(first)
