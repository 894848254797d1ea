"""Models with layers that keep a state, through the spec seam: vLLM says which states are stored, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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
"""Prompts are computed in steps of three blocks at most."""


def setup_of(
    model: str, folder: Path | None, host: str = "16MiB", blocks: int = 200, factor: int = 1, **arguments: Any
) -> EngineSetup:
    """An engine over host memory and perhaps a disk."""
    tiers = [] if folder is None else [{"backend": "disk", "path": str(folder), "capacity": "128MiB"}]
    stack = {"host": {"capacity": host}, "tiers": tiers, "lookup": {"recompute": "off", "deadline_s": 60.0}}
    arguments = {"num_gpu_blocks_override": blocks, "max_num_batched_tokens": STEP_TOKENS, **arguments}
    return EngineSetup("spec", stack, model=model, blocks_per_chunk=factor, arguments=arguments)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the disk tier of the Mamba model."""
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def mamba(disk: Path, start_engine: StartEngine) -> Iterator[EngineProcess]:
    """A model with Mamba 2 over host memory and disk; vLLM keeps every state that it passes at the end of a block."""
    with start_engine(setup_of("granite", disk, prefix_cache_retention_interval=BLOCK_TOKENS)) as engine:
        yield engine


def test_states_come_back_with_the_attention_beside_them(mamba: EngineProcess, plain_tokens: PlainTokens) -> None:
    """Both kinds of layers go on where the prefix ends, from the host tier and from disk."""
    asked = prompts("states", 3)
    first = mamba.call("vllm_scenarios:serve", prompts=asked)
    second = mamba.call("vllm_scenarios:serve_again", prompts=asked)
    mamba.call("vllm_scenarios:forget_host")
    third = mamba.call("vllm_scenarios:serve", prompts=asked)
    assert cached_of(second) == cached_of(third) == [CACHED] * 3
    assert tokens_of(first) == tokens_of(second) == tokens_of(third) == plain_tokens("granite", asked, 16)
    assert mamba.call("vllm_scenarios:counters")["deadlines_expired"] == 0


def test_prompts_that_part_take_the_last_state_that_they_share(mamba: EngineProcess, plain_tokens: PlainTokens) -> None:
    """A state can only be used whole: a hit ends where one was kept, and never behind where the prompts part."""
    (base,), tails = prompts("base", 1), prompts("parting", 4, 120)
    mamba.call("vllm_scenarios:serve", prompts=[base])
    kept = {95: 64, 96: 96, 150: 96, 193: 192}  # of steps up to 96 and 192: their last states, and those before
    asked = [base[:cut] + tail for cut, tail in zip(kept, tails, strict=True)]
    expected = plain_tokens("granite", asked, 16)
    for prompt, cached, tokens in zip(asked, kept.values(), expected, strict=True):
        (answer,) = mamba.call("vllm_scenarios:serve_again", prompts=[prompt])
        assert answer["tokens"] == tokens
        assert answer["cached"] == cached


def test_an_answer_leaves_a_state_behind_at_every_block(mamba: EngineProcess, plain_tokens: PlainTokens) -> None:
    """The next turn of a conversation begins with the answer to this one."""
    (asked,) = prompts("conversation", 1, 150)
    (first,) = mamba.call("vllm_scenarios:serve", prompts=[asked], tokens=60)
    more = asked + first["tokens"] + prompts("next turn", 1, 20)[0]
    (second,) = mamba.call("vllm_scenarios:serve_again", prompts=[more])
    assert second["cached"] == (150 + 59) // BLOCK_TOKENS * BLOCK_TOKENS
    assert [second["tokens"]] == plain_tokens("granite", [more], 16)


@pytest.mark.parametrize(
    ("start", "stop"), [(0, CONVOLUTION_BYTES), (CONVOLUTION_BYTES, STATE_BYTES)], ids=["convolution", "heads"]
)
def test_other_bytes_in_any_part_of_the_states_are_other_tokens(mamba: EngineProcess, start: int, stop: int) -> None:
    """The negative control: were a part of the states not loaded, or not used, equal tokens would prove nothing."""
    asked = [prompt[: CACHED + 2] for prompt in prompts(f"control {start}", 3)]
    first = mamba.call("vllm_scenarios:serve", prompts=asked)
    assert mamba.call("vllm_scenarios:overwrite_states", start=start, stop=stop) > 0
    second = mamba.call("vllm_scenarios:serve_again", prompts=asked)
    assert cached_of(second) == [CACHED] * 3
    for good, bad in zip(tokens_of(first), tokens_of(second), strict=True):
        assert good != bad


