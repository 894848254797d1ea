"""Filter and queue of a tier that writes on reuse: bounded, and exact where it matters."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.structures.lease_queue import LeaseQueue
from tierkv.structures.seen_filter import SeenFilter
from tierkv.types.keys import Key, make_key


def hashed(number: int, group: int = 0) -> Key:
    """A key as engines make them."""
    return make_key(hashlib.sha256(b"%d" % number).digest(), group)


def counted(number: int, group: int = 0) -> Key:
    """A key without any chance in it."""
    return make_key(number.to_bytes(8, "big"), group)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2))), st.integers(1, 9), st.booleans())
def test_nothing_is_remembered_that_was_not_seen(
    numbers: Sequence[tuple[int, int]], keys_max: int, chance: bool
) -> None:
    """It may forget, but a yes is true; and what was seen last is always remembered."""
    seen = SeenFilter(keys_max)
    noted: set[Key] = set()
    for number, group in numbers:
        key = (hashed if chance else counted)(number, group)
        assert not seen.note(key) or key in noted
        noted.add(key)
        assert seen.note(key)


@pytest.mark.parametrize("make", [hashed, counted])
def test_few_are_forgotten_early(make: object) -> None:
    """Of as many keys as half the bound, in several groups, all but a few are remembered."""
    seen = SeenFilter(4096)
    keys = [make(i, group) for i in range(512) for group in range(4)]  # type: ignore[operator]  # one of two functions
    assert not any(seen.note(key) for key in keys)
    marks = seen._marks.tolist()  # asking would push others out
    assert len(keys) * 0.98 < len([mark for mark in marks if mark]) <= len(keys)


def test_the_bound_holds() -> None:
    """However many come, no more than the bound are remembered, and those are the latest."""
    seen = SeenFilter(100)
    for i in range(10_000):
        seen.note(hashed(i))
    known = [i for i in reversed(range(10_000)) if i >= 9_000 and SeenFilter.note(seen, hashed(i))]
    assert len(known) <= 100


@given(st.lists(st.tuples(st.sampled_from(["put", "pop", "drop", "forget"]), st.integers(0, 5), st.integers(1, 3))))
def test_a_unique_queue_against_lists(moves: Sequence[tuple[str, int, int]]) -> None:
    """A lease is accepted once, until it is dropped or forgotten."""
    queue, waiting, put = LeaseQueue(unique=True), list[tuple[int, int]](), dict[int, int]()
    for verb, slot, generation in moves:
        if verb == "put":
            queue.extend([(slot, generation)] * 2)
            if put.get(slot) != generation:
                waiting.append((slot, generation))
            put[slot] = generation
        elif verb == "forget":
            queue.forget([(slot, generation)])
            if put.get(slot) == generation:
                del put[slot]
        elif waiting:
            assert queue.front() == waiting[0]
            front = waiting.pop(0)
            if verb == "pop":
                queue.pop_front()
            else:
                queue.drop_front()
                if put.get(front[0]) == front[1]:
                    del put[front[0]]
        assert len(queue) == len(waiting)


ASIDE_VERBS = ("put", "put", "pop", "drop", "aside", "drop behind", "rejoin")


@given(st.lists(st.tuples(st.sampled_from(ASIDE_VERBS), st.integers(1, 3))))
def test_who_is_taken_aside_keeps_his_place(moves: Sequence[tuple[str, int]]) -> None:
    """Against two lists: no lease is taken aside twice or overtakes, and only those behind are dropped first."""
    queue, aside, behind = LeaseQueue(), list[tuple[int, int]](), list[tuple[int, int]]()
    for number, (verb, count) in enumerate(moves):
        some = behind[:count]
        if verb == "put":
            queue.extend([(number, count)])
            behind.append((number, count))
        elif verb == "aside":
            assert queue.take_aside(count) == some
            aside, behind = aside + some, behind[count:]
        elif verb == "drop behind":
            queue.drop_behind(len(some))
            behind = behind[count:]
        elif verb == "rejoin":
            queue.rejoin()
            aside, behind = [], aside + behind
        elif aside or behind:
            assert queue.front() == (aside or behind).pop(0)
            (queue.pop_front if verb == "pop" else queue.drop_front)()
        assert queue.first(100) == aside + behind
        assert (len(queue), queue.num_behind) == (len(aside) + len(behind), len(behind))


def test_what_left_a_long_queue_takes_no_room() -> None:
    """Those that were taken aside and those behind each move down when half of the places are empty."""
    queue = LeaseQueue()
    queue.extend((number, 1) for number in range(20_000))
    for first in range(0, 18_000, 100):
        assert queue.take_aside(100) == [(number, 1) for number in range(first, first + 100)]
        queue.pop_front(100)
    assert queue.front() == (18_000, 1)
    assert len(queue) == 2000
    assert len(queue._behind._leases) < 10_000
    assert len(queue._aside._leases) < 10_000
