"""Chunks that loads bring: which are in flight, and when the load last moved, against sets per request."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.manager.step_budget import KEYS_PER_LOOK, StepBudget
from tierkv.scheduler.lookup.loads_in_flight import LoadsInFlight
from tierkv.types.keys import Key, make_key

KEYS = tuple(Key(bytes([number])) for number in range(6))
OWNERS = ("a", "b", "c")


@given(
    moves=st.lists(st.tuples(st.sampled_from(OWNERS), st.sets(st.integers(0, 5), min_size=1), st.booleans())),
    at=st.integers(0, 20),
)
def test_a_chunk_is_in_flight_while_any_load_brings_it(moves: list[tuple[str, set[int], bool]], at: int) -> None:
    """Two loads may bring the same chunk: it is in flight until the last of them has ended, in whatever order."""
    loads = LoadsInFlight(StepBudget().share(), active=True)
    truth: dict[str, tuple[Key, ...]] = {}
    moved_s: dict[str, float] = {}
    for time, (owner, numbers, resets) in enumerate(moves):
        if owner in truth:
            loads.ended(owner, truth.pop(owner))
        elif resets and time == at:
            loads.clear()
            truth.clear()
        else:
            truth[owner] = tuple(KEYS[number] for number in sorted(numbers))
            loads.started(owner, truth[owner], float(time))
            moved_s[owner] = float(time)
        assert len(loads) == len({key for keys in truth.values() for key in keys})
        for key in KEYS:
            owners = [one for one, keys in truth.items() if key in keys]
            assert loads.has_any((key,)) == bool(owners)
            assert loads.moved_s((key,)) == max((moved_s[one] for one in owners), default=None)


def test_a_load_of_any_length_is_entered_and_removed_in_parts() -> None:
    """A prompt of 100,000 chunks took 10 ms in the call that began its load, and 6 in the one that ended it."""
    budget = StepBudget(8)
    loads = LoadsInFlight(budget.share(), active=True)
    budget.begin_step()
    part = KEYS_PER_LOOK * budget.keys_max
    keys = tuple(Key(make_key(b"%8d" % number, 0)) for number in range(4 * part))
    other = (Key(make_key(b"   other", 0)),)
    loads.started("other", other, 0.5)
    loads.started("a", keys, 1.0)
    assert loads.has_any(keys), "the front counts at once"
    sizes = [len(loads)]
    while len(loads) < len(keys + other):
        budget.begin_step()
        loads.begin_step()
        sizes.append(len(loads))
    assert loads.has_any(keys[-1:])
    loads.ended("a", keys)
    sizes.append(len(loads))
    assert not loads.has_any(keys), "a load that has ended delays no other request, though its keys are not removed yet"
    assert loads.moved_s(keys) is None
    loads.started("b", keys[-1:], 2.0)
    while len(loads) > 2:  # the other load, and the last key
        budget.begin_step()
        loads.begin_step()
        sizes.append(len(loads))
    assert max(abs(later - earlier) for earlier, later in pairwise(sizes)) <= part
    budget.begin_step()
    loads.begin_step()
    assert not loads.has_any(keys[:-1])
    assert loads.moved_s(keys) == pytest.approx(2.0)
