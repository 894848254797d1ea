"""Estimate of the engine's own cache: it is brought up to date in slices, and has the latest chunks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierkv.scheduler.lookup.engine_cache import PART_KEYS_MAX, EngineCache
from tierkv.types.keys import Key, make_key

BLOCKS = 8


def keys_of(family: int, count: int) -> list[Key]:
    """Keys of a prefix."""
    return [make_key(b"%d.%d" % (family, i), 0) for i in range(count)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6))), st.integers(1, 5))
def test_slices_end_as_one_batch_does(runs: list[tuple[int, int]], keys_max: int) -> None:
    """Whatever the slices: no more than the step allows is done at once, and in the end all of it is done."""
    whole, sliced = EngineCache(1, active=True), EngineCache(1, active=True)
    for family, count in runs:
        whole.add(keys_of(family, count), BLOCKS)
        whole.advance(1_000)
        sliced.add(keys_of(family, count), BLOCKS)
        assert sliced.advance(keys_max) <= keys_max
    while done := sliced.advance(keys_max):
        assert done <= keys_max
    for family in range(4):
        assert sliced.prefix(keys_of(family, 6)) == whole.prefix(keys_of(family, 6))


def test_the_oldest_chunks_leave() -> None:
    """The engine has eight blocks: after two prompts of six, the tail of the first one is gone, not its head."""
    cache = EngineCache(1, active=True)
    cache.add(keys_of(0, 6), BLOCKS)
    assert cache.prefix(keys_of(0, 6)) == 0, "nothing is known before the first slice"
    cache.advance(100)
    assert cache.prefix(keys_of(0, 6)) == 6
    cache.add(keys_of(1, 6), BLOCKS)
    cache.advance(100)
    assert (cache.prefix(keys_of(0, 6)), cache.prefix(keys_of(1, 6))) == (2, 6)
    cache.add(keys_of(2, 6), BLOCKS)
    cache.advance(100)
    assert [cache.prefix(keys_of(family, 6)) for family in range(3)] == [0, 2, 6]


def test_a_prompt_longer_than_the_known_pool_is_kept() -> None:
    """The pool is known by the numbers of its blocks that were seen: by none when the first request is allocated."""
    cache = EngineCache(1, active=True)
    cache.add(keys_of(0, 3 * BLOCKS), 0)
    cache.advance(100)
    assert cache.prefix(keys_of(0, 3 * BLOCKS)) == 3 * BLOCKS


def test_no_table_of_the_engines_chunks_is_large() -> None:
    """A table that grows beyond its room moves all of its keys in one call: 7 ms with 170,000 of them. A large GPU has
    as many blocks, so the chunks are divided among many tables.
    """
    cache, count = EngineCache(1, active=True), 4 * PART_KEYS_MAX
    keys = [make_key(b"%d" % i, 0) for i in range(count)]
    for _ in range(2):
        cache.add(keys, 100 * PART_KEYS_MAX)
        while done := cache.advance(1000):
            assert done <= 1000
            assert max(map(len, cache._parts)) <= PART_KEYS_MAX
    assert cache.prefix(keys) == count
