"""Models with layers that keep a state beside such with attention: Mamba 2, and short convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm_crowd import crowd
from vllm_process import EngineProcess, PlainTokens, StartEngine
from vllm_setups import BLOCK_TOKENS, EngineSetup, cached_of, flip_bytes, prompts, tokens_of

CACHED = 192
CONVOLUTION_BYTES = 3 * 160 * 4
STATE_BYTES = CONVOLUTION_BYTES + 4 * 32 * 16 * 4
"""Of a layer of the Mamba model: what it keeps of its convolution, and with its heads."""

STEP_TOKENS = 3 * BLOCK_TOKENS
"""Prompts are computed in steps of three blocks at most: a state is kept at the end of each, and none in between."""


def setup_of(
    model: str, tiers: list[dict[str, Any]], *, host: str = "16MiB", blocks: int = 200, **more: Any
) -> EngineSetup:
    """An engine over host memory and those tiers."""
    stack = {"host": {"capacity": host}, "tiers": tiers, "lookup": {"recompute": "off"}}
    arguments = {"num_gpu_blocks_override": blocks, "max_num_batched_tokens": STEP_TOKENS}
    return EngineSetup("connector", stack, model=model, arguments=arguments, **more)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the disk tier."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def engine(disk: Path, start_engine: StartEngine) -> Iterator[EngineProcess]:
    """A model with Mamba 2 over host memory and disk."""
    tiers = [{"backend": "disk", "path": str(disk), "capacity": "128MiB"}]
    with start_engine(setup_of("granite", tiers)) as engine:
        yield engine


def test_states_come_back_with_the_attention_beside_them(engine: EngineProcess, plain_tokens: PlainTokens) -> None:
    """Both kinds of layers go on where the prefix ends, from the host tier and from disk."""
    asked = prompts("states", 3)
    first = engine.call("vllm_scenarios:serve", prompts=asked)
    second = engine.call("vllm_scenarios:serve_again", prompts=asked)
    engine.call("vllm_scenarios:forget_host")
    third = engine.call("vllm_scenarios:serve", prompts=asked)
    assert cached_of(second) == cached_of(third) == [CACHED] * 3
    assert tokens_of(first) == tokens_of(second) == tokens_of(third) == plain_tokens("granite", asked, 16)


def test_prompts_that_part_at_several_places_take_the_last_state_that_they_share(
    engine: EngineProcess, plain_tokens: PlainTokens
) -> None:
    """A state can only be used whole: a hit ends where one was kept, and never behind where the prompts part."""
    (base,), tails = prompts("base", 1), prompts("parting", 6, 120)
    engine.call("vllm_scenarios:serve", prompts=[base])
    cuts = [31, 95, 96, 97, 191, 193]
    asked = [base[:cut] + tail for cut, tail in zip(cuts, tails, strict=True)]
    expected = plain_tokens("granite", asked, 16)
    for prompt, cut, tokens in zip(asked, cuts, expected, strict=True):
        (answer,) = engine.call("vllm_scenarios:serve_again", prompts=[prompt])
        assert answer["tokens"] == tokens
        assert answer["cached"] == cut // STEP_TOKENS * STEP_TOKENS


def test_a_prompt_that_ends_with_a_block_goes_on_from_the_block_before(
    engine: EngineProcess, plain_tokens: PlainTokens
) -> None:
    """Its last token is computed in any case, from a state that does not hold it yet."""
    asked = prompts("whole blocks", 2, CACHED)
    engine.call("vllm_scenarios:serve", prompts=asked)
    answers = engine.call("vllm_scenarios:serve_again", prompts=asked)
    assert cached_of(answers) == [CACHED - BLOCK_TOKENS] * 2
    assert tokens_of(answers) == plain_tokens("granite", asked, 16)


def test_an_answer_leaves_a_state_behind_at_every_block(engine: EngineProcess, plain_tokens: PlainTokens) -> None:
    """The next turn of a conversation begins with the answer to this one."""
    (asked,) = prompts("conversation", 1, 150)
    (first,) = engine.call("vllm_scenarios:serve", prompts=[asked], tokens=60)
    more = asked + first["tokens"] + prompts("next turn", 1, 20)[0]
    (second,) = engine.call("vllm_scenarios:serve_again", prompts=[more])
    assert second["cached"] == (150 + 59) // BLOCK_TOKENS * BLOCK_TOKENS
    assert [second["tokens"]] == plain_tokens("granite", [more], 16)


def test_states_that_changed_at_rest_are_refused(engine: EngineProcess, disk: Path) -> None:
    """A load of which a chunk is damaged fails as a whole; the tokens are right."""
    asked = prompts("damaged states", 2)
    first = engine.call("vllm_scenarios:serve", prompts=asked)
    engine.call("vllm_scenarios:forget_host")
    assert flip_bytes(disk)
    second = engine.call("vllm_scenarios:serve", prompts=asked)
    assert engine.call("vllm_scenarios:counters")["chunks_corrupt"].get("disk", 0) > 0
    assert tokens_of(second) == tokens_of(first)


@pytest.fixture(scope="module")
def unchecked(start_engine: StartEngine) -> Iterator[EngineProcess]:
    """A model with Mamba 2, with two blocks per chunk, over host memory that is not looked at again."""
    setup = setup_of("granite", [], blocks_per_chunk=2)
    stack = {**setup.stack, "host": {"capacity": "16MiB", "verify": False}}
    with start_engine(replace(setup, stack=stack)) as engine:
        yield engine


def test_states_of_chunks_of_two_blocks_come_back(unchecked: EngineProcess) -> None:
    """Of such a chunk only the state at its end counts, whether or not another one was kept in its midst."""
    asked = prompts("two blocks", 3)
    first = unchecked.call("vllm_scenarios:serve", prompts=asked)
    second = unchecked.call("vllm_scenarios:serve_again", prompts=asked)
    assert cached_of(first) == [0] * 3
    assert cached_of(second) == [CACHED] * 3
    assert tokens_of(first) == tokens_of(second)


@pytest.mark.parametrize(("start", "stop"), [(0, CONVOLUTION_BYTES), (CONVOLUTION_BYTES, STATE_BYTES)])
def test_other_bytes_in_any_part_of_the_states_are_other_tokens(
    unchecked: EngineProcess, start: int, stop: int
) -> None:
    """The negative control: were a part of the states not loaded, or not used, equal tokens would prove nothing."""
    asked = [prompt[: CACHED + 2] for prompt in prompts(f"control {start}", 4)]
    first = unchecked.call("vllm_scenarios:serve", prompts=asked)
    assert unchecked.call("vllm_scenarios:overwrite_states", start=start, stop=stop) > 0
    second = unchecked.call("vllm_scenarios:serve_again", prompts=asked)
    assert cached_of(second) == [CACHED] * 4
    for good, bad in zip(tokens_of(first), tokens_of(second), strict=True):
        assert good != bad


@pytest.fixture(scope="module")
def small(start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """The same model on a small device, over a host tier of 16 chunks, and a disk."""
    tiers = [{"backend": "disk", "path": str(tmp_path_factory.mktemp("disk")), "capacity": "128MiB"}]
    with start_engine(setup_of("granite", tiers, host="576KiB", blocks=60)) as engine:
        yield engine


def test_many_requests_at_once_are_preempted_and_aborted_and_get_their_tokens(
    small: EngineProcess, plain_tokens: PlainTokens
) -> None:
    """Blocks of states are handed out again all the time, also as pages of attention, while they are still stored."""
    crowd(small, plain_tokens, "granite")


def test_a_prefix_longer_than_the_host_tier_streams_with_its_states(
    small: EngineProcess, plain_tokens: PlainTokens
) -> None:
    """Fifteen chunks of attention and one of each state: the states are wanted last, and only they are whole."""
    asked = prompts("stream", 1, 490)
    for _ in range(3):  # a chunk that found no room at first is stored by a later pass
        small.call("vllm_scenarios:serve_again", prompts=asked)
    before = small.call("vllm_scenarios:counters")["loads_streamed"]
    small.call("vllm_scenarios:forget_host")
    answers = small.call("vllm_scenarios:serve", prompts=asked)
    assert cached_of(answers) == [480]
    assert tokens_of(answers) == plain_tokens("granite", asked, 16)
    assert small.call("vllm_scenarios:counters")["loads_streamed"] > before


@pytest.mark.long
@pytest.mark.parametrize("model", ["granite", "lfm"])
def test_a_new_process_finds_states_on_disk(
    model: str, tmp_path: Path, start_engine: StartEngine, plain_tokens: PlainTokens
) -> None:
    """A restart: the first pass of the new process is a hit."""
    asked = prompts("restarted states", 3)
    setup = setup_of(model, [{"backend": "disk", "path": str(tmp_path / "tier"), "capacity": "64MiB"}])
    setup = replace(setup, arguments={"num_gpu_blocks_override": 200})  # whole prompts: the same sums as without tierkv
    passes = []
    for _ in range(2):
        with start_engine(setup) as engine:
            passes.append([engine.call("vllm_scenarios:serve", prompts=[prompt])[0] for prompt in asked])
    assert cached_of(passes[0]) == [0] * 3
    assert cached_of(passes[1]) == [CACHED] * 3
    assert tokens_of(passes[0]) == tokens_of(passes[1]) == plain_tokens(model, asked, 16)
