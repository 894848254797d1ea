"""Times of a plan: which hits pay, and what users wait for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.planning.assumptions import Assumptions, TierSpeed
from tierkv.planning.timing import busiest_s, first_token_s, useful_hits

FAST, SLOW = TierSpeed(1000.0, 0.0), TierSpeed(10.0, 0.0)
ASSUMED = Assumptions(prefill_tokens_per_s=100.0, chunk_tokens=10, chunk_bytes=10)
"""A chunk is computed in 0.1 s, loaded from a fast tier in 0.01 s and from a slow one in 1 s."""


def useful(at_s: list[float], hits: list[list[int]], *speeds: TierSpeed) -> tuple[list[list[int]], list[float]]:
    """Chunks that are loaded, and the ends of the loads."""
    found = useful_hits(np.array(at_s, np.float64), np.array(hits, np.int64), speeds, ASSUMED)
    return found.chunks.tolist(), found.ready_s.tolist()


def test_a_tier_slower_than_the_engine_is_not_loaded_from() -> None:
    """A hit that users wait longer for than for its computation is no hit."""
    chunks, ready_s = useful([0.0], [[3], [2]], FAST, SLOW)
    assert chunks == [[3], [0]]
    assert ready_s == [pytest.approx(0.03)]


def test_a_latency_pays_from_some_length_on() -> None:
    """A tier far away is worth its round trip for long hits only."""
    far = TierSpeed(1000.0, 0.5)
    chunks, _ = useful([0.0, 100.0], [[5, 6]], far)
    assert chunks == [[0, 6]]


def test_a_tier_that_is_busy_is_worth_less() -> None:
    """Requests share a tier: a second one at the same time waits, and computes where that is faster."""
    half = TierSpeed(200.0, 0.0)  # 0.05 s a chunk
    chunks, ready_s = useful([0.0, 0.0, 0.0], [[10, 10, 10]], half)
    assert chunks == [[10, 0, 0]]
    assert ready_s == [pytest.approx(0.5), 0.0, 0.0]


def test_requests_wait_for_an_engine_in_the_order_in_which_they_are_ready() -> None:
    """One engine, two prompts at once: the second waits for the first. Two engines: none waits."""
    at_s, compute_s = np.array([0.0, 0.0]), np.array([2.0, 2.0])
    ready_s = np.array([1.0, 0.5])
    assert first_token_s(at_s, ready_s, compute_s, 1).tolist() == [4.5, 2.5]
    assert first_token_s(at_s, ready_s, compute_s, 2).tolist() == [3.0, 2.5]
    assert first_token_s(at_s[:0], ready_s[:0], compute_s[:0], 3).tolist() == []


def test_the_busiest_window_is_found_wherever_it_is() -> None:
    """Engines are bought for the rush, not for the average with the night; both ends of a window count."""
    at_s, compute_s = np.array([0.0, 50.0, 58.0, 60.0, 500.0]), np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    assert busiest_s(at_s, compute_s, 10.0) == 9.0
    assert busiest_s(at_s, compute_s, 500.0) == 15.0
    assert busiest_s(at_s + 1.7e9, compute_s, 500.0) == 15.0
    assert busiest_s(at_s[:0], compute_s[:0], 10.0) == 0.0


@settings(max_examples=100, deadline=None)
@given(
    arrivals=st.lists(st.floats(0, 100), min_size=1, max_size=30),
    data=st.data(),
    engines=st.integers(1, 4),
)
def test_a_cache_makes_no_request_wait_longer_for_itself(
    arrivals: list[float], data: st.DataObject, engines: int
) -> None:
    """Hits are shortened so that a load takes no longer than the computation that it replaces; no time is negative."""
    at_s = np.sort(np.array(arrivals))
    hits = np.array([[data.draw(st.integers(0, 20)) for _ in arrivals] for _ in range(2)], np.int64)
    found = useful_hits(at_s, hits, (FAST, TierSpeed(150.0, 0.01)), ASSUMED)
    assert (found.chunks <= hits).all()
    saved_s = found.chunks.sum(axis=0) * ASSUMED.chunk_prefill_s
    assert (found.ready_s - at_s <= saved_s + 1e-9).all()
    compute_s = 5.0 - saved_s
    waits_s = first_token_s(at_s, found.ready_s, compute_s, engines)
    assert (waits_s >= compute_s - 1e-9).all()
    alone_s = first_token_s(at_s, at_s, np.full(len(at_s), 5.0), engines)
    assert waits_s.max() <= alone_s.max() + 5.0
