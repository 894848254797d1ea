"""A model with several KV cache groups: windows and full attention side by side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_process import EngineProcess, PlainTokens, StartEngine
from vllm_setups import BLOCK_TOKENS, EngineSetup, Seam, cached_of, flip_bytes, prompts, tokens_of

CACHED = 192


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory, seam: Seam) -> Path:
    """Directory of the disk tier."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def engine(seam: Seam, disk: Path, start_engine: StartEngine) -> Iterator[EngineProcess]:
    """Gemma over host memory and disk."""
    tiers = [{"backend": "disk", "path": str(disk), "capacity": "128MiB"}]
    stack = {"host": {"capacity": "32MiB"}, "tiers": tiers, "lookup": {"recompute": "off"}}
    arguments = {"num_gpu_blocks_override": 80}
    setup = EngineSetup(seam, stack, model="gemma", blocks_per_chunk=2, arguments=arguments)
    with start_engine(setup) as engine:
        yield engine


def test_vllm_keeps_its_groups_apart(engine: EngineProcess) -> None:
    """A connector that does not say it can, makes vLLM treat all layers as full attention: three groups become one."""
    assert engine.call("vllm_scenarios:num_groups") == 3


def test_all_groups_come_back(engine: EngineProcess, plain_tokens: PlainTokens) -> None:
    """Each group's chunks, also those that its window has left behind, are where the model reads them."""
    asked = prompts("groups", 3)
    first = engine.call("vllm_scenarios:serve", prompts=asked)
    second = engine.call("vllm_scenarios:serve_again", prompts=asked)
    engine.call("vllm_scenarios:forget_host")
    third = engine.call("vllm_scenarios:serve", prompts=asked)
    assert cached_of(second) == cached_of(third) == [CACHED] * 3
    assert tokens_of(first) == tokens_of(second) == tokens_of(third) == plain_tokens("gemma", asked, 16)


def test_bytes_that_changed_at_rest_are_refused_in_every_group(engine: EngineProcess, disk: Path) -> None:
    """With groups a load fails as a whole; the request is computed from where it can be, and its tokens are right.

    What it computes is stored at once, also the chunks that a tier was still being read for: the next one loads all.
    """
    asked = prompts("damaged groups", 2)
    first = engine.call("vllm_scenarios:serve", prompts=asked)
    engine.call("vllm_scenarios:forget_host")
    assert flip_bytes(disk)
    second = engine.call("vllm_scenarios:serve", prompts=asked)
    assert engine.call("vllm_scenarios:counters")["chunks_corrupt"].get("disk", 0) > 0
    third = engine.call("vllm_scenarios:serve_again", prompts=asked)
    assert cached_of(third) == [CACHED] * 2
    assert tokens_of(third) == tokens_of(second) == tokens_of(first)


def test_a_chunk_that_a_window_left_in_part_is_not_loaded(
    seam: Seam, start_engine: StartEngine, plain_tokens: PlainTokens
) -> None:
    """Steps of three blocks end inside chunks of two: a window has left the first block of a chunk then, and vLLM
    offers the chunk all the same. A prompt that ends with this chunk needs both."""
    ((base,), tails) = prompts("left in part", 1), prompts("tails", 3, 9)
    stack = {"host": {"capacity": "32MiB"}, "lookup": {"recompute": "off"}}
    arguments = {"num_gpu_blocks_override": 80, "max_num_batched_tokens": 3 * BLOCK_TOKENS}
    asked = [base[:end] + tail for end, tail in zip((64, 128, 192), tails, strict=True)]
    setup = EngineSetup(seam, stack, model="gemma", blocks_per_chunk=2, arguments=arguments)
    with start_engine(setup) as engine:
        engine.call("vllm_scenarios:serve", prompts=[base])
        answers = [engine.call("vllm_scenarios:serve_again", prompts=[prompt])[0] for prompt in asked]
    assert tokens_of(answers) == plain_tokens("gemma", asked, 16)
    assert sum(cached_of(answers)) > 0


@pytest.mark.parametrize(("interval", "found_by_spec"), [(0, 0), (BLOCK_TOKENS, 96)])
def test_the_spec_finds_the_beginning_of_a_prompt_where_vllm_keeps_its_windows(
    seam: Seam, start_engine: StartEngine, interval: int, found_by_spec: int
) -> None:
    """The windows that vLLM keeps in its own cache are offered to the spec: by default those at the end of a prompt.

    The connector stores all of them.
    """
    (long,) = prompts("beginning", 1)
    stack = {"host": {"capacity": "32MiB"}, "lookup": {"recompute": "off"}}
    arguments = {"num_gpu_blocks_override": 80, "prefix_cache_retention_interval": interval}
    with start_engine(EngineSetup(seam, stack, model="gemma", arguments=arguments)) as engine:
        engine.call("vllm_scenarios:serve", prompts=[long])
        (answer,) = engine.call("vllm_scenarios:serve_again", prompts=[long[:100]])
    assert answer["cached"] == (found_by_spec if seam == "spec" else 96)
