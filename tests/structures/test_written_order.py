"""Order of eviction that written ranks give: a prompt that several requests wrote is one prompt after a restart."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence

import pytest

from tierkv.structures import written_order
from tierkv.structures.ranks import ranks_of
from tierkv.structures.written_order import RANK_MAX, WrittenColumn, WrittenRanks, eviction_order


def write(ranks: WrittenRanks, request_id: str, ends: Sequence[int], before: int = 0) -> list[int]:
    """Written ranks of chunks of a request that continues the chunk of the written rank ``before``."""
    own = ranks_of(request_id, ends)
    ranks.continues(own[0], before)
    return [*ranks.of(own)]


def order_of(*chunks: int) -> list[int] | None:
    """Order of an index."""
    order = eviction_order(array("Q", chunks))
    return None if order is None else order.tolist()


def test_order_of_an_index() -> None:
    """Requests by their last write, each tail first; chunks of unknown rank where they are."""
    ranks = WrittenRanks(0)
    a, b = write(ranks, "a", range(1, 4)), write(ranks, "b", range(1, 4))
    assert order_of() is None
    assert order_of(0, 0) is None
    assert order_of(a[0], 0, b[1], a[2], b[0], 0, a[1], 0) == [1, 2, 4, 5, 3, 6, 0, 7]


def test_a_chat_is_one_prompt() -> None:
    """Three turns, and another prompt between the first two: the whole chat stays longer than the other prompt."""
    ranks = WrittenRanks(0)
    first = write(ranks, "first", [1, 2])
    other = write(ranks, "other", [1, 2])
    second = write(ranks, "second", [3], first[-1])
    third = write(ranks, "third", [4, 5], second[-1])
    assert order_of(*first, *other, *second, *third) == [3, 2, 6, 5, 4, 1, 0]


def test_a_fork_needs_what_is_before_it() -> None:
    """A shared beginning stays as long as the last request that begins with it, but not what the first one added."""
    ranks = WrittenRanks(0)
    long = write(ranks, "long", [1, 2, 3, 4])
    other = write(ranks, "other", [1, 2])
    early = write(ranks, "early", [2, 3], long[0])
    late = write(ranks, "late", [4, 5], long[2])
    assert order_of(*long, *late, *other) == [3, 5, 4, 2, 1, 0, 7, 6]
    assert order_of(*long, *other, *early) == [3, 2, 1, 5, 4, 7, 6, 0]
    assert order_of(*late, *other) == [1, 0, 3, 2], "what it continues is gone"


def test_requests_of_two_processes() -> None:
    """The ids of requests begin anew with each process: those of one id are two prompts."""
    old, new = (write(WrittenRanks(salt), "request-0", [1, 2]) for salt in (1, 2))
    assert {rank >> 44 for rank in old}.isdisjoint({rank >> 44 for rank in new})
    assert order_of(*old, *new) == [1, 0, 3, 2]


def is_needed(other: tuple[int, int], chunk: tuple[int, int], parents: Mapping[int, int], forks: Sequence[int]) -> bool:
    """Whether ``chunk`` belongs to the request of ``other``, or is useless without ``other``."""
    number, depth = chunk
    if number == other[0]:
        return True
    while number:
        number, depth = parents[number], forks[number]
        if number == other[0]:
            return depth > other[1]
    return False


@pytest.mark.parametrize("seed", range(20))
def test_order_of_random_indexes(seed: int) -> None:
    """The order is the one of a plain sort, in which each chunk counts with the last one that needs it."""
    rng = random.Random(seed)
    for _ in range(20):
        parents = {number: rng.choice([0, *range(1, number)]) for number in range(1, rng.randrange(2, 9))}
        rest = [(number, depth) for number in parents for depth in rng.sample(range(1, 12), rng.randrange(4))]
        chunks = [(number, rng.randrange(1, 12)) for number in parents]  # an older request begins before a younger one
        chunks += rng.sample(rest, len(rest))
        for _ in range(rng.randrange(3)):
            chunks.insert(rng.randrange(len(chunks)), (0, 0))
        forks = [min((depth for owner, depth in chunks if owner == number), default=0) for number in range(10)]
        moments = [
            max(
                i
                for i in range(len(chunks))
                if i == place or (chunk[0] and is_needed(chunk, chunks[i], parents, forks))
            )
            for place, chunk in enumerate(chunks)
        ]
        expected = sorted(range(len(chunks)), key=lambda place: (moments[place], -chunks[place][1]))
        ranks = [(number << 20 | parents[number]) << 24 | depth if number else 0 for number, depth in chunks]
        assert order_of(*ranks) == expected


def test_a_damaged_rank_breaks_nothing() -> None:
    """Ranks come from files: of any bits, each chunk is listed once."""
    rng = random.Random(6)
    for _ in range(50):
        ranks = [rng.choice((0, 1, RANK_MAX, rng.getrandbits(64), rng.getrandbits(24))) for _ in range(40)]
        assert sorted(order_of(*ranks) or range(40)) == [*range(40)]


def test_writers_are_remembered_in_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server handles millions of requests."""
    monkeypatch.setattr(written_order, "WRITERS_MAX", 2)
    ranks = WrittenRanks(0)
    (first,) = write(ranks, "first", [1])
    for number in range(4):
        write(ranks, f"request {number}", [2], first)
    parents = [ranks.of(ranks_of(f"request {number}", [3]))[0] >> 24 & 0xFFFFF for number in range(4)]
    assert parents == [0, 0, first >> 44, first >> 44]


def test_the_column_of_a_tier() -> None:
    """A row is used again: the rank of the chunk that was in it must not count for the next one."""
    column = WrittenColumn()
    column.note([0, 1], [])
    assert column.at(1) == 0
    column.note([5, 6, 7], [1, RANK_MAX, 3])
    column.note([9, 2], [4, 8])
    assert [column.at(row) for row in (5, 6, 7, 9, 2, 3, 1000)] == [1, RANK_MAX, 3, 4, 8, 0, 0]
    column.note([6, 7], [])
    assert [column.at(row) for row in (5, 6, 7)] == [1, 0, 0]
