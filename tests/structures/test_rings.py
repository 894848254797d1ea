"""Rings of handles: moves agree with a plain list, and neighbours move together, because prefixes are moved often."""

from __future__ import annotations

import random

import pytest

from tierkv.structures.rings import Rings

HANDLES = 40


def order_of(rings: Rings) -> list[int]:
    """Handles of ring 0, oldest first; both columns must agree."""
    there, handle = list[int](), rings.oldest(0)
    while handle >= 0:
        there.append(handle)
        handle = rings.after(handle)
    back, handle = list[int](), rings.newest(0)
    while handle >= 0:
        back.append(handle)
        handle = rings.before(handle)
    assert there == back[::-1]
    return there


@pytest.mark.parametrize("seed", range(20))
def test_moves_agree_with_a_list(seed: int) -> None:
    """Of single handles, of neighbours anywhere in the ring, and of others, given as a list or as a tuple."""
    chance, rings, model = random.Random(seed), Rings(2, None), list(range(HANDLES))
    rings.append(0, model)
    for _ in range(200):
        start, count = chance.randrange(HANDLES), chance.randrange(1, HANDLES)
        some = model[start : start + count] if chance.random() < 1 / 2 else chance.sample(model, count)
        rings.move(0, tuple(some) if chance.random() < 1 / 2 else some)
        model = [handle for handle in model if handle not in some] + some
        assert order_of(rings) == model


@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("newer", [~0, 2, 200])
def test_long_runs_are_inserted_as_one_by_one(step: int, newer: int) -> None:
    """An index of a million chunks is entered at an open, whose handles follow one another."""
    rings, run = Rings(1, None), range(3, 200)[::step]
    rings.append(0, [0, 1, 2, 200, 201])
    rings.insert(run, newer)
    model = [0, 1, 2, 200, 201]
    at = model.index(newer) if newer in model else len(model)
    assert order_of(rings) == [*model[:at], *run, *model[at:]]


class CountedColumn(list[int]):
    """Column that counts the entries that are written."""

    writes = 0

    def __setitem__(self, place: int, value: int) -> None:  # type: ignore[override]  # no slices here
        """Count a write."""
        self.writes += 1
        super().__setitem__(place, value)


def test_neighbours_are_moved_together() -> None:
    """A prefix that is used again is moved in a few writes, whatever its length."""
    rings = Rings(1, None)
    rings.append(0, range(HANDLES))
    column = CountedColumn(rings.next)
    rings.next = column  # type: ignore[assignment]  # only indexed
    rings.move(0, list(range(3, 30)))
    assert 0 < column.writes <= 3
    assert order_of(rings) == [*range(3), *range(30, HANDLES), *range(3, 30)]


@pytest.mark.parametrize("seed", range(20))
def test_removals_agree_with_a_list(seed: int) -> None:
    """Of neighbours anywhere in the ring, in either order, and of others."""
    chance, rings, model = random.Random(seed), Rings(2, None), list(range(HANDLES))
    rings.append(0, model)
    while model:
        start, count = chance.randrange(len(model)), chance.randrange(1, 8)
        near = model[start : start + count][:: chance.choice((1, -1))]
        some = near if chance.random() < 1 / 2 else chance.sample(model, min(count, len(model)))
        rings.unlink(some)
        model = [handle for handle in model if handle not in some]
        assert order_of(rings) == model
