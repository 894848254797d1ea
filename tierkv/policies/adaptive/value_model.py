"""What a chunk is worth by its class and age, learned from what comes back and what does not."""

from __future__ import annotations

import math
from bisect import bisect_right

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
    *(640.0 * 2 ** (step / 2) for step in range(5)),
    5120.0,
)
"""Where the intervals of age begin, in seconds since a chunk was last seen. The last one has no end."""
_LENGTHS = tuple(b - a for a, b in zip(AGES, (*AGES[1:], 2 * AGES[-1]), strict=True))

CLASS_PRIOR_USES = 20.0
"""What is assumed of a class before anything was seen weighs as much as so many chunks at risk."""
CURVE_PRIOR_USES = 50.0
CLASS_USES_MAX = 4000.0
"""With more re-uses than that behind what is known of a class, the older half counts half."""
CURVE_USES_MAX = 40_000.0
NEWS_MIN = 0.02
"""Evidence of a class has to change by such a part before it is looked at again."""
MEMORY_S = 4 * 3600.0
"""So long after it was last halved, all evidence is halved again, however little there is."""

_SEEN_PRIORS = (0.12, 0.6, 0.9, 1.2, 1.5, 2.5, 4.0)
_ABANDONED_PRIOR = 0.05
_CHANCE_MAX = 0.95
_SOON_S, _LATE_S = 20.0, 640.0


def _prior_chance(begin_s: float, length_s: float) -> float:
    """That a typical chunk comes back within an interval: seldom at once, mostly after a minute, then less and less."""
    age = begin_s + length_s / 2
    if age < _SOON_S:
        per_s = 0.0003 + age / 6000
    elif age < _LATE_S:
        per_s = 0.6 / max(60.0, age)
    else:
        per_s = 0.25 / age
    return 1 - math.exp(-per_s * length_s)


class ValueModel:
    """One curve: the chance to come back in each interval of age. One factor per class. And what follows from both.

    The *worth* of a chunk at an age is the best ratio, over all times that one could keep it, of expected re-uses to
    expected seconds of keeping (a Gittins index). What comes back soon after is worth most just before.

    A chunk at risk in an interval counts as ``factor * chance`` expected re-uses; factors and chances are what makes
    expectation and outcome agree, with a prior that they begin with.
    """

    def __init__(self) -> None:
        self.chances = [_prior_chance(*interval) for interval in zip(AGES, _LENGTHS, strict=True)]
        self.factors = [self._prior_factor(number) for number in range(CLASSES)]
        self._curve_uses = [CURVE_PRIOR_USES * chance for chance in self.chances]
        self._curve_risk = [CURVE_PRIOR_USES] * len(AGES)
        self._uses = [CLASS_PRIOR_USES * factor for factor in self.factors]
        self._risk = [CLASS_PRIOR_USES] * CLASSES
        self._known = [0.0] * CLASSES  # how much evidence there was when a class was last brought up to date
        self._turn = 0
        self._halved_s = 0.0
        self.table = [self._worth_by_age(number) for number in range(CLASSES)]
        """Worth by class and interval, in re-uses per second of keeping a chunk."""

    def _prior_factor(self, number: int) -> float:
        """What the factor of a class is assumed to be."""
        hinted = hinted_probability(number)
        if hinted is not None:  # the factor with which so many come back, sooner or later
            return math.log(1 - hinted) / sum(math.log(1 - chance) for chance in self.chances)
        if number >= ABANDONED:
            return _ABANDONED_PRIOR
        kind = number // len(NEW_FROM)
        return _SEEN_PRIORS[kind if kind < len(SEEN_FROM) else 0]

    def reused(self, number: int, age_s: float, chunks: int) -> None:
        """Chunks of a class were seen again, at an age."""
        self._uses[number] += chunks
        if is_private(number):
            self._curve_uses[bisect_right(AGES, age_s) - 1] += chunks

    def at_risk(self, number: int, interval: int, chunks: int) -> None:
        """Chunks of a class come into an interval of age, not seen again so far."""
        self._risk[number] += chunks * self.chances[interval]
        if is_private(number):
            self._curve_risk[interval] += chunks * self.factors[number]

    def learn(self, now_s: float) -> None:
        """Bring one class up to date with the evidence, the next one each time; after the last one, the curve."""
        number = self._turn
        while number < CLASSES and not self._is_news(number):
            number += 1
        self._turn = number + 1
        if number < CLASSES:
            self._known[number] = self._uses[number] + self._risk[number]
            self.factors[number] = self._uses[number] / self._risk[number]
            if self._uses[number] > CLASS_USES_MAX:
                self._halve(number)
            self.table[number] = self._worth_by_age(number)
            return
        self._turn = 0
        chances = (uses / risk for uses, risk in zip(self._curve_uses, self._curve_risk, strict=True))
        self.chances = [min(_CHANCE_MAX, chance) for chance in chances]
        is_old = now_s - self._halved_s > MEMORY_S
        if is_old:
            self._halved_s = now_s
            for other in range(CLASSES):
                self._halve(other)
        if is_old or sum(self._curve_uses) > CURVE_USES_MAX:
            self._curve_uses = [uses / 2 for uses in self._curve_uses]
            self._curve_risk = [risk / 2 for risk in self._curve_risk]

    def _is_news(self, number: int) -> bool:
        """Whether there is enough new evidence on a class to be worth the work."""
        return abs(self._uses[number] + self._risk[number] - self._known[number]) >= NEWS_MIN * self._known[number]

    def _halve(self, number: int) -> None:
        self._uses[number] /= 2
        self._risk[number] /= 2

    def _worth_by_age(self, number: int) -> list[float]:
        """From the oldest interval to the youngest: keeping goes on for as long as that makes the ratio better."""
        factor = self.factors[number]
        worths = [0.0] * len(AGES)
        later: list[tuple[float, float, float]] = []  # per stretch of keeping: uses, seconds, chance to get through
        for interval in range(len(AGES) - 1, -1, -1):
            through = max(1 - _CHANCE_MAX, (1 - self.chances[interval]) ** factor)
            uses, seconds = 1 - through, _LENGTHS[interval] * (1 + through) / 2
            while later and later[-1][0] * seconds > uses * later[-1][1]:
                more_uses, more_seconds, further = later.pop()
                uses += through * more_uses
                seconds += through * more_seconds
                through *= further
            later.append((uses, seconds, through))
            worths[interval] = uses / seconds
        return worths
