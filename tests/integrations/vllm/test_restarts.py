"""KV outlives the process that computed it: on disk, and in a bucket that several servers share."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fsspec_support import S3Server
from vllm_process import PlainTokens, StartEngine
from vllm_setups import EngineSetup, Seam, cached_of, prompts, tokens_of

pytestmark = pytest.mark.long

CACHED = 192


def setup_over(seam: Seam, tier: dict[str, Any], model: str = "llama") -> EngineSetup:
    """An engine over host memory and that tier."""
    stack = {"host": {"capacity": "16MiB"}, "tiers": [tier], "lookup": {"recompute": "off"}}
    arguments = {"num_gpu_blocks_override": 80}
    return EngineSetup(seam, stack, model=model, blocks_per_chunk=2, arguments=arguments)


@pytest.fixture(params=["disk", "bucket"])
def tier(request: pytest.FixtureRequest, s3: S3Server, tmp_path: Path) -> dict[str, Any]:
    """Description of a tier that outlives the engine."""
    if request.param == "disk":
        return {"backend": "disk", "path": str(tmp_path / "tier"), "capacity": "64MiB"}
    return bucket_tier(s3)


def bucket_tier(s3: S3Server) -> dict[str, Any]:
    """A prefix in a bucket, used by this test alone."""
    # An answer is believed for no time at all: what another server stored is found at once.
    return {
        "backend": "fsspec",
        "url": f"s3://{s3.new_bucket()}/kv",
        "endpoint_url": s3.endpoint,
        "absence_ttl_s": 0,
        "probe_deadline_s": 30,
        "read_deadline_s": 60,
    }


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_a_new_process_finds_what_an_earlier_one_stored(
    seam: Seam, tier: dict[str, Any], model: str, start_engine: StartEngine, plain_tokens: PlainTokens
) -> None:
    """A deployment, a reboot: the first pass of the new process is a hit, and an orderly end has lost nothing."""
    asked = prompts("restart", 3)
    setup = setup_over(seam, tier, model)
    with start_engine(setup) as engine:
        first = engine.call("vllm_scenarios:serve", prompts=asked)
    with start_engine(setup) as engine:
        second = engine.call("vllm_scenarios:serve", prompts=asked)
    assert cached_of(first) == [0] * 3
    assert cached_of(second) == [CACHED] * 3
    assert tokens_of(first) == tokens_of(second) == plain_tokens(model, asked, 16)


def test_a_process_that_was_killed_leaves_what_the_tier_had_acknowledged(
    seam: Seam, tier: dict[str, Any], start_engine: StartEngine
) -> None:
    """A crash, the kernel's memory killer: tiers open again, with everything that had reached them."""
    asked = prompts("killed", 3)
    setup = setup_over(seam, tier)
    with start_engine(setup) as engine:
        first = engine.call("vllm_scenarios:serve", prompts=asked)
        assert engine.call("vllm_scenarios:flush")
        engine.kill()
    with start_engine(setup) as engine:
        second = engine.call("vllm_scenarios:serve", prompts=asked)
    assert cached_of(second) == [CACHED] * 3
    assert tokens_of(second) == tokens_of(first)


OTHERWISE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "overrides": ({}, {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}}),
    "random weights": ({"load_format": "dummy"}, {}),
    "layers in full precision": (
        {"kv_cache_dtype": "fp8_e4m3", "kv_cache_dtype_skip_layers": ["0"]},
        {"kv_cache_dtype": "fp8_e4m3", "kv_cache_dtype_skip_layers": ["1"]},
    ),
}
"""Arguments of a first engine and of another one, which computes other KV for blocks of equal size."""


@pytest.mark.parametrize("what", OTHERWISE)
def test_an_engine_that_computes_otherwise_finds_nothing(
    seam: Seam, what: str, start_engine: StartEngine, tmp_path: Path
) -> None:
    """Folder and size of blocks are equal, the KV is not: with chunks of the first engine, the second gave wrong
    tokens."""
    asked = prompts("overrides", 2)
    tier = {"backend": "disk", "path": str(tmp_path / "tier"), "capacity": "64MiB"}
    before_arguments, other_arguments = OTHERWISE[what]
    setup = setup_over(seam, tier)
    first = replace(setup, arguments={**setup.arguments, **before_arguments})
    other = replace(setup, arguments={**setup.arguments, **other_arguments})
    with start_engine(first) as engine:
        before = engine.call("vllm_scenarios:serve", prompts=asked)
    with start_engine(other) as engine:
        answers = engine.call("vllm_scenarios:serve", prompts=asked)
        again = engine.call("vllm_scenarios:serve_again", prompts=asked)
    assert cached_of(answers) == [0] * 2
    assert cached_of(again) == [CACHED] * 2
    assert tokens_of(answers) == tokens_of(again) != tokens_of(before)


