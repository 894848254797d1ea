"""Calls that a chunk costs in the order of insertion: each is entered once per tier, on the engine's thread."""

from __future__ import annotations

from calls import calls_of

from tierkv.policies.lru import LruPolicy
from tierkv.policies.prefix_order import LATE_MAX, PrefixOrder
from tierkv.structures.ranks import ranks_of
from tierkv.types.keys import make_key

CHUNKS = 256
KEYS = [make_key(b"%016d" % number, 0) for number in range(CHUNKS)]
RANKS = ranks_of("a", range(1, CHUNKS + 1))


def test_a_new_chunk_is_entered_with_few_calls() -> None:
    """It is behind no other chunk so far: six calls for that took a tenth of a store's time."""
    order = PrefixOrder(LruPolicy(2 * CHUNKS))
    order.add([CHUNKS], KEYS[:1], ranks_of("b", [1]))  # columns grow once
    assert calls_of(order.add, range(CHUNKS), KEYS, RANKS) <= 2 * CHUNKS + 50
    assert order.ranks_at(range(CHUNKS)) == RANKS


def test_a_batch_of_several_requests_is_entered_run_by_run() -> None:
    """Stores of a busy step end together: grouping them chunk by chunk took two calls for each."""
    order, requests = PrefixOrder(LruPolicy(2 * CHUNKS)), 8
    ranks = [rank for name in "abcdefgh" for rank in ranks_of(name, range(1, CHUNKS // requests + 1))]
    order.add([CHUNKS], KEYS[:1], ranks_of("i", [1]))  # columns grow once
    assert calls_of(order.add, range(CHUNKS), KEYS, ranks) <= 32 * requests, "one for a chunk at most"
    assert order.ranks_at(range(CHUNKS)) == ranks


def test_batches_from_the_tail_on_stay_in_the_order_of_the_prefix() -> None:
    """Chunks become readable tail first, batch by batch: each batch belongs just before the one that came last."""
    count = 3 * LATE_MAX
    for handles in ([*range(count)], [*range(count)][::-1], [number * 7 % count for number in range(count)]):
        keys = [make_key(b"%016d" % number, 0) for number in range(count)]
        order, ranks = PrefixOrder(LruPolicy(count), keys.__getitem__), ranks_of("a", range(1, count + 1))
        order.add(handles[-1:], keys[-1:], ranks[-1:])
        calls = 0
        for end in range(count - 1, 0, -59):
            some = slice(max(0, end - 59), end)
            calls += calls_of(order.add, handles[some][::-1], keys[some][::-1], ranks[some][::-1])
        assert calls < 4 * count
        assert [order.evict(1, bytes(4 * count))[0] for _ in range(count)] == handles[::-1], handles[:2]


def test_one_question_for_a_batch_takes_few_calls() -> None:
    """Whether chunks would continue a prefix that lost its end is asked for every batch that is written."""
    order = PrefixOrder(LruPolicy(CHUNKS))
    order.add(range(4), KEYS[:4], RANKS[:4])
    order.evict(1, bytes(CHUNKS))
    assert order.is_cut(*RANKS)
    assert not order.is_cut(*ranks_of("b", range(1, CHUNKS + 1)))
    assert order.is_cut(*ranks_of("b", range(1, CHUNKS + 1)), *RANKS, 0)
    assert not order.is_cut(0)
    assert not order.is_cut()
    assert calls_of(order.is_cut, *ranks_of("b", range(1, CHUNKS + 1))) <= 10
