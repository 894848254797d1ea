"""The same prompts twice, with an empty device in between: the second time their KV comes from the tiers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_process import EngineProcess, PlainTokens, StartEngine
from vllm_setups import BLOCK_TOKENS, EngineSetup, Seam, cached_of, prompts, tokens_of


@pytest.fixture(scope="module", params=[1, 4], ids=["1-block", "4-blocks"])
def blocks_per_chunk(request: pytest.FixtureRequest) -> int:
    """One block per chunk, and several."""
    blocks: int = request.param
    return blocks


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the disk tier lies."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def engine(seam: Seam, blocks_per_chunk: int, disk: Path, start_engine: StartEngine) -> Iterator[EngineProcess]:
    """Llama over host memory and disk."""
    tiers = [{"backend": "disk", "path": str(disk), "capacity": "64MiB"}]
    stack = {"host": {"capacity": "16MiB"}, "tiers": tiers}
    with start_engine(EngineSetup(seam, stack, blocks_per_chunk=blocks_per_chunk)) as engine:
        yield engine


def test_tokens_are_equal_and_the_prompt_is_not_computed_again(
    engine: EngineProcess, blocks_per_chunk: int, plain_tokens: PlainTokens
) -> None:
    """What tierkv is for: all whole chunks of a prompt come back, and nobody can tell by the answer."""
    asked = prompts("second pass", 3)
    first = engine.call("vllm_scenarios:serve", prompts=asked)
    second = engine.call("vllm_scenarios:serve_again", prompts=asked)
    chunk_tokens = blocks_per_chunk * BLOCK_TOKENS
    assert cached_of(first) == [0, 0, 0]
    assert cached_of(second) == [200 // chunk_tokens * chunk_tokens] * 3
    assert tokens_of(first) == tokens_of(second) == plain_tokens("llama", asked, 16)
