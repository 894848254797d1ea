"""How long a hit is: the cases of the specification, and an oracle that tries every answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.scheduler.search import (
    DEFERRED,
    NO_HIT,
    Hit,
    SearchGroup,
    find_hit,
    prefix_hits,
    ready_tokens,
    tokens_covered,
    wanted_keys,
)
from tierkv.types.geometry import cdiv
from tierkv.types.keys import Key, make_key, split_key
from tierkv.types.lookup import LookupResult

LETTERS = {"T": LookupResult.HIT, "P": LookupResult.PENDING, "N": LookupResult.RETRY, "F": LookupResult.MISS}


class Book:
    """Answers per key, and who asked."""

    def __init__(self, *groups: str) -> None:
        self.calls: list[Key] = []
        self.answers: dict[Key, LookupResult] = {}
        for group, letters in enumerate(groups):
            for key, letter in zip(keys_of(group, len(letters)), letters, strict=True):
                self.answers[key] = LETTERS[letter]

    def __call__(self, key: Key) -> LookupResult:
        self.calls.append(key)
        return self.answers[key]


def keys_of(group: int, count: int) -> list[Key]:
    """Keys of a group's first chunks."""
    return [make_key(b"chunk %d" % i, group) for i in range(count)]


def groups_of(*shapes: tuple[int, int]) -> list[SearchGroup]:
    """Groups of (tokens per chunk, number of chunks)."""
    return [SearchGroup(size, keys_of(i, count)) for i, (size, count) in enumerate(shapes)]


@pytest.mark.parametrize(
    ("letters", "hits", "calls"),
    [
        pytest.param("TTFT", 2, 3, id="S23"),
        pytest.param("TNTF", None, 4, id="S24"),
        pytest.param("FTTT", 0, 1, id="S25"),
        pytest.param("NF", None, 2, id="S26"),
        pytest.param("", 0, 0, id="S27"),
        pytest.param("TPT", 3, 3, id="pending-counts"),
    ],
)
def test_s23_to_s27_prefix(letters: str, hits: int | None, calls: int) -> None:
    """S23 to S27: walk on over the unknown, so that all of it is asked for at once, and stop at the first miss."""
    book = Book(letters)
    assert prefix_hits(keys_of(0, len(letters)), book) == hits
    assert len(book.calls) == calls


def test_s35_the_hit_counts_from_the_middle_of_a_chunk() -> None:
    """S35: with C inside a chunk that chunk is looked up again, and H counts from C."""
    book = Book("FTTT")
    assert find_hit(groups_of((4, 4)), 6, 16, book) == Hit(10)
    assert book.calls[0] == keys_of(0, 2)[1]


@pytest.mark.parametrize("computed", [13, 14, 15, 16])
def test_s36_less_than_a_chunk_remains(computed: int) -> None:
    """S36: where no whole chunk can be gained, nobody is asked."""
    book = Book("TTTT")
    assert find_hit(groups_of((4, 4)), computed, 16, book) == NO_HIT
    assert not book.calls


def test_s38_a_later_group_shortens_the_hit() -> None:
    """S38, with full attention in place of the window: 4 chunks here, 3 there, 3 in all, and nobody is asked twice."""
    book = Book("TTTT", "TTTF")
    assert find_hit(groups_of((4, 4), (4, 4)), 0, 16, book) == Hit(12)
    assert len(book.calls) == len(set(book.calls)) == 8


def test_s40_a_later_group_cuts_the_unknown_off() -> None:
    """S40: what is unknown lies behind the end that another group sets: the answer is known."""
    assert find_hit(groups_of((4, 6), (4, 6)), 0, 24, Book("TTTTTN", "TTTFTT")) == Hit(12)


def test_s41_unknown_here_absent_there() -> None:
    """S41: one group without any chunk settles it, whatever is unknown elsewhere."""
    assert find_hit(groups_of((4, 2), (4, 2)), 0, 8, Book("NN", "FT")) == NO_HIT


