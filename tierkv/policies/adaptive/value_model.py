"""Value of a chunk by class and age, learned from chunks that are reused and chunks that are not."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache

from tierkv.policies.adaptive.classes import (
    ABANDONED,
    CLASSES,
    NEW_FROM,
    SEEN_FROM,
    hinted_probability,
    is_private,
)

AGES = (
    0.0,
    5.0,
    10.0,
    *(20.0 * 2 ** (step / 4) for step in range(20)),
    *(640.0 * 2 ** (step / 2) for step in range(22)),
)
"""Lower bounds of the age intervals, in seconds since a chunk was last seen. The last begins after ten days and has no
end: a chunk's value declines with its age there, so that none is kept for ever."""
_LENGTHS = tuple(b - a for a, b in zip(AGES, (*AGES[1:], 2 * AGES[-1]), strict=True))

CLASS_PRIOR_USES = 20.0
"""Weight of the prior of a class, in chunks at risk."""
CURVE_PRIOR_USES = 50.0
"""Weight of the prior of the curve, in chunks at risk per interval."""
CLASS_USES_MAX = 4000.0
"""Evidence of a class is halved when it counts more reuses than this."""
CURVE_USES_MAX = 40_000.0
"""Evidence of the curve is halved when it counts more reuses than this."""
EVIDENCE_CHANGE_MIN = 0.02
"""Relative change of a class's evidence that triggers an update."""
MEMORY_S = 4 * 3600.0
"""Seconds after which evidence is halved again, as far as there is more of it than ``MEMORY_EVIDENCE_MIN``."""
MEMORY_EVIDENCE_MIN = 4000.0
"""Reuses, expected and counted, that time alone does not halve: slow traffic needs weeks for that many."""

_SEEN_PRIORS = (0.12, 0.6, 0.9, 1.2, 1.5, 2.5, 4.0)
_ABANDONED_PRIOR = 0.05
_CHANCE_MAX = 0.95
_SOON_S, _LATE_S = 20.0, 640.0
_PRIVATE = bytes(map(is_private, range(CLASSES)))


def _prior_chance(begin_s: float, length_s: float) -> float:
    """Chance that a typical chunk is reused in an interval: rarely at once, mostly after a minute, then ever less."""
    age = begin_s + length_s / 2
    if age < _SOON_S:
        per_s = 0.0003 + age / 6000
    elif age < _LATE_S:
        per_s = 0.6 / max(60.0, age)
    else:
        per_s = 0.25 / age
    return 1 - math.exp(-per_s * length_s)


def _prior_factor(number: int) -> float:
    """Prior of the factor of a class."""
    hinted = hinted_probability(number)
    if hinted is not None:  # the factor at which this share of chunks is reused at any time
        return math.log(1 - hinted) / sum(math.log(1 - chance) for chance in _PRIOR_CHANCES)
    if number >= ABANDONED:
        return _ABANDONED_PRIOR
    kind = number // len(NEW_FROM)
    return _SEEN_PRIORS[kind if kind < len(SEEN_FROM) else 0]


def _values_by_age(chances: Sequence[float], factor: float) -> list[float]:
    """Values of a class, computed from the oldest interval to the youngest: keep as long as the ratio improves."""
    values = [0.0] * len(AGES)
    later: list[tuple[float, float, float]] = []  # per stretch of keeping: reuses, seconds, chance of no reuse
    for interval in range(len(AGES) - 1, -1, -1):
        through = max(1 - _CHANCE_MAX, (1 - chances[interval]) ** factor)
        uses, seconds = 1 - through, _LENGTHS[interval] * (1 + through) / 2
        while later and later[-1][0] * seconds > uses * later[-1][1]:
            more_uses, more_seconds, further = later.pop()
            uses += through * more_uses
            seconds += through * more_seconds
            through *= further
        later.append((uses, seconds, through))
        values[interval] = uses / seconds
    return values


_PRIOR_CHANCES = [_prior_chance(*interval) for interval in zip(AGES, _LENGTHS, strict=True)]


