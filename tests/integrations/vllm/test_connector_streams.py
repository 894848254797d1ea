"""A prefix longer than the host tier is loaded whole through the connector, also after failures on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm_process import EngineProcess, PlainTokens, StartEngine
from vllm_setups import BLOCK_TOKENS, EngineSetup, cached_of, prompts, tokens_of

SLOTS = 8
LONG_TOKENS = 450
LONG_CACHED = LONG_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
HERE = "vllm_connector_scenarios"
ARGUMENTS = {"num_gpu_blocks_override": 80, "max_num_seqs": 4}
LONG = {"whole": 1, "turns": 4, "aborted stream": 2, "reset stream": 2}
"""Prompts that each test asks with, and how many."""


def long(name: str) -> list[list[int]]:
    """Long prompts that are on the disk."""
    return prompts(name, LONG[name], LONG_TOKENS)


@pytest.fixture(scope="module")
def disk(start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A disk tier that holds all prompts of this module: an engine with room for them has put them there."""
    tier = {"backend": "disk", "path": str(tmp_path_factory.mktemp("disk")), "capacity": "64MiB"}
    stack = {"host": {"capacity": "16MiB"}, "tiers": [tier], "lookup": {"recompute": "off"}}
    with start_engine(EngineSetup("connector", stack, arguments=ARGUMENTS)) as engine:
        for name, count in LONG.items():
            engine.call("vllm_scenarios:serve", prompts=prompts(name, count, LONG_TOKENS))
    return tier


@pytest.fixture(scope="module")
def engine(disk: dict[str, Any], start_engine: StartEngine) -> Iterator[EngineProcess]:
    """Llama over a host tier of eight chunks, and that disk."""
    lookup = {"recompute": "off", "deadline_s": 60.0}
    stack = {"host": {"capacity": SLOTS * 36 * 1024}, "tiers": [disk], "lookup": lookup}
    with start_engine(EngineSetup("connector", stack, arguments=ARGUMENTS)) as engine:
        yield engine


def test_it_comes_whole(engine: EngineProcess, plain_tokens: PlainTokens) -> None:
    """Fourteen chunks at rest pass through eight slots: each is read once, and none is computed."""
    asked = long("whole")
    before = engine.call("vllm_scenarios:counters")
    answers = engine.call("vllm_scenarios:serve", prompts=asked)
    after = engine.call("vllm_scenarios:counters")
    assert cached_of(answers) == [LONG_CACHED]
    assert tokens_of(answers) == plain_tokens("llama", asked, 16)
    assert after["promotions"]["disk"] - before["promotions"].get("disk", 0) == LONG_CACHED // BLOCK_TOKENS


def test_several_take_turns(engine: EngineProcess, plain_tokens: PlainTokens) -> None:
    """Each could fill the host tier alone: all of them come, side by side."""
    asked = long("turns")
    answers = engine.call("vllm_scenarios:serve", prompts=asked)
    assert tokens_of(answers) == plain_tokens("llama", asked, 16)
    assert cached_of(answers) == [LONG_CACHED] * 4


def test_aborted_between_two_segments(engine: EngineProcess, plain_tokens: PlainTokens) -> None:
    """VLLM frees the blocks of an aborted request when its load is reported, so a stream must end for it."""
    asked, others = long("aborted stream"), prompts("others", 2)
    answers = engine.call(f"{HERE}:abort_while_loading", prompts=asked, then=others)
    assert tokens_of(answers) == plain_tokens("llama", others, 16)
    assert engine.call("vllm_scenarios:free_blocks") == engine.call("vllm_scenarios:usable_blocks")


def test_reset_between_two_segments(engine: EngineProcess, plain_tokens: PlainTokens) -> None:
    """Segments from before and after a reset must not form one prefix."""
    asked = long("reset stream")
    answers = engine.call(f"{HERE}:reset_while_loading", prompts=asked)
    assert tokens_of(answers) == plain_tokens("llama", asked, 16)
    assert engine.call("vllm_scenarios:free_blocks") == engine.call("vllm_scenarios:usable_blocks")
