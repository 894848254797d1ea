"""Sets of keys: as a set, for any order of calls."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierkv.structures.key_set import KeySet
from tierkv.types.keys import Key, make_key

KEYS = st.builds(lambda number: make_key(bytes((number % 7, number)), number % 2), st.integers(0, 40))


@given(st.lists(st.tuples(st.sampled_from(["update", "discard", "pop"]), st.lists(KEYS, max_size=8))))
def test_it_is_a_set_of_keys(calls: list[tuple[str, list[Key]]]) -> None:
    """A key that was forgotten would be served although a user wanted it gone, or stay gone although it was stored."""
    keys, truth = KeySet(), set[Key]()
    for name, some in calls:
        if name == "update":
            keys.update(some)
            truth.update(some)
        elif name == "discard":
            for key in some:
                keys.discard(key)
                truth.discard(key)
        elif truth:
            popped = keys.pop()
            assert popped in truth
            truth.remove(popped)
        assert len(keys) == len(truth)
        assert all((key in keys) == (key in truth) for key in [*some, *truth])
