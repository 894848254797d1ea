"""The search against an oracle that tries every answer: any groups, sizes, windows, start, limit and unknown chunks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_lookup import ScriptedLookup, keys_of, needed, oracle

from tierkv.scheduler.lookup import search
from tierkv.scheduler.lookup.search import Hit, SearchGroup, find_hit, no_shortcut, tokens_covered, wanted_keys
from tierkv.types.keys import split_key

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])
WINDOWS = st.none() | st.integers(1, 5)
ALPHABETS = {"nearly all": "TTTTTTTTF", "some unknown": "TTTTTTPNM", "mixed": "TTNNMF", "unknown": "NM"}
"""Most chunks are present, as in practice: with random presence no window would ever be full."""

COUNTS = st.integers(1, 4)
ANY_ALPHABET = st.sampled_from(sorted(ALPHABETS.values()))

EACH = settings().max_examples if settings().max_examples >= 1000 else 20
"""Cases per number of groups and alphabet: 320 in all by default, 32,000 in the nightly profile."""


@dataclass(frozen=True, slots=True)
class Case:
    """One search: ``letters`` per group as in :data:`scripted_lookup.LETTERS`."""

    groups: list[SearchGroup]
    letters: list[str]
    computed: int
    tokens_max: int


@st.composite
def cases(
    draw: st.DrawFn,
    sizes: st.SearchStrategy[int] = SIZES,
    counts: st.SearchStrategy[int] = COUNTS,
    alphabets: st.SearchStrategy[str] = ANY_ALPHABET,
) -> Case:
    """Any search."""
    groups, letters = [], []
    alphabet = draw(alphabets)
    for index in range(draw(counts)):
        size, chunks = draw(sizes), draw(WINDOWS)
        slack = None if chunks is None else draw(st.sampled_from([None, 0, 1, size]))
        count = draw(st.integers(0, 48)) // size
        groups.append(SearchGroup(size, keys_of(index, count), chunks, slack))
        letters.append("".join(draw(st.lists(st.sampled_from(alphabet), min_size=count, max_size=count))))
    tokens = max(group.chunk_tokens * len(group.keys) for group in groups)
    return Case(groups, letters, draw(st.integers(0, 16)), draw(st.sampled_from([tokens, tokens - 1, tokens // 2, 99])))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("alphabet", ALPHABETS)
@settings(max_examples=EACH)
@given(data=st.data(), shortcut=st.booleans(), rng=st.randoms(use_true_random=False))
def test_s44_the_answer_is_the_oracles_now_or_later(
    alphabet: str, count: int, data: st.DataObject, shortcut: bool, rng: random.Random
) -> None:
    """S44: exactly the longest servable hit, with mixed sizes and windows. Unknown chunks become known in any order.

    While they could change the answer it is deferred, and the search asks about an unknown chunk. When they cannot, the
    answer is the one that would have been given at once.
    """
    case = data.draw(cases(counts=st.just(count), alphabets=st.just(ALPHABETS[alphabet])))
    lookup = ScriptedLookup(*case.letters)
    expected = oracle(case.groups, case.computed, case.tokens_max, lookup.present())
    hit = search.Hit(0, deferred=True)
    while hit.deferred:
        lookup.calls.clear()
        resident = lookup.resident_prefix if shortcut else no_shortcut
        hit = find_hit(case.groups, case.computed, case.tokens_max, lookup, resident)
        least, most = (
            oracle(case.groups, case.computed, case.tokens_max, lookup.present(unknown=unknown))
            for unknown in (False, True)
        )
        assert hit.deferred == (least != most), f"between {least} and {most} tokens are certain"
        if hit.deferred:
            asked = sorted(lookup.asked())
            assert asked, "deferred, but no chunk was looked up: it would stay so forever"
            for key in rng.sample(asked, rng.randint(1, len(asked))):
                lookup.become_known(key)
    assert hit == Hit(expected)


@given(cases(sizes=st.just(4)), st.integers(0, 3))
def test_s44_one_chunk_size_as_an_engine_has_it(case: Case, more: int) -> None:
    """S44 literally: with one chunk size and the engine's own limit, restrictions on ends make no difference."""
    tokens = max(len(group.keys) for group in case.groups) * 4 + more
    cap = tokens - any(group.window_chunks is not None for group in case.groups)
    lookup = ScriptedLookup(*(letters.replace("N", "T").replace("M", "F") for letters in case.letters))
    anywhere = [SearchGroup(4, group.keys, group.window_chunks) for group in case.groups]
    as_windows_are = [SearchGroup(4, group.keys, group.window_chunks, 1) for group in case.groups]
    expected = oracle(anywhere, case.computed, cap, lookup.present())
    assert find_hit(anywhere, case.computed, cap, lookup) == Hit(expected)
    assert find_hit(as_windows_are, case.computed, cap, lookup) == Hit(expected)


