"""The same prompts twice, with an empty device in between: the second time their KV comes from the tiers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_process import EngineProcess, PlainTokens, StartEngine
from vllm_setups import BLOCK_TOKENS, EngineSetup, Seam, cached_of, flip_bytes, prompts, tokens_of


@pytest.fixture(scope="module", params=[1, 4], ids=["1-block", "4-blocks"])
def blocks_per_chunk(request: pytest.FixtureRequest) -> int:
    """One block per chunk, and several."""
    blocks: int = request.param
    return blocks


@pytest.fixture(scope="module")
def cached(blocks_per_chunk: int) -> int:
    """Number of tokens in whole chunks, of 200."""
    chunk_tokens = blocks_per_chunk * BLOCK_TOKENS
    return 200 // chunk_tokens * chunk_tokens


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory, seam: Seam, blocks_per_chunk: int) -> Path:
    """Directory of the disk tier."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def engine(seam: Seam, blocks_per_chunk: int, disk: Path, start_engine: StartEngine) -> Iterator[EngineProcess]:
    """Llama over host memory and disk."""
    tiers = [{"backend": "disk", "path": str(disk), "capacity": "64MiB"}]
    stack = {"host": {"capacity": "16MiB"}, "tiers": tiers, "lookup": {"recompute": "off"}}
    with start_engine(EngineSetup(seam, stack, blocks_per_chunk=blocks_per_chunk)) as engine:
        yield engine


def test_tokens_are_equal_and_the_prompt_is_not_computed_again(
    engine: EngineProcess, cached: int, plain_tokens: PlainTokens
) -> None:
    """Main purpose: all whole chunks of a prompt are loaded, and the answer stays the same."""
    asked = prompts("second pass", 3)
    first = engine.call("vllm_scenarios:serve", prompts=asked)
    second = engine.call("vllm_scenarios:serve_again", prompts=asked)
    assert cached_of(first) == [0, 0, 0]
    assert cached_of(second) == [cached] * 3
    assert tokens_of(first) == tokens_of(second) == plain_tokens("llama", asked, 16)


def test_what_the_host_tier_has_lost_comes_from_disk(engine: EngineProcess, cached: int) -> None:
    """The tiers below are part of the cache: their chunks pass through host memory to the device, and are right."""
    asked = prompts("from disk", 2)
    first = engine.call("vllm_scenarios:serve", prompts=asked)
    engine.call("vllm_scenarios:forget_host")
    before = engine.call("vllm_scenarios:counters")
    second = engine.call("vllm_scenarios:serve", prompts=asked)
    after = engine.call("vllm_scenarios:counters")
    assert cached_of(second) == [cached] * 2
    assert tokens_of(second) == tokens_of(first)
    assert after["promotions"].get("disk", 0) > before["promotions"].get("disk", 0)


def test_a_longer_prompt_is_computed_from_where_the_shorter_one_ends(
    engine: EngineProcess, cached: int, plain_tokens: PlainTokens
) -> None:
    """Conversations grow: a prefix that was served before is found in a prompt that goes on."""
    (short,), (more,) = prompts("short", 1), prompts("more", 1, 60)
    engine.call("vllm_scenarios:serve", prompts=[short])
    (answer,) = engine.call("vllm_scenarios:serve_again", prompts=[short + more])
    assert answer["cached"] == cached
    assert [answer["tokens"]] == plain_tokens("llama", [short + more], 16)


def test_an_answer_of_one_token_leaves_its_prompt_behind(engine: EngineProcess, cached: int) -> None:
    """Stores start one step late, so the engine must run further steps without requests."""
    asked = prompts("one token", 2)
    engine.call("vllm_scenarios:serve", prompts=asked, tokens=1)
    assert cached_of(engine.call("vllm_scenarios:serve_again", prompts=asked, tokens=1)) == [cached] * 2


def test_many_requests_that_share_a_prefix_load_it_at_once(
    engine: EngineProcess, cached: int, plain_tokens: PlainTokens
) -> None:
    """A system prompt is a common prefix: one load serves all requests that wait for it."""
    (shared,), tails = prompts("shared", 1), prompts("tails", 4, 20)
    engine.call("vllm_scenarios:serve", prompts=[shared])
    engine.call("vllm_scenarios:forget_host")
    asked = [shared + tail for tail in tails]
    answers = engine.call("vllm_scenarios:serve", prompts=asked)
    assert all(found >= cached for found in cached_of(answers))
    assert tokens_of(answers) == plain_tokens("llama", asked, 16)


def test_a_salted_prompt_finds_nothing_of_another_tenant(engine: EngineProcess, cached: int) -> None:
    """Timing would reveal another tenant's prompt: with its own salt, a tenant only hits its own chunks."""
    asked = prompts("salted", 1)
    for salt, found in (("one", 0), ("other", 0), (None, 0), ("one", cached)):
        (answer,) = engine.call("vllm_scenarios:serve_again", prompts=asked, salts=[salt])
        assert answer["cached"] == found


def test_bytes_that_changed_at_rest_are_refused_and_computed_again(
    engine: EngineProcess, cached: int, disk: Path
) -> None:
    """Disks rot: a chunk whose checksum is wrong is a miss and a count, never tokens, and is stored anew."""
    asked = prompts("damage at rest", 2)
    first = engine.call("vllm_scenarios:serve", prompts=asked)
    engine.call("vllm_scenarios:forget_host")
    before = engine.call("vllm_scenarios:counters")
    assert flip_bytes(disk)
    second = engine.call("vllm_scenarios:serve", prompts=asked)
    after = engine.call("vllm_scenarios:counters")
    assert after["chunks_corrupt"].get("disk", 0) > before["chunks_corrupt"].get("disk", 0)
    assert cached_of(second) == [0, 0]
    assert tokens_of(second) == tokens_of(first)
    for _ in range(4):  # a request that waited for a damaged chunk may leave it to a later one to store it anew
        engine.call("vllm_scenarios:forget_host")
        later = engine.call("vllm_scenarios:serve", prompts=asked)
        assert tokens_of(later) == tokens_of(first)
    assert cached_of(later) == [cached] * 2
