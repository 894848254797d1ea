"""Arithmetic of the replay, its bounds, and equality with the calls that the manager makes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.abc import EvictionPolicy
from tierkv.plugins.loading import load_plugins
from tierkv.policies.lru import LruPolicy
from tierkv.replay.bounds import FifoPolicy, clairvoyant
from tierkv.replay.replaying import Replayed, replay
from tierkv.replay.trace import KeysOfIds, TraceRequest
from tierkv.types.keys import Key
from tierkv.types.observation import RequestObservation, RequestPhase


def trace_of(*paths: Sequence[int]) -> list[TraceRequest]:
    """Requests one second apart."""
    ids = KeysOfIds()
    return [TraceRequest(float(i), tuple(map(ids.key, path))) for i, path in enumerate(paths)]


class Book(LruPolicy):
    """LRU that records its calls, refuses given keys, and returns no victims on demand."""

    def __init__(self, chunks_max: int, refused: Sequence[Key] = (), *, never_now: bool = False) -> None:
        super().__init__(chunks_max)
        self.told: list[tuple[str, object]] = []
        self.refused = refused
        self.never_now = never_now

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:
        self.told.append(("add", list(keys)))
        super().add(handles, keys)

    def touch(self, handles: Sequence[int]) -> None:
        self.told.append(("touch", len(handles)))
        super().touch(handles)

    def evict(self, count: int, pins: Sequence[int]) -> list[int]:
        return [] if self.never_now else super().evict(count, pins)

    def observe_request(self, observation: RequestObservation) -> None:
        self.told.append(
            (observation.phase.value, (observation.now_s, len(observation.paths[0]), observation.new_chunks))
        )

    def refuse(self, keys: Sequence[Key], free: int) -> list[int]:
        return [i for i, key in enumerate(keys) if key in self.refused]


def test_hits_are_of_the_prefix_and_writes_of_what_was_missing() -> None:
    """A chunk behind a gap is there and cannot be used: counted as a hit it would flatter every policy."""
    trace = trace_of([0, 1, 2], [0, 1, 2], [0, 7, 2], [8])
    assert replay(trace, LruPolicy(4), 4) == Replayed(asked=10, hits=4, writes=5)
    assert Replayed(10, 4, 5).hit_percent == 40
    assert Replayed(0, 0, 0).hit_percent == 0


def test_s54_the_tail_is_used_first() -> None:
    """S54: what is left of a prefix in a full tier is its front, or nothing of it can be used."""
    trace = trace_of([0, 1, 2], [3], [0, 1, 2])
    assert replay(trace, LruPolicy(3), 3).hits == 2


def test_a_policy_hears_what_a_tier_would_tell_it() -> None:
    """Observations at both ends, newcomers with their keys, and a use by the request that brought them."""
    trace = trace_of([0, 1], [0, 2])
    zero, one, two = (*trace[0].keys, trace[1].keys[1])
    book = Book(10)
    replay(trace, book, 10)
    assert [entry for entry in book.told if entry != ("touch", 0)] == [
        (RequestPhase.ARRIVED.value, (0.0, 2, (2,))),
        ("add", [one]),
        ("touch", 1),
        ("add", [zero]),
        ("touch", 1),
        (RequestPhase.FINISHED.value, (0.0, 2, (2,))),
        (RequestPhase.ARRIVED.value, (1.0, 2, (1,))),
        ("add", [two]),
        ("touch", 2),
        (RequestPhase.FINISHED.value, (1.0, 2, (1,))),
    ]


def test_what_a_policy_refuses_is_not_stored() -> None:
    """Admission is half of what an adaptive policy does; a replay without it would measure another policy."""
    trace = trace_of([0, 1], [0, 1])
    assert replay(trace, Book(10, refused=trace[0].keys[1:]), 10) == Replayed(4, 1, 1)


def test_not_now_loses_the_store_and_nothing_else() -> None:
    """A policy that gives no victim for now must not stop the replay, nor push out what is there."""
    assert replay(trace_of([0, 1], [2], [0, 1]), Book(2, never_now=True), 2) == Replayed(5, 2, 2)


def best_by_hand(trace: Sequence[TraceRequest], capacity: int) -> int:
    """The most prefix hits that any sequence of choices gives, by trying them all."""
    best: dict[frozenset[Key], int] = {frozenset(): 0}
    for request in trace:
        after: dict[frozenset[Key], int] = {}
        for resident, hits in best.items():
            found = next((i for i, key in enumerate(request.keys) if key not in resident), len(request.keys))
            pool = resident | set(request.keys)
            for kept in itertools.combinations(sorted(pool), min(capacity, len(pool))):
                after[frozenset(kept)] = max(after.get(frozenset(kept), 0), hits + found)
        best = after
    return max(best.values())


@given(
    paths=st.lists(st.sampled_from([[0], [0, 1], [0, 1, 2], [0, 3], [4], [4, 5], [6]]), min_size=1, max_size=7),
    capacity=st.integers(1, 3),
)
def test_nobody_is_better_than_the_clairvoyant(paths: list[list[int]], capacity: int) -> None:
    """The table's last row is called a bound: for small traces it must be the best of all ways to choose."""
    trace = trace_of(*paths)
    assert clairvoyant(trace, capacity).hits == best_by_hand(trace, capacity)
    assert replay(trace, FifoPolicy(capacity), capacity).hits <= clairvoyant(trace, capacity).hits


def test_the_clairvoyant_writes_nothing_in_vain() -> None:
    """Writes exclude chunks that are never requested again, and chunks that are stored already."""
    assert clairvoyant(trace_of([0, 1], [2], [0, 1], [0, 1], [3]), 10) == Replayed(8, 4, 2)


def test_first_in_first_out_does_not_hear_of_uses() -> None:
    """The lower bound of the table: chunks are evicted in the order of arrival, used or not."""
    assert replay(trace_of([0], [1], [0], [2], [0]), FifoPolicy(2), 2).hits == 1
    assert replay(trace_of([0], [1], [0], [2], [0]), LruPolicy(2), 2).hits == 2


@pytest.mark.parametrize("name", sorted(load_plugins().policies))
def test_every_policy_can_be_replayed_twice_alike(name: str) -> None:
    """Figures in a table must be reproducible."""

    def opened() -> EvictionPolicy:
        return load_plugins().require_policy(name).plugin.open(20)

    trace = trace_of(*([i % 7, 100 + i % 11, 200 + i] for i in range(200)))
    assert replay(trace, opened(), 20) == replay(trace, opened(), 20)
