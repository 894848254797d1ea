"""Chunks that loads bring: which are in flight, and when the load last moved, against sets per request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierkv.scheduler.lookup.loads_in_flight import LoadsInFlight
from tierkv.types.keys import Key

KEYS = tuple(Key(bytes([number])) for number in range(6))
OWNERS = ("a", "b", "c")


@given(
    moves=st.lists(st.tuples(st.sampled_from(OWNERS), st.sets(st.integers(0, 5), min_size=1), st.booleans())),
    at=st.integers(0, 20),
)
def test_a_chunk_is_in_flight_while_any_load_brings_it(moves: list[tuple[str, set[int], bool]], at: int) -> None:
    """Two loads may bring the same chunk: it is in flight until the last of them has ended, in whatever order."""
    loads = LoadsInFlight(active=True)
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
