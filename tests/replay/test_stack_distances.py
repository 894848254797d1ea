"""Stack distances: what they say of every size is what a cache of that size would have done."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_traces import Prompts, naive_lru, trace_of

from tierkv.replay.stack_distances import NEVER, stack_distances

PROMPTS = st.lists(st.lists(st.integers(0, 12), max_size=12), max_size=25)


@settings(max_examples=300, deadline=None)
@given(prompts=PROMPTS, size=st.integers(1, 16))
def test_every_size_agrees_with_a_cache_of_that_size(prompts: Prompts, size: int) -> None:
    """A planner buys memory by these numbers: hits by prompt and writes are exact, for any order."""
    distances = stack_distances(trace := trace_of(prompts))
    hits, writes = naive_lru(prompts, size)
    assert distances.hits(size) == sum(hits)
    assert distances.writes(size) == writes
    by_prompt = [int((distances.needed[a:b] <= size).sum()) for a, b in pairwise(trace.starts)]
    assert by_prompt == hits


@settings(max_examples=100, deadline=None)
@given(prompts=PROMPTS)
def test_the_curve_has_all_sizes(prompts: Prompts) -> None:
    """The curve names each size at which a cache gains a hit, so no size between two of them is worth its price."""
    distances = stack_distances(trace_of(prompts))
    sizes, hits = distances.curve()
    assert list(hits) == [sum(naive_lru(prompts, int(size))[0]) for size in sizes]
    assert list(hits) == sorted(set(hits))


@pytest.mark.parametrize("prompts", [[], [[]], [[], [], []], [[1, 2, 3], [4, 5, 6]]])
def test_traffic_that_never_repeats_has_no_hit(prompts: Prompts) -> None:
    """Empty traces, empty prompts and one-shot traffic are usual first tries, and have an answer too."""
    distances = stack_distances(trace_of(prompts))
    assert distances.hits(NEVER - 1) == 0
    assert distances.writes(10**9) == len([chunk for prompt in prompts for chunk in prompt])


def test_a_long_prompt_of_one_chunk_takes_no_long_time() -> None:
    """A foreign trace may repeat one id a hundred thousand times in one prompt."""
    trace = trace_of([[0] * 100_000, [0] * 100_000])
    assert trace.chunks == array("I", bytes(4 * 200_000))
    assert stack_distances(trace).hits(1) == 100_000
