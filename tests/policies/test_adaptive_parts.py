"""Parts of the policy ``adaptive``, each against its definition."""

from __future__ import annotations

import random
from bisect import bisect_right

import pytest

from tierkv.policies.adaptive.classes import CLASSES, classes_for, is_private
from tierkv.policies.adaptive.residents import NO_HANDLE, Residents
from tierkv.policies.adaptive.runs import RunLog
from tierkv.policies.adaptive.value_model import (
    _LENGTHS,
    AGES,
    CLASS_USES_MAX,
    CURVE_USES_MAX,
    ValueModel,
    _values_by_age,
)
from tierkv.types.hints import NO_HINTS

HOUR_S, DAY_S = 3600.0, 86_400.0


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
    table = _values_by_age(values.chances, values.factors[3])
    assert table == pytest.approx([best_ratio(values.chances, interval) for interval in range(len(AGES))])


def test_models_learn_apart() -> None:
    """Each tenant has a model: what one learns must not change another, nor one that is opened later."""
    first, second = ValueModel(), ValueModel()
    before = ([*second.chances], [*second.factors], [[*row] for row in second.table])
    for now_s in range(2_000):
        first.at_risk(1, 10, 1000)
        first.reused(1, AGES[10], 900)
        first.learn(float(now_s))
    for model in (second, ValueModel()):
        assert (model.chances, model.factors, model.table) == before
    assert first.table != second.table
    assert first.chances != second.chances


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


def test_scarce_evidence_outlasts_the_hours() -> None:
    """On slow traffic, reuses after days are the only evidence about days; hours without traffic must not erase it."""
    values = ValueModel()
    values.reused(1, 100_000.0, 500)
    values.at_risk(1, AGES.index(640.0), 1000)
    before = values._uses[1], values._risk[1], sum(values._curve_uses), sum(values._curve_risk)
    for turn in range(50 * CLASSES):
        values.learn(5 * HOUR_S * turn)
    assert (values._uses[1], values._risk[1], sum(values._curve_uses), sum(values._curve_risk)) == before


def test_an_age_without_evidence_keeps_its_prior() -> None:
    """A small tier remembers no chunk for ten days; after some days of halving, nothing must be divided by zero."""
    values, oldest = ValueModel(), ValueModel().chances[-1]
    for _ in range(1500):
        values.reused(1, AGES[10], 50_000)
        values.at_risk(1, 10, 100_000)
        values.reused(2, AGES[10], 50_000)
        for _ in range(3):
            values.learn(0.0)
    assert max(values._curve_uses) < 4 * CURVE_USES_MAX
    assert values.chances[-1] == pytest.approx(oldest)
    assert min(values.table[1]) > 0


def test_ages_of_a_day_are_learned() -> None:
    """Users who come back every day are worth room all night, and none after a missed morning."""
    values = ValueModel()
    for turn in range(200):
        for interval in range(bisect_right(AGES, DAY_S)):
            values.at_risk(1, interval, 100)
        values.reused(1, DAY_S, 60)
        values.learn(float(turn))
    before, soon, missed = (values.value(1, hours * HOUR_S) for hours in (2, 20, 48))
    assert soon > 1.5 * before
    assert soon > 3 * missed


class CountedTimes(list[float]):
    """Times of runs that count how often they are read."""

    reads = 0

    def __getitem__(self, place: int) -> float:  # type: ignore[override]  # no slices
        self.reads += 1
        return super().__getitem__(place)


def test_only_age_intervals_that_a_run_enters_cost_anything() -> None:
    """There are dozens of intervals and two observations per request: most of the looks would find nothing."""
    log, values = RunLog(1000), ValueModel()
    for now_s in range(0, 50_000, 100):
        log.alive[log.place(log.open(float(now_s), 0))] = 1
        log.advance_ages(float(now_s), values)
    times = log.times = CountedTimes(log.times)  # type: ignore[assignment]  # a list counts as well
    log.advance_ages(49_900.0, values)
    assert times.reads == 0
    log.advance_ages(49_906.0, values)
    assert 0 < times.reads < 6, "the last run is five seconds old, and few others enter an interval"


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