def test_s42_unknown_within_the_end() -> None:
    """S42: nothing cuts the unknown chunk off, so nobody can say yet."""
    assert find_hit(groups_of((4, 2), (4, 2)), 0, 8, Book("TN", "TT")) == DEFERRED


def test_s43_coarse_and_fine_chunks() -> None:
    """S43: every group can serve the answer, and less than the coarser chunk is no hit."""
    coarse_and_fine = groups_of((64, 4), (256, 1))
    assert find_hit(coarse_and_fine, 0, 300, Book("TTTT", "T")) == Hit(256)
    assert find_hit(coarse_and_fine, 0, 300, Book("TTTF", "T")) == NO_HIT
    assert find_hit(coarse_and_fine, 0, 300, Book("TTTT", "F")) == NO_HIT


def test_s46_fewer_keys_than_tokens() -> None:
    """S46, S5: the specification calls it an error; under async scheduling it is everyday, and caps the hit."""
    assert find_hit(groups_of((4, 2)), 0, 40, Book("TT")) == Hit(8)


def test_s47_asking_twice_changes_nothing() -> None:
    """S47: the search keeps no state."""
    groups = groups_of((4, 3), (6, 2))
    book = Book("TTT", "TF")
    assert find_hit(groups, 0, 12, book) == find_hit(groups, 0, 12, book)


def oracle(groups: Sequence[SearchGroup], computed: int, tokens_max: int, present: Callable[[Key], bool]) -> int:
    """S44's rule, by trying every length from the longest down."""
    longest = min(tokens_max, *(len(group.keys) * group.chunk_tokens for group in groups)) - computed
    for hit in range(longest, 0, -1):
        covered = all(
            present(group.keys[i])
            for group in groups
            for i in range(computed // group.chunk_tokens, cdiv(computed + hit, group.chunk_tokens))
        )
        if covered and hit >= max(group.chunk_tokens for group in groups):
            return hit
    return 0


SHAPES = st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(0, 9)), min_size=1, max_size=4)


@st.composite
def searches(draw: st.DrawFn) -> tuple[list[SearchGroup], int, int, set[Key], set[Key]]:
    """Groups, C, cap, present keys, and those that are unknown at first."""
    groups = groups_of(*draw(SHAPES))
    keys = [key for group in groups for key in group.keys]
    absent = draw(st.sets(st.sampled_from(keys), max_size=4)) if keys else set()
    unknown = draw(st.sets(st.sampled_from(keys))) if keys else set()
    return groups, draw(st.integers(0, 20)), draw(st.integers(0, 72)), set(keys) - absent, unknown


@given(searches())
def test_s44_the_answer_is_the_oracles(search: tuple[list[SearchGroup], int, int, set[Key], set[Key]]) -> None:
    """S44: mixed chunk sizes, any C, any cap: exactly the longest servable hit, with or without the shortcut."""
    groups, computed, cap, present, _ = search

    def lookup(key: Key) -> LookupResult:
        return LookupResult.HIT if key in present else LookupResult.MISS

    expected = oracle(groups, computed, cap, present.__contains__)
    assert find_hit(groups, computed, cap, lookup) == Hit(expected)
    assert find_hit(groups, computed, cap, lookup, resident_in(present)) == Hit(expected)


def resident_in(present: set[Key]) -> Callable[[Sequence[Key], int, int], int]:
    """A shortcut over a set, as the host index offers it."""

    def resident_prefix(keys: Sequence[Key], start: int, stop: int) -> int:
        count = 0
        while start + count < stop and keys[start + count] in present:
            count += 1
        return count

    return resident_prefix


