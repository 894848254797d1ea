"""Runs: neighbouring chunks of one class that one request had in its path."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tierkv.policies.adaptive.classes import CLASSES, LEVELS
from tierkv.policies.adaptive.value_model import AGES, ValueModel
from tierkv.structures.rings import numbers

RUNS_MIN, RUNS_MAX = 1 << 12, 1 << 18
STEPS_MAX = 1024
"""Steps of runs from one interval of age into the next that are made at once: a fifth of a millisecond's work."""
NO_RUN = 0
_NUMBERS = 1 << 32
QUEUES = CLASSES * LEVELS


class RunLog:
    """The last so many runs, by number. A run's columns are at its *place*, which a later run gets.

    Numbers grow by one and begin again after four billion; 0 is none.
    """

    def __init__(self, chunks_max: int) -> None:
        """chunks_max: that the policy is opened for; sets how many runs are remembered."""
        size = RUNS_MIN
        while size < min(4 * chunks_max, RUNS_MAX):
            size *= 2
        self.size = size
        self.times = memoryview(bytearray(size * array("d").itemsize)).cast("d")
        """When the run was seen."""
        self.queues = memoryview(bytearray(size * array("H").itemsize)).cast("H")
        """Its class and level: ``class * LEVELS + level``."""
        self.alive = numbers(size)
        """How many of its chunks are remembered, in the tier or not, and were not seen since."""
        self._numbers = numbers(size)
        self._next = size + 1
        self._ages = [self._next] * len(AGES)  # per interval, the first run that is too young for it

    def open(self, now_s: float, queue: int) -> int:
        """Begin a run; its number."""
        number = self._next % _NUMBERS
        self._next += 1
        place = number % self.size
        self.times[place] = now_s
        self.queues[place] = queue
        self.alive[place] = 0
        self._numbers[place] = number
        return number

    @property
    def next_place(self) -> int:
        """The place that the next run gets."""
        return self._next % self.size

    def place(self, number: int) -> int:
        """Where a run is; negative if it is too long ago."""
        place = number % self.size
        return place if number and self._numbers[place] == number else -1

    def lost(self, runs: Sequence[int]) -> None:
        """One chunk of each of these is not remembered any more, or belongs to another run now."""
        numbers_, alive, size = self._numbers, self.alive, self.size
        for number in runs:
            place = number % size
            if number and numbers_[place] == number and alive[place]:
                alive[place] -= 1

    def grow_older(self, now_s: float, worths: ValueModel) -> None:
        """Tell of the chunks that came into another interval of age."""
        times, queues, alive, size = self.times, self.queues, self.alive, self.size
        left, end, oldest = STEPS_MAX, self._next, self._next - size
        for interval, begin_s in enumerate(AGES):
            at = max(self._ages[interval], oldest)
            seen_until_s = now_s - begin_s
            while at < end and left:
                place = at % size
                if times[place] > seen_until_s:
                    break
                if alive[place]:
                    worths.at_risk(queues[place] // LEVELS, interval, alive[place])
                at += 1
                left -= 1
            self._ages[interval] = at
