"""Numbers for chunks are taken one by one or many at once, and never twice."""

from __future__ import annotations

import pytest
from calls import calls_of
from hypothesis import given
from hypothesis import strategies as st

from tierkv.structures.columns import GROWTH_NUMBERS
from tierkv.structures.key_table import IdPool, KeyDirectory, KeyTable
from tierkv.types.keys import Key, make_key

MOVES = st.lists(st.one_of(st.just("one"), st.integers(0, 4), st.tuples(st.integers(0, 9), st.integers(1, 3))))


@given(MOVES)
def test_one_at_a_time_is_as_good_as_many(moves: list[str | int | tuple[int, int]]) -> None:
    """Single keys take a shorter path to a number than batches. Both paths share one pool: a number in use is never
    assigned twice, and returned numbers are used before new ones."""
    free, used = IdPool(None), list[int]()
    highest = -1
    for move in moves:
        if isinstance(move, tuple):
            back = used[move[0] : sum(move)]
            del used[move[0] : sum(move)]
            free.give_back(back)
            continue
        was_free = free.left
        taken = [free.take_one()] if move == "one" else free.take(int(move))
        assert not set(taken) & set(used)
        assert len(set(taken)) == len(taken)
        highest = max([highest, *taken])
        used += taken
        assert free.left == max(0, was_free - len(taken))
        assert free.left + len(used) == highest + 1


def keys_from(first: int, count: int) -> list[Key]:
    """Keys of consecutive numbers."""
    return [make_key(b"%032d" % number, 0) for number in range(first, first + count)]


@pytest.mark.parametrize("counts", [[1], [GROWTH_NUMBERS], [GROWTH_NUMBERS - 1, 2, 3 * GROWTH_NUMBERS + 5], [4096, 1]])
def test_new_keys_get_adjacent_numbers(counts: list[int]) -> None:
    """At an open, a million keys are added like this: each must be found under its number, and the number under it."""
    directory = KeyDirectory()
    other, table = KeyTable(directory), KeyTable(directory)
    other.add(make_key(b"x" * 32, 0))
    done = 0
    for count in counts:
        assert table.add_new(keys_from(done, count)) == range(done, done + count)
        done += count
    keys = keys_from(0, done)
    assert table.find_all(keys) == [*range(done)]
    assert [table.key(number) for number in range(done)] == keys
    assert len(table) == done
    assert other.known(keys) == []
    assert table.add(make_key(b"y" * 32, 0)) == done


@pytest.mark.parametrize("case", ["known", "known to another", "given twice", "given back"])
def test_keys_that_are_not_all_new_leave_no_trace(case: str) -> None:
    """They are added one by one then: a number left behind would name a chunk that no tier holds."""
    directory = KeyDirectory()
    other, table = KeyTable(directory), KeyTable(directory)
    keys = keys_from(0, 2 * GROWTH_NUMBERS)
    if case == "given twice":
        keys[-1] = keys[0]
    elif case == "given back":
        table.discard(table.add(make_key(b"x" * 32, 0)))
    else:
        (table if case == "known" else other).add(keys[7])
    before, length = directory.places(keys), len(table)
    assert not table.add_new(keys)
    assert (directory.places(keys), len(table)) == (before, length)
    assert len(set(table.numbers(keys))) == len(set(keys))


def test_new_keys_take_few_calls() -> None:
    """A million keys are added at an open: what each costs there, the first request after a restart waits for."""
    assert calls_of(KeyTable().add_new, keys_from(0, 4096)) < 1.5 * 4096
