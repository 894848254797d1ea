"""Tables of requests: what is shared, what is new, and in which order it is given back."""

from __future__ import annotations

from tierkv.reference.block_pool import BlockPool
from tierkv.reference.block_tables import TableKeeper
from tierkv.reference.configs import EngineConfig
from tierkv.reference.request import Request, RequestRecord


def keeper(pool: BlockPool, *, num_groups: int = 1, prefix_caching: bool = True) -> TableKeeper:
    """Blocks of two tokens, so that a few tokens make several."""
    return TableKeeper(pool, windows=(None,) * num_groups, block_tokens=2, prefix_caching=prefix_caching)


def request(prompt: list[int], num_groups: int = 1) -> Request:
    """A waiting request; tests of tables need no more of it."""
    config = EngineConfig(block_tokens=2, num_groups=num_groups)
    return Request(config, RequestRecord("r", 0, len(prompt), 0.0), prompt, 1)


def computed(tables: TableKeeper, prompt: list[int], num_groups: int = 1) -> Request:
    """A request that went all the way: found, allocated, computed."""
    r = request(prompt, num_groups)
    assert tables.open(r, tables.find_prefix(r), 0, len(prompt))
    tables.register_computed(r, len(prompt))
    return r


def test_a_prefix_leaves_a_token_to_compute() -> None:
    """The model must run at least once to give a token: a prompt is never found in whole."""
    tables = keeper(BlockPool(9))
    first = computed(tables, [1, 2, 3, 4])
    assert tables.find_prefix(request([1, 2, 3, 4])) == [first.tables[0][:1]]
    assert tables.find_prefix(request([1, 2, 3, 4, 5])) == [first.tables[0]]
    assert tables.find_prefix(request([1, 2, 9, 4, 5])) == [first.tables[0][:1]]
    assert tables.find_prefix(request([9, 2, 3, 4, 5])) == [[]]


def test_only_computed_full_blocks_are_found() -> None:
    """A block that is allocated, or half full, has bytes of another request."""
    tables = keeper(BlockPool(9))
    r = request([1, 2, 3, 4, 5])
    assert tables.open(r, [[]], 0, 5)
    tables.register_computed(r, 3)
    assert tables.find_prefix(request([1, 2, 3, 4, 5])) == [r.tables[0][:1]]
    assert r.tables[0][1].block_hash is None


def test_a_prefix_counts_only_where_every_group_has_it() -> None:
    """The layers of the other group would read what is not there."""
    pool = BlockPool(9)
    tables = keeper(pool, num_groups=2)
    r = computed(tables, [1, 2, 3, 4], num_groups=2)
    assert tables.find_prefix(request([1, 2, 3, 4, 5], 2)) == r.tables
    tables.close(r)
    taken = pool.allocate(5)  # four were never used; the fifth is the tail of the last group
    assert len(taken) == 5
    found = tables.find_prefix(request([1, 2, 3, 4, 5], 2))
    assert [len(table) for table in found] == [1, 1]


def test_opening_is_all_or_nothing() -> None:
    """Blocks taken for a request that is then not admitted would be lost, or its hits evicted by its own needs."""
    pool = BlockPool(5)
    tables = keeper(pool)
    first = computed(tables, [1, 2, 3, 4])
    tables.close(first)
    held = pool.allocate(1)
    r = request([1, 2, 3, 4, 5, 6, 7, 8])
    prefix = tables.find_prefix(r)
    assert len(prefix[0]) == 2
    assert not tables.open(r, prefix, 4, 8), "three are free, two of them are the prefix, and two more are needed"
    assert r.tables == [[]]
    assert pool.num_free == 3
    pool.release(held)
    assert tables.open(r, prefix, 4, 8)
    assert r.tables[0][:2] == prefix[0]
    assert [block.block_hash is None for block in r.tables[0]] == [False, False, True, True]
    assert not tables.extend(r, 9)
    assert len(r.tables[0]) == 4
    assert tables.extend(r, 7), "a table never shrinks"


def test_sharing_is_counted() -> None:
    """The first of two requests to end must not take the prefix from the other."""
    pool = BlockPool(9)
    tables = keeper(pool)
    first = computed(tables, [1, 2, 3])
    second = computed(tables, [1, 2, 4])
    assert first.tables[0][0] is second.tables[0][0]
    tables.close(first)
    assert second.tables[0][0].ref_cnt == 1
    tables.close(second)
    assert pool.num_held == 0
    assert first.tables == second.tables == [[]]


def test_the_tail_is_evicted_before_the_head() -> None:
    """A prefix without its head is useless, one without its tail is a shorter prefix; and that in all groups alike."""
    pool = BlockPool(7)
    tables = keeper(pool, num_groups=2)
    r = computed(tables, [1, 2, 3, 4, 5, 6], num_groups=2)
    (a0, a1, a2), (b0, b1, b2) = r.tables
    tables.close(r)
    assert pool.allocate(6) == [b2, a2, b1, a1, b0, a0]


def test_without_prefix_caching_nothing_is_found() -> None:
    """EngineCapabilities tells tierkv so, and tierkv then lets two requests load one prefix side by side."""
    tables = keeper(BlockPool(9), prefix_caching=False)
    computed(tables, [1, 2, 3, 4])
    assert tables.find_prefix(request([1, 2, 3, 4, 5])) == [[]]