@given(searches(), st.randoms(use_true_random=False))
def test_s44_deferral_never_changes_the_answer(
    search: tuple[list[SearchGroup], int, int, set[Key], set[Key]], rng: random.Random
) -> None:
    """S44: unknown chunks become known one by one, in any order; an answer that is given early is the final one, and a
    deferred one names at least one chunk that was asked for, so that it can become known."""
    groups, computed, cap, present, unknown = search
    expected = oracle(groups, computed, cap, present.__contains__)
    asked: set[Key] = set()
    hit = DEFERRED

    def lookup(key: Key) -> LookupResult:
        if key in unknown:
            asked.add(key)
            return LookupResult.RETRY
        return LookupResult.HIT if key in present else LookupResult.MISS

    for _ in range(len(unknown) + 1):
        asked.clear()
        hit = find_hit(groups, computed, cap, lookup, resident_in(present - unknown))
        if not hit.deferred:
            assert hit.tokens == expected
        else:
            assert asked, "deferred, but nobody was asked: it would stay so for ever"
            unknown = unknown - set(rng.sample(sorted(asked), rng.randint(1, len(asked))))
    assert hit == Hit(expected)


@given(searches())
def test_s45_the_search_is_short(search: tuple[list[SearchGroup], int, int, set[Key], set[Key]]) -> None:
    """S45: two walks per chunk at most: one to find the end, one to see whether anything before it is unknown."""
    groups, computed, cap, present, unknown = search
    calls: list[Key] = []

    def lookup(key: Key) -> LookupResult:
        calls.append(key)
        if key in unknown:
            return LookupResult.RETRY
        return LookupResult.HIT if key in present else LookupResult.MISS

    find_hit(groups, computed, cap, lookup)
    assert all(calls.count(key) <= 2 for key in set(calls))
    assert all(key in {k for group in groups for k in group.keys[computed // group.chunk_tokens :]} for key in calls)


def chunks_needed(groups: Sequence[SearchGroup], computed: int, end: int) -> int:
    """Chunks that cover tokens C to ``end`` over all groups."""
    return sum(cdiv(end, group.chunk_tokens) - computed // group.chunk_tokens for group in groups)


@given(SHAPES, st.integers(0, 50), st.integers(0, 60))
def test_the_cap_is_kept_and_used(shapes: list[tuple[int, int]], computed: int, chunks_max: int) -> None:
    """A hit under the cap never needs more slots than there are (or it would be gathered for ever, G1), and the cap is
    not far too careful where chunk sizes divide each other."""
    groups = groups_of(*shapes)
    end = tokens_covered(groups, computed, chunks_max)
    assert end >= computed
    if end > computed:
        assert chunks_needed(groups, computed, end) <= chunks_max
    coarsest = max(group.chunk_tokens for group in groups)
    if all(coarsest % group.chunk_tokens == 0 for group in groups):
        assert chunks_needed(groups, computed, (end // coarsest + 1) * coarsest) > chunks_max


@given(SHAPES, st.integers(0, 12), st.integers(1, 60))
def test_wanted_are_exactly_the_chunks_of_the_hit(shapes: list[tuple[int, int]], computed: int, tokens: int) -> None:
    """All that a load will need is gathered, and nothing that it will not; what ends first comes first."""
    groups = [SearchGroup(size, keys_of(i, 80)) for i, (size, _) in enumerate(shapes)]
    wanted = wanted_keys(groups, computed, tokens)
    expected = {
        key
        for group in groups
        for key in group.keys[computed // group.chunk_tokens : cdiv(computed + tokens, group.chunk_tokens)]
    }
    assert len(wanted) == len(set(wanted))
    assert set(wanted) == expected
    ends = []
    for key in wanted:
        chunk_hash, group = split_key(key)
        ends.append((int(chunk_hash.rsplit(maxsplit=1)[-1]) + 1) * groups[group].chunk_tokens)
    assert ends == sorted(ends)


@given(searches())
def test_the_ready_part_is_the_longest(search: tuple[list[SearchGroup], int, int, set[Key], set[Key]]) -> None:
    """At the deadline as much is answered as can be: the oracle over what is readable."""
    groups, computed, cap, present, unknown = search
    full = oracle(groups, computed, cap, present.__contains__)
    if not full:
        return  # nothing was wanted, so nobody asks which part of it is ready
    readable = present - unknown
    expected = oracle(groups, computed, min(cap, computed + full), readable.__contains__)
    assert ready_tokens(groups, computed, full, resident_in(readable)) == expected
