"""Numbers for chunks are taken one by one or many at once, and never twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierkv.structures.key_table import IdPool

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