@cache
def _priors() -> tuple[list[float], list[list[float]]]:
    """Factor and values of each class before there is evidence. Every tenant has a model, and this takes 3 ms."""
    factors = [_prior_factor(number) for number in range(CLASSES)]
    return factors, [_values_by_age(_PRIOR_CHANCES, factor) for factor in factors]


class ValueModel:
    """Chance of reuse per age interval (one curve), one factor per class, and the values that follow from both.

    The *value* of a chunk at an age is the best ratio of expected reuses to expected seconds of keeping, over all times
    that the chunk could be kept (a Gittins index). So the value is highest just before a likely reuse.

    A chunk at risk in an interval counts as ``factor * chance`` expected reuses. Factors and chances start with a
    prior. They are updated until expectation and outcome agree.
    """

    def __init__(self) -> None:
        factors, table = _priors()
        self.chances = [*_PRIOR_CHANCES]
        self.factors = [*factors]
        self._curve_uses = [CURVE_PRIOR_USES * chance for chance in self.chances]
        self._curve_risk = [CURVE_PRIOR_USES] * len(AGES)
        self._uses = [CLASS_PRIOR_USES * factor for factor in self.factors]
        self._risk = [CLASS_PRIOR_USES] * CLASSES
        self._known = [0.0] * CLASSES  # evidence at the last update of a class
        self._turn = 0
        self._halved_s = 0.0
        self.table = [*table]
        """Value by class and age interval, in reuses per second of keeping a chunk; of the last, at its lower bound."""

    def value(self, number: int, age_s: float) -> float:
        """Value of a chunk of a class at an age, in reuses per second of keeping it."""
        value = self.table[number][bisect_right(AGES, age_s) - 1]
        return value if age_s < AGES[-1] else value * AGES[-1] / age_s

    def reused(self, number: int, age_s: float, chunks: int) -> None:
        """Count chunks of a class that were reused at an age."""
        self._uses[number] += chunks
        if is_private(number):
            self._curve_uses[bisect_right(AGES, age_s) - 1] += chunks

    def at_risk(self, number: int, interval: int, chunks: int) -> None:
        """Count chunks of a class that entered an age interval without a reuse so far."""
        self._risk[number] += chunks * self.chances[interval]
        if _PRIVATE[number]:
            self._curve_risk[interval] += chunks * self.factors[number]

    def learn(self, now_s: float) -> None:
        """Update the next class that has new evidence; after the last class, update the curve."""
        number = self._turn
        while number < CLASSES and not self._has_new_evidence(number):
            number += 1
        self._turn = number + 1
        if number < CLASSES:
            self._known[number] = self._uses[number] + self._risk[number]
            self.factors[number] = self._uses[number] / self._risk[number]
            if self._uses[number] > CLASS_USES_MAX:
                self._halve(number)
            self.table[number] = _values_by_age(self.chances, self.factors[number])
            return
        self._turn = 0
        chances = (uses / risk for uses, risk in zip(self._curve_uses, self._curve_risk, strict=True))
        self.chances = [min(_CHANCE_MAX, chance) for chance in chances]
        is_old = now_s - self._halved_s > MEMORY_S
        if is_old:
            self._halved_s = now_s
            for other in range(CLASSES):
                if self._uses[other] + self._risk[other] > MEMORY_EVIDENCE_MIN:
                    self._halve(other)
        if sum(self._curve_uses) > (MEMORY_EVIDENCE_MIN if is_old else CURVE_USES_MAX):
            for interval, risk in enumerate(self._curve_risk):
                if risk > CURVE_PRIOR_USES:  # the prior of an age that no chunk reaches would be halved to 0
                    self._curve_uses[interval] /= 2
                    self._curve_risk[interval] /= 2

    def _has_new_evidence(self, number: int) -> bool:
        """Whether the evidence of a class changed enough for an update."""
        return (
            abs(self._uses[number] + self._risk[number] - self._known[number])
            >= EVIDENCE_CHANGE_MIN * self._known[number]
        )

    def _halve(self, number: int) -> None:
        self._uses[number] /= 2
        self._risk[number] = max(1.0, self._risk[number] / 2)  # never 0, whatever was reused unexpectedly
