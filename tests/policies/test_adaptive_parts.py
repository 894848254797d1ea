"""Parts of the policy ``adaptive``, each against its definition."""

from __future__ import annotations

import random

import pytest

from tierkv.policies.adaptive.classes import CLASSES, classes_for, is_private
from tierkv.policies.adaptive.residents import NO_HANDLE, Residents
from tierkv.policies.adaptive.value_model import _LENGTHS, AGES, CLASS_USES_MAX, ValueModel
from tierkv.types.hints import NO_HINTS


def best_ratio(chances: list[float], interval: int) -> float:
    """Expected uses per expected second of keeping a chunk, for the time to keep it where that is best."""
    ratios, uses, seconds, through = [], 0.0, 0.0, 1.0
    for length, chance in zip(_LENGTHS[interval:], chances[interval:], strict=True):
        uses += through * chance
        seconds += through * length * (2 - chance) / 2
        through *= 1 - chance
        ratios.append(uses / seconds)
    return max(ratios)


@pytest.mark.parametrize("seed", range(10))
def test_worth_is_the_best_ratio_of_all_times_to_keep_a_chunk(seed: int) -> None:
    """The table is made in one pass from the oldest age to the youngest; trying every time gives the same."""
    randomness, values = random.Random(seed), ValueModel()
    values.chances = [randomness.choice([0.0001, 0.01, 0.2, 0.9]) * randomness.random() for _ in AGES]
    values.factors[3] = 1.0
    table = values._value_by_age(3)
    assert table == pytest.approx([best_ratio(values.chances, interval) for interval in range(len(AGES))])


def test_factors_follow_what_comes_back() -> None:
    """Of two classes of the same age, one with twice as many repetitions must be found to have them.

    Whatever was assumed first, and again after a change of the traffic.
    """
    values, often, seldom = ValueModel(), 1, 4
    assert is_private(often)
    for now_s in range(20_000):
        if now_s == 10_000:
            often, seldom = seldom, often
        for number, back in ((often, 60), (seldom, 30)):
            values.at_risk(number, 10, 1000)
            values.reused(number, AGES[10], back)
        values.learn(float(now_s))
        if now_s in {9_999, 19_999}:
            assert values.factors[often] / values.factors[seldom] == pytest.approx(2, rel=0.05)
            assert values.factors[often] * values.chances[10] == pytest.approx(0.06, rel=0.1)
    assert max(values._uses) <= 2 * CLASS_USES_MAX


def test_old_evidence_fades_with_time() -> None:
    """Few requests of a quiet night must not outweigh the next morning."""
    values = ValueModel()
    values.reused(1, 50.0, 1000)
    values.at_risk(1, 10, 100_000)
    before = values._uses[1]
    for turn in range(CLASSES + 5):
        values.learn(1e6 + turn)
    assert values._uses[1] == pytest.approx(before / 2)


def test_every_class_begins_with_sense() -> None:
    """Chunks seen more often have a higher initial value; a class of value 0 would never be admitted to learn."""
    values = ValueModel()
    assert min(min(row) for row in values.table) > 0
    by_seen = classes_for(5, NO_HINTS)
    ordered = [values.factors[by_seen[seen]] for seen in (1, 2, 3, 5, 8, 20, 100)]
    assert ordered == sorted(ordered)


def test_residents_are_found_by_mark() -> None:
    """The table grows place by place, while chunks are added and evicted; it must always agree with a dict."""
    randomness, residents, by_mark = random.Random(3), Residents(), dict[int, int]()
    residents.grow(20_000)
    free = list(range(20_000))
    randomness.shuffle(free)
    for step in range(60_000):
        if free and (randomness.random() < 0.6 or step < 10_000):
            mark = randomness.getrandbits(31)
            if mark not in by_mark:
                by_mark[mark] = free.pop()
                residents.insert([by_mark[mark]], [mark], [(1, 0, 0)])
        elif by_mark:
            mark, handle = by_mark.popitem()
            residents.remove([handle])
            free.append(handle)
            assert residents.find(mark) < 0
        assert len(residents) == len(by_mark)
    assert all(residents.find(mark) == handle for mark, handle in by_mark.items())
    assert residents.find_all([*by_mark, 1 << 31]) == [*by_mark.values(), -1]


def test_parents_know_how_many_children_they_have() -> None:
    """A chunk is evicted only after all of its children: without one of them, the others are useless."""
    residents = Residents()
    residents.grow(10)
    residents.insert([0, 1, 2, 3], [100, 101, 102, 103], [(1, 0, 0), (1, 0, 100), (1, 0, 100), (1, 0, 999)])
    residents.link_parents([3, 2, 1])
    assert residents.children[0] == 2
    assert residents.unlink_parent(3) == NO_HANDLE
    assert residents.unlink_parent(2) == NO_HANDLE
    assert residents.unlink_parent(1) == 0
    assert residents.unlink_parent(1) == NO_HANDLE
