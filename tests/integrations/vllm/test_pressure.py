"""More work than fits: a small pool of blocks, a host tier smaller than one round of prompts, and a disk below."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_process import EngineProcess, PlainTokens, StartEngine
from vllm_setups import EngineSetup, Seam, cached_of, prompts, tokens_of

REQUESTS = 14
TOKENS = 80


@pytest.fixture(scope="module")
def engine(seam: Seam, start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """Llama over a host tier of about 22 chunks and a disk that holds them all."""
    tiers = [{"backend": "disk", "path": str(tmp_path_factory.mktemp("disk")), "capacity": "64MiB"}]
    stack = {"host": {"capacity": "1536KiB"}, "tiers": tiers, "lookup": {"recompute": "off"}}
    with start_engine(EngineSetup(seam, stack, blocks_per_chunk=2)) as engine:
        yield engine


def test_many_requests_at_once_evict_and_are_preempted_and_get_their_tokens(
    engine: EngineProcess, plain_tokens: PlainTokens
) -> None:
    """The everyday of a busy server: blocks and slots are taken away and given to others all the time."""
    asked = prompts("pressure", REQUESTS)
    expected = plain_tokens("llama", asked, TOKENS)
    for _ in range(3):
        answers = engine.call("vllm_scenarios:serve_again", prompts=asked, tokens=TOKENS)
        assert tokens_of(answers) == expected
    assert sum(cached_of(answers)) > 0
    counters = engine.call("vllm_scenarios:counters")
    assert counters["evictions"].get("host", 0) > 0
    assert counters["promotions"].get("disk", 0) > 0
    assert engine.call("vllm_scenarios:preemptions") > 0


def test_aborts_in_the_midst_of_it_hurt_nobody_else(engine: EngineProcess, plain_tokens: PlainTokens) -> None:
    """Half of the clients hang up while stores and loads of theirs are in flight; the others must not notice."""
    asked = prompts("pressure", REQUESTS)
    expected = plain_tokens("llama", asked, TOKENS)
    aborted = list(range(0, REQUESTS, 2))
    for step in (1, 2, 5, 20):
        engine.call("vllm_scenarios:forget")
        answers = engine.call(
            "vllm_scenarios:serve_and_abort", prompts=asked, aborted=aborted, at_step=step, tokens=TOKENS
        )
        kept = [number for number in range(REQUESTS) if number not in aborted]
        assert [tokens_of(answers)[number] for number in kept] == [expected[number] for number in kept]
    assert engine.call("vllm_scenarios:free_blocks") == engine.call("vllm_scenarios:usable_blocks")


def test_prompts_whose_loads_failed_are_computed_though_they_reserve_all_blocks(
    start_engine: StartEngine, plain_tokens: PlainTokens, tmp_path: Path
) -> None:
    """VLLM reserves the blocks of each, and begins no load with less than these free. The disk still has the chunks, so
    loads were offered, none was taken, and the engine answered no request anymore."""
    asked = prompts("reserved", 4)
    tiers = [{"backend": "disk", "path": str(tmp_path / "disk"), "capacity": "64MiB"}]
    stack = {"host": {"capacity": "16MiB"}, "tiers": tiers, "lookup": {"recompute": "off"}}
    with start_engine(EngineSetup("connector", stack)) as engine:
        engine.call("vllm_scenarios:serve", prompts=asked)
        assert engine.call("vllm_scenarios:flush")
        engine.call("vllm_scenarios:overwrite_host")
        again = engine.call("vllm_scenarios:serve_again", prompts=asked)
        assert engine.call("vllm_scenarios:counters")["loads_failed"] >= len(asked) - 1
    assert tokens_of(again) == plain_tokens("llama", asked, 16)


def test_the_spec_offers_no_load_again_after_one_failed(start_engine: StartEngine, plain_tokens: PlainTokens) -> None:
    """VLLM reserves the blocks of such prompts there, too. They are served without tierkv from then on, so vLLM has no
    load to refuse for them, and computes them before it asks for others."""
    asked = prompts("reserved", 8)
    stack = {"host": {"capacity": "16MiB"}, "lookup": {"recompute": "off"}}
    with start_engine(EngineSetup("spec", stack), {"TIERKV_VALIDATE": "0"}) as engine:
        told = engine.call("vllm_faults:serve_with_broken_loads", prompts=asked)
        counters = engine.call("vllm_scenarios:counters")
    assert len(told["failed"]) == len(asked)
    assert counters["requests_dropped"] == len(asked)
    assert tokens_of(told["known"]) == tokens_of(told["first"]) == plain_tokens("llama", asked, 16)


@pytest.fixture(scope="module")
def tight_engine(
    seam: Seam, start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """Llama over a host tier of 4 chunks and a disk."""
    tiers = [{"backend": "disk", "path": str(tmp_path_factory.mktemp("disk")), "capacity": "64MiB"}]
    stack = {"host": {"capacity": "288KiB"}, "tiers": tiers, "lookup": {"recompute": "off"}}
    with start_engine(EngineSetup(seam, stack, blocks_per_chunk=2)) as engine:
        yield engine


def test_a_prompt_longer_than_the_host_tier_comes_to_its_end(
    tight_engine: EngineProcess, plain_tokens: PlainTokens
) -> None:
    """No host tier is too small: of a prompt twice as long, what can be loaded is, and the rest computed."""
    asked = prompts("long", 3, 480)
    expected = plain_tokens("llama", asked, 16)
    for number in range(4):
        answers = [tight_engine.call("vllm_scenarios:serve_again", prompts=[prompt])[0] for prompt in asked]
        assert tokens_of(answers) == expected
        assert number == 0 or min(cached_of(answers)) > 0
    tight_engine.call("vllm_scenarios:forget")
    assert tokens_of(tight_engine.call("vllm_scenarios:serve", prompts=asked)) == expected