def test_states_that_changed_at_rest_are_refused(mamba: EngineProcess, disk: Path) -> None:
    """A damaged state is no hit, and what ends earlier or nothing is loaded; the tokens are right."""
    asked = prompts("damaged states", 2)
    first = mamba.call("vllm_scenarios:serve", prompts=asked)
    mamba.call("vllm_scenarios:forget_host")
    assert flip_bytes(disk)
    second = mamba.call("vllm_scenarios:serve", prompts=asked)
    assert mamba.call("vllm_scenarios:counters")["chunks_corrupt"].get("disk", 0) > 0
    assert cached_of(second) == [0, 0]
    assert tokens_of(second) == tokens_of(first)


@pytest.fixture(scope="module")
def small(start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """The Mamba model on a small device, two blocks per chunk, over a host tier smaller than a round of prompts.

    VLLM keeps only the last state of a prompt, which is its default."""
    folder = tmp_path_factory.mktemp("disk")
    with start_engine(setup_of("granite", folder, host="2MiB", blocks=60, factor=2)) as engine:
        yield engine


def test_many_requests_at_once_are_preempted_and_aborted_and_get_their_tokens(
    small: EngineProcess, plain_tokens: PlainTokens
) -> None:
    """Blocks of states are handed out again all the time, also as pages of attention, while they are still stored. Of a
    chunk of two blocks only the state at its end counts, and only that is stored."""
    assert crowd(small, plain_tokens, "granite")["deadlines_expired"] == 0


def test_resets_overtake_states_in_flight(small: EngineProcess, plain_tokens: PlainTokens) -> None:
    """VLLM forgets transfers in flight: no slot is lost, and no request waits for them."""
    asked = prompts("reset states", 4)
    expected = plain_tokens("granite", asked, 16)
    before = small.call("vllm_scenarios:counters")
    caught = Counter[str]()
    for _ in range(3):
        told = small.call("vllm_scenarios:serve_and_reset", prompts=asked, every=2)
        assert tokens_of(told["answers"]) == expected
        assert told["room"] == told["slots"]
        caught.update(told["caught"])
        small.call("vllm_scenarios:forget")
    assert caught["stores"] > 0
    assert small.call("vllm_scenarios:counters")["deadlines_expired"] == before["deadlines_expired"]


@pytest.mark.long
@pytest.mark.parametrize("model", ["granite", "lfm"])
def test_a_new_process_finds_states_on_disk(
    model: str, tmp_path: Path, start_engine: StartEngine, plain_tokens: PlainTokens
) -> None:
    """A restart: the first pass of the new process is a hit; one whose states have another number format finds none."""
    asked = prompts("restarted states", 3)
    whole = {"max_num_batched_tokens": 512}  # one prompt a step: the same sums as without tierkv
    passes = []
    for more in ({}, {}, {"mamba_cache_dtype": "bfloat16"}):
        with start_engine(setup_of(model, tmp_path / "tier", **whole, **more)) as engine:
            passes.append([engine.call("vllm_scenarios:serve", prompts=[prompt])[0] for prompt in asked])
    assert [cached_of(answers) for answers in passes] == [[0] * 3, [CACHED] * 3, [0] * 3]
    assert tokens_of(passes[0]) == tokens_of(passes[1]) == plain_tokens(model, asked, 16)


@pytest.mark.long
def test_two_workers_hold_a_part_of_each_state(
    tmp_path: Path, start_engine: StartEngine, plain_tokens: PlainTokens
) -> None:
    """Tensor parallel, each worker in a process of its own: the scheduler finds the first one's note in another."""
    asked = prompts("two workers", 3)
    workers = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    one_block = {"long_prefill_token_threshold": BLOCK_TOKENS}  # a step: workers of this kind keep no state inside it
    with start_engine(
        setup_of("granite", tmp_path, **workers, **one_block), {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    ) as engine:
        first = engine.call("vllm_scenarios:serve", prompts=asked)
        second = engine.call("vllm_scenarios:serve_again", prompts=asked)
        engine.call("vllm_scenarios:forget_host")
        third = engine.call("vllm_scenarios:serve", prompts=asked)
    assert cached_of(second) == cached_of(third) == [CACHED] * 3
    assert tokens_of(first) == tokens_of(second) == tokens_of(third) == plain_tokens("granite", asked, 16)
