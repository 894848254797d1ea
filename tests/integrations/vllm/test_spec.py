"""Properties of the spec: no load may fail, every lookup ends, and resets may occur during transfers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_process import EngineProcess, PlainTokens, StartEngine
from vllm_setups import BLOCK_TOKENS, EngineSetup, cached_of, prompts, tokens_of

SLOTS = 8
LONG_TOKENS = 450


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the disk tier."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def engine(disk: Path, start_engine: StartEngine) -> Iterator[EngineProcess]:
    """Llama over a host tier of eight chunks, and a disk that holds everything; prompts are computed bit by bit."""
    tiers = [{"backend": "disk", "path": str(disk), "capacity": "64MiB"}]
    host = {"capacity": SLOTS * 36 * 1024, "reserved_share": 0.75}
    arguments = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "num_gpu_blocks_override": 40}
    stack = {"host": host, "tiers": tiers, "lookup": {"recompute": "off", "deadline_s": 60.0}}
    with start_engine(EngineSetup("spec", stack, arguments=arguments)) as engine:
        yield engine


def test_a_prefix_longer_than_the_host_tier_is_answered(engine: EngineProcess, plain_tokens: PlainTokens) -> None:
    """Fourteen chunks at rest, eight slots, of which six may be held: vLLM gets the six at once, not after a deadline,
    and computes the rest. Where a hit must wait for all of its chunks, the request would never run."""
    asked = prompts("longer than the host tier", 1, LONG_TOKENS)
    first = engine.call("vllm_scenarios:serve", prompts=asked)
    for _ in range(2):  # a chunk that found no room at first is stored by a later pass
        engine.call("vllm_scenarios:serve_again", prompts=asked)
    engine.call("vllm_scenarios:forget_host")
    second = engine.call("vllm_scenarios:serve", prompts=asked)
    counters = engine.call("vllm_scenarios:counters")
    assert cached_of(second) == [6 * BLOCK_TOKENS]
    assert tokens_of(first) == tokens_of(second) == plain_tokens("llama", asked, 16)
    assert counters["deadlines_expired"] == 0
    assert counters["deferrals"] > 0


def test_several_such_prefixes_take_turns(engine: EngineProcess, plain_tokens: PlainTokens) -> None:
    """Each could fill the host tier alone: all are served, none is read for ever, and what was promised is there."""
    asked = prompts("taking turns", 4, LONG_TOKENS)
    expected = plain_tokens("llama", asked, 16)
    for prompt in asked:  # one by one: all of it is stored
        engine.call("vllm_scenarios:serve", prompts=[prompt])
    engine.call("vllm_scenarios:forget_host")
    before = engine.call("vllm_scenarios:counters")
    second = engine.call("vllm_scenarios:serve", prompts=asked)
    after = engine.call("vllm_scenarios:counters")
    assert tokens_of(second) == expected
    assert sum(cached_of(second)) >= 2 * 6 * BLOCK_TOKENS
    read = after["promotions"].get("disk", 0) - before["promotions"].get("disk", 0)
    assert read <= 4 * 14


@pytest.mark.parametrize("every", [1, 3])
def test_resets_overtake_transfers_and_nothing_leaks(
    engine: EngineProcess, plain_tokens: PlainTokens, every: int
) -> None:
    """VLLM forgets transfers in flight at a reset, and never reports them. No slot may be lost, or reused too early.

    Tokens stay right, and no request waits for its deadline."""
    known = prompts("resets", 4)
    engine.call("vllm_scenarios:serve", prompts=known)
    engine.call("vllm_scenarios:forget")
    before = engine.call("vllm_scenarios:counters")
    caught = Counter[str]()
    # One that runs at a reset stores nothing more: stores are caught of prompts that are new, and not reset before.
    waiting, storing = {"every": every}, {"every": 1, "first": 0}
    for number, resets in enumerate((waiting, storing, waiting, storing)):
        asked = known if resets is waiting else prompts(f"resets {every} {number}", 4)
        told = engine.call("vllm_scenarios:serve_and_reset", prompts=asked, **resets)
        assert tokens_of(told["answers"]) == plain_tokens("llama", asked, 16)
        assert told["room"] == told["slots"]
        caught.update(told["caught"])
        engine.call("vllm_scenarios:forget")
    assert caught["stores"] > 0
    assert caught["loads"] > 0
    assert engine.call("vllm_scenarios:counters")["deadlines_expired"] == before["deadlines_expired"]