def test_the_model_of_a_plugin_finds_nothing(seam: Seam, start_engine: StartEngine, tmp_path: Path) -> None:
    """A plugin of vLLM puts its own class in the place of vLLM's Llama: equal tokens have another KV."""
    asked = prompts("plugin", 2)
    metadata = tmp_path / "rolled_llama-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rolled-llama\nVersion: 1\n", encoding="utf-8")
    entry = "[vllm.general_plugins]\nrolled_llama = rolled_llama:register\n"
    (metadata / "entry_points.txt").write_text(entry, encoding="utf-8")
    plugin = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).with_name("plugins"))])}
    setup = setup_over(seam, {"backend": "disk", "path": str(tmp_path / "tier"), "capacity": "64MiB"})
    with start_engine(setup) as engine:
        before = engine.call("vllm_scenarios:serve", prompts=asked)
    with start_engine(setup, plugin) as engine:
        answers = engine.call("vllm_scenarios:serve", prompts=asked)
        again = engine.call("vllm_scenarios:serve_again", prompts=asked)
    assert cached_of(answers) == [0] * 2
    assert cached_of(again) == [CACHED] * 2
    assert tokens_of(answers) == tokens_of(again) != tokens_of(before)


def test_a_longer_context_finds_nothing_where_it_changes_the_keys(
    seam: Seam, start_engine: StartEngine, tmp_path: Path
) -> None:
    """With LongRoPE, vLLM turns keys by other factors where prompts may be long: equal tokens have another KV."""
    asked = prompts("longrope", 2)
    tier = {"backend": "disk", "path": str(tmp_path / "tier"), "capacity": "64MiB"}
    setup = setup_over(seam, tier, "phi")
    with start_engine(setup) as engine:
        before = engine.call("vllm_scenarios:serve", prompts=asked)
    with start_engine(replace(setup, arguments={**setup.arguments, "max_model_len": 256})) as engine:
        answers = engine.call("vllm_scenarios:serve", prompts=asked)
        again = engine.call("vllm_scenarios:serve_again", prompts=asked)
    assert cached_of(answers) == [0] * 2
    assert cached_of(again) == [CACHED] * 2
    assert tokens_of(answers) == tokens_of(again) != tokens_of(before)


def test_another_model_finds_nothing_there(seam: Seam, start_engine: StartEngine, s3: S3Server) -> None:
    """Two models share a bucket by mistake: each sees its own chunks only, whatever the prompts."""
    asked, tier = prompts("other model", 2), bucket_tier(s3)
    with start_engine(setup_over(seam, tier, "llama")) as engine:
        engine.call("vllm_scenarios:serve", prompts=asked)
    with start_engine(setup_over(seam, tier, "gemma")) as engine:
        assert cached_of(engine.call("vllm_scenarios:serve", prompts=asked)) == [0] * 2


def test_two_servers_load_what_the_other_has_stored(
    seam: Seam, start_engine: StartEngine, s3: S3Server, plain_tokens: PlainTokens
) -> None:
    """A fleet shares its prefixes: each prompt is computed by one server and found by the other, both ways at once."""
    setup = setup_over(seam, bucket_tier(s3))
    ours, theirs = prompts("ours", 2), prompts("theirs", 2)
    with start_engine(setup) as one, start_engine(setup) as other:
        first = {
            "ours": one.call("vllm_scenarios:serve", prompts=ours),
            "theirs": other.call("vllm_scenarios:serve", prompts=theirs),
        }
        assert one.call("vllm_scenarios:flush")
        assert other.call("vllm_scenarios:flush")
        second = {
            "ours": other.call("vllm_scenarios:serve", prompts=ours),
            "theirs": one.call("vllm_scenarios:serve", prompts=theirs),
        }
    for name, asked in {"ours": ours, "theirs": theirs}.items():
        assert cached_of(first[name]) == [0] * 2
        assert cached_of(second[name]) == [CACHED] * 2
        assert tokens_of(first[name]) == tokens_of(second[name]) == plain_tokens("llama", asked, 16)
