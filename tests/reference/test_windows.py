"""Tables of groups with windows: held blocks, found blocks, and blocks after a failed load."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tierkv.reference.block_pool import BlockPool
from tierkv.reference.block_tables import TableKeeper
from tierkv.reference.configs import EngineConfig, ModelConfig, first_visible
from tierkv.reference.request import Request, RequestRecord

BLOCK = 2
Windows = tuple[int | None, ...]
HYBRID: Windows = (5, None)
"""Five tokens are the next one and two blocks before it."""


def keeper(pool: BlockPool, windows: Windows = HYBRID) -> TableKeeper:
    """Blocks of two tokens."""
    return TableKeeper(pool, windows=windows, block_tokens=BLOCK)


def request(num_tokens: int, windows: Windows = HYBRID) -> Request:
    """A waiting request with tokens 0, 1, 2, ..."""
    model = ModelConfig(layers=len(windows), windows=windows)
    config = EngineConfig(model=model, block_tokens=BLOCK, num_groups=len(windows))
    return Request(config, RequestRecord("r", 0, num_tokens, 0.0), range(num_tokens), 1)


def computed(tables: TableKeeper, num_tokens: int, windows: Windows = HYBRID) -> Request:
    """A request whose tokens are all computed, in one step."""
    r = request(num_tokens, windows)
    assert tables.open(r, tables.find_prefix(r), 0, num_tokens)
    tables.register_computed(r, num_tokens)
    r.num_computed_tokens = num_tokens
    return r


@pytest.mark.parametrize(("window", "position", "first"), [(None, 9, 0), (1, 9, 9), (4, 9, 6), (10, 9, 0), (11, 9, 0)])
def test_a_window_counts_the_token_itself(window: int | None, position: int, first: int) -> None:
    """As in vLLM and the models: off by one, a token would attend to a block that is not kept for it."""
    assert first_visible(window, position) == first


def test_blocks_that_the_window_has_passed_are_given_back() -> None:
    """Not one too early, which the next token would miss; not one too late; and those of the other group stay."""
    pool = BlockPool(40)
    tables = keeper(pool)
    r = computed(tables, 12)
    ids = [block.block_id for block in r.tables[0]]
    for tokens, passed in ((4, 0), (5, 0), (6, 1), (7, 1), (8, 2), (12, 4)):
        r.num_computed_tokens = tokens
        tables.free_passed(r)
        assert [block.is_null for block in r.tables[0]] == [True] * passed + [False] * (6 - passed)
        assert pool.num_held == 12 - passed
    tables.free_passed(r)
    assert not any(block.is_null for block in r.tables[1])
    assert [block.block_id for block in pool.allocate(pool.num_free)][-4:] == [ids[0], ids[1], ids[3], ids[2]]
    tables.close(r)
    assert pool.num_held == 27 + 4


def test_passed_blocks_are_found_until_they_are_reused() -> None:
    """They are the window of a shorter prefix, which the next user with the same system prompt will ask for."""
    pool = BlockPool(13)
    tables = keeper(pool)
    r = computed(tables, 12)
    tables.free_passed(r)
    found = tables.find_prefix(request(9))
    assert [[block.is_null for block in table] for table in found] == [[True, True, False, False], [False] * 4]
    assert found[1] == r.tables[1][:4]
    pool.allocate(3)
    assert [len(table) for table in tables.find_prefix(request(9))] == [1, 1]
    assert [len(table) for table in tables.find_prefix(request(13))] == [6, 6]


def test_a_prefix_takes_only_what_its_next_token_sees() -> None:
    """Blocks held for nothing are blocks that another request lacks."""
    pool = BlockPool(40)
    tables = keeper(pool)
    tables.close(computed(tables, 12))
    r = request(20)
    prefix = tables.find_prefix(r)
    assert [[block.is_null for block in table] for table in prefix] == [[True] * 4 + [False] * 2, [False] * 6]
    assert tables.open(r, prefix, 16, 20), "12 tokens local, 4 to be loaded, 4 to be computed"
    assert [[block.is_null for block in table] for table in r.tables] == [[True] * 6 + [False] * 4, [False] * 10]
    assert [[block.block_hash is None for block in table[-4:]] for table in r.tables] == [[True] * 4] * 2
    assert pool.num_held == 4 + 10
    tables.close(r)
    assert pool.num_held == 0


def test_the_last_token_keeps_its_window_when_all_is_loaded() -> None:
    """It is computed again, so its window begins one token before that of a further one."""
    tables = keeper(BlockPool(40))
    for num_tokens, nulls in ((10, 2), (11, 3)):
        r = request(num_tokens)
        assert tables.open(r, [[], []], 10, 10)
        assert sum(block.is_null for block in r.tables[0]) == nulls


@st.composite
def pools(draw: st.DrawFn) -> tuple[Windows, list[list[bool]]]:
    """Windows, and per group which blocks of a sequence are in the pool."""
    windows = draw(st.lists(st.one_of(st.none(), st.integers(1, 9)), min_size=1, max_size=3))
    length = draw(st.integers(0, 8))
    return tuple(windows), [draw(st.lists(st.booleans(), min_size=length, max_size=length)) for _ in windows]


@given(pools())
def test_the_longest_prefix_that_can_be_continued_is_found(case: tuple[Windows, list[list[bool]]]) -> None:
    """Against the definition: the longest behind which no group lacks a block that the next token sees."""
    windows, present = case
    length = len(present[0])
    pool = BlockPool(1 + length * len(windows))
    tables = keeper(pool, windows)
    r = request(length * BLOCK + 1, windows)
    for group, row in enumerate(present):
        for index, there in enumerate(row):
            if there:
                pool.register(pool.allocate(1)[0], r.block_hashes[index], group)

    def can_be_continued(end: int) -> bool:
        return all(
            row[index]
            for row, window in zip(present, windows, strict=True)
            for index in range(end)
            if window is None or (index + 1) * BLOCK - 1 > end * BLOCK - window
        )

    longest = max(end for end in range(length + 1) if can_be_continued(end))
    found = tables.find_prefix(r)
    assert [len(table) for table in found] == [longest] * len(windows)
    for group, (table, window) in enumerate(zip(found, windows, strict=True)):
        for index, block in enumerate(table):
            seen = window is None or (index + 1) * BLOCK - 1 > longest * BLOCK - window
            assert (block.block_hash, block.group) == (r.block_hashes[index], group) if seen else block.is_null


@pytest.mark.parametrize(
    ("bad", "usable"),
    [
        ([], 16),
        ([(1, 7)], 0),  # 14 tokens are good, but the window holds blocks 6 and 7 only, and 14 tokens need 5 and 6
        ([(0, 7)], 0),
        ([(0, 6)], 0),
        ([(1, 0)], 0),
    ],
)
def test_what_a_failed_load_leaves(bad: list[tuple[int, int]], usable: int) -> None:
    """The rule: go on from where every group has valid blocks for all that the next token sees."""
    tables = keeper(BlockPool(40))
    r = request(20)
    assert tables.open(r, [[], []], 16, 16)
    invalid = frozenset(r.tables[group][index].block_id for group, index in bad)
    assert tables.usable_tokens(r, 16, invalid) == usable


def test_a_window_that_is_there_in_whole_is_cut_like_full_attention() -> None:
    """Near the start the window reaches the first token, so that there is something to go on from."""
    tables = keeper(BlockPool(40), (9, None))
    r = request(20, (9, None))
    assert tables.open(r, [[], []], 8, 8)
    assert not any(block.is_null for block in r.tables[0])
    for group in (0, 1):
        for index in range(4):
            assert tables.usable_tokens(r, 8, frozenset({r.tables[group][index].block_id})) == index * BLOCK


@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 13)), min_size=1, max_size=3),
    num_tokens=st.integers(1, 40),
    step_tokens=st.integers(1, 20),
    loaded=st.integers(0, 10),
)
def test_a_pool_as_large_as_said_is_enough(
    windows: list[int | None], num_tokens: int, step_tokens: int, loaded: int
) -> None:
    """The engine admits a request if the pool holds this many blocks: one too few, and it would stall for ever."""
    assume(loaded * BLOCK <= num_tokens)
    bound = TableKeeper(BlockPool(1), windows=windows, block_tokens=BLOCK).blocks_for(num_tokens, step_tokens)
    pool = BlockPool(1 + bound)
    tables = keeper(pool, tuple(windows))
    r = request(num_tokens, tuple(windows))
    done = loaded * BLOCK
    assert tables.open(r, [[] for _ in windows], done, done)
    r.num_computed_tokens = done = min(done, num_tokens - 1)
    while done < num_tokens:
        tables.free_passed(r)
        done = min(num_tokens, done + step_tokens)
        assert tables.extend(r, done)
        r.num_computed_tokens = done
    tables.close(r)
    assert pool.num_held == 0