@contextmanager
def counted_turns(ends: list[int]) -> Iterator[None]:
    """Record the end that each turn of each group gets."""

    def counting(reach: Callable[[Any, int], int]) -> Callable[[Any, int], int]:
        def counted(walk: Any, end: int) -> int:
            ends.append(end)
            return reach(walk, end)

        return counted

    with ExitStack() as patches:
        for walk in (search._PrefixWalk, search._WindowWalk):
            patches.enter_context(patch.object(walk, "reach", counting(walk.reach)))
        yield


@given(cases())
def test_s45_the_search_is_short(case: Case) -> None:
    """S45: no more passes than the hit has different lengths, and one that confirms the last.

    No chunk is looked up twice, none that C covers, and none of a prefix behind its first miss.
    """
    lookup, ends = ScriptedLookup(*case.letters), list[int]()
    with counted_turns(ends):
        find_hit(case.groups, case.computed, case.tokens_max, lookup)
    assert len(ends) <= len(case.groups) * (1 + len(set(ends)))
    assert len(lookup.calls) == len(set(lookup.calls))
    for index, group in enumerate(case.groups):
        looked_at = sorted(group.keys.index(key) for key in lookup.calls if split_key(key)[1] == index)
        assert all(i >= case.computed // group.chunk_tokens for i in looked_at)
        if group.window_chunks is None:
            assert all(case.letters[index][i] != "F" for i in looked_at[:-1])


@given(cases(), st.integers(0, 40))
def test_a_smaller_cap_gives_the_largest_hit_under_it(case: Case, tokens_max: int) -> None:
    """A limit from a hint, or from load or recompute, gives the longest hit that the rule allows under it."""
    lookup = ScriptedLookup(*case.letters)
    expected = oracle(case.groups, case.computed, tokens_max, lookup.present(unknown=True))
    hit = find_hit(case.groups, case.computed, tokens_max, lookup)
    assert hit.tokens in ({0} if hit.deferred else {expected})


def slots(groups: list[SearchGroup], computed: int, end: int) -> int:
    """Chunks that a hit to ``end`` needs, counted one by one."""
    return sum(len(needed(group, computed, end)) for group in groups)


@given(cases(), st.integers(0, 60))
def test_the_cap_of_slots_is_kept_and_used(case: Case, chunks_max: int) -> None:
    """A hit under the limit never needs more slots than there are; otherwise it would be gathered forever (G1).

    The limit is the last token for which the slots suffice: a hit is not cut where it fits.
    """
    groups, computed = case.groups, case.computed
    bound = min(case.tokens_max, *(len(group.keys) * group.chunk_tokens for group in groups))
    end = tokens_covered(groups, computed, case.tokens_max, chunks_max)
    fitting = [longer for longer in range(computed + 1, bound + 1) if slots(groups, computed, longer) <= chunks_max]
    assert fitting == list(range(computed + 1, computed + 1 + len(fitting)))
    assert end == computed + len(fitting) or end == bound <= computed


@given(
    st.lists(st.tuples(SIZES, WINDOWS), min_size=2, max_size=4),
    st.integers(0, 9),
    st.integers(1, 40),
    st.integers(0, 99),
)
def test_a_hit_is_the_longest_one_that_fits(
    shapes: list[tuple[int, int | None]], computed: int, chunks_max: int, miss: int
) -> None:
    """Of all hits that the rule allows, the longest one that fits the slots is found, and no shorter one."""
    groups = [
        SearchGroup(size, keys_of(i, 48 // size), window, None if window is None else 1)
        for i, (size, window) in enumerate(shapes)
    ]
    lookup = ScriptedLookup(*["".join("F" if i == miss else "T" for i in range(48 // size)) for size, _ in shapes])
    fits = [end for end in range(computed + 1, 49) if slots(groups, computed, end) <= chunks_max]
    expected = oracle(groups, computed, max(fits, default=computed), lookup.present())
    assert find_hit(groups, computed, tokens_covered(groups, computed, 48, chunks_max), lookup) == Hit(expected)


@given(cases(), st.integers(1, 40))
def test_wanted_are_exactly_the_chunks_of_the_hit(case: Case, tokens: int) -> None:
    """All chunks that a load will need are gathered, and no others, in the order of their ends."""
    groups = [SearchGroup(g.chunk_tokens, keys_of(i, 60), g.window_chunks) for i, g in enumerate(case.groups)]
    wanted = wanted_keys(groups, case.computed, tokens)
    expected = [
        (i + 1) * group.chunk_tokens for group in groups for i in needed(group, case.computed, case.computed + tokens)
    ]
    ends = []
    for key in wanted:
        chunk_hash, group = split_key(key)
        ends.append((int(chunk_hash.rsplit(maxsplit=1)[-1]) + 1) * groups[group].chunk_tokens)
    assert len(set(wanted)) == len(wanted)
    assert ends == sorted(expected)
