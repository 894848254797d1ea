"""Lengths of prompts and chunks, as traces state them."""

from __future__ import annotations

import pytest
from made_traces import trace_of

from tierkv.errors import ConfigError
from tierkv.planning.prompts import infer_chunk_tokens, prompt_tokens
from tierkv.replay.trace import Trace


def trace_with(lengths: list[tuple[int, int]]) -> Trace:
    """Prompts of these tokens and numbers of chunks."""
    trace = trace_of([list(range(chunks)) for _, chunks in lengths])
    trace.input_tokens[:] = type(trace.input_tokens)("i", [tokens for tokens, _ in lengths])
    return trace


@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [
        ([(6758, 14), (2290, 5), (512, 1), (26888, 53)], 512),  # the last chunk is covered in part
        ([(100, 6), (31, 1), (16, 1), (350, 21)], 16),  # whole chunks only
        ([(1000, 3)], 336),
        ([(700, 7), (-1, 3), (0, 0)], 112),
    ],
)
def test_the_length_of_a_chunk_follows_from_the_prompts(lengths: list[tuple[int, int]], tokens: int) -> None:
    """Published traces have lengths and ids, and state nowhere how long a chunk is."""
    assert infer_chunk_tokens(trace_with(lengths)) == tokens


@pytest.mark.parametrize("lengths", [[(-1, 3)], [(100, 1), (100, 50)], []])
def test_a_length_that_cannot_be_known_is_asked_for(lengths: list[tuple[int, int]]) -> None:
    """A guess would be wrong by a factor in every figure of a plan."""
    with pytest.raises(ConfigError, match="add --chunk-tokens, such as 512"):
        infer_chunk_tokens(trace_with(lengths))


def test_prompts_without_a_length_have_that_of_their_chunks() -> None:
    """A trace may have lengths for some requests only."""
    assert prompt_tokens(trace_with([(100, 3), (-1, 3), (0, 0)]), 40).tolist() == [100, 120, 0]
