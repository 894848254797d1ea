"""Log of runs: sequences of neighbouring chunks of one class that one request had in its path."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tierkv.policies.adaptive.classes import CLASSES, LEVELS
from tierkv.policies.adaptive.value_model import AGES, ValueModel
from tierkv.structures.columns import column

RUNS_MIN, RUNS_MAX = 1 << 12, 1 << 18
STEPS_MAX = 1024
"""Largest number of steps of runs into the next age interval per call: about 0.2 ms of work."""
NO_RUN = 0
_NUMBERS = 1 << 32
QUEUES = CLASSES * LEVELS


class RunLog:
    """The most recent runs, by number. The columns of a run are at its *place*, which a later run takes over.

    Numbers grow by one and wrap around after four billion. 0 means no run.
    """

    def __init__(self, chunks_max: int) -> None:
        """Create the log; ``chunks_max``, the size of the tier, sets the number of remembered runs."""
        size = RUNS_MIN
        while size < min(4 * chunks_max, RUNS_MAX):
            size *= 2
        self.size = size
        self.times = memoryview(bytearray(size * array("d").itemsize)).cast("d")
        """Time of the run by place, in seconds."""
        self.queues = column("H", size)
        """Queue of the run by place: ``class * LEVELS + level``."""
        self.alive = column("I", size)
        """Number of the run's chunks by place that are remembered, in the tier or not, and were not seen again."""
        self._numbers = column("I", size)
        self._next = size + 1
        self._ages = [self._next] * len(AGES)  # per age interval, the first run that is too young for it
        self._due_s = [0.0] * len(AGES)  # per age interval, the earliest time at which that run may enter it

    def open(self, now_s: float, queue: int) -> int:
        """Start a run and return its number."""
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
        """Place of the next run."""
        return self._next % self.size

    def place(self, number: int) -> int:
        """Place of a run; negative if its place was taken over."""
        place = number % self.size
        return place if number and self._numbers[place] == number else -1

    def drop_chunks(self, runs: Sequence[int]) -> None:
        """Subtract chunks that were forgotten or moved to another run; ``runs`` has one run number per chunk."""
        numbers_, alive, size = self._numbers, self.alive, self.size
        for number in runs:
            place = number % size
            if number and numbers_[place] == number and alive[place]:
                alive[place] -= 1

    def advance_ages(self, now_s: float, values: ValueModel) -> None:
        """Report chunks that entered their next age interval to the value model."""
        times, queues, alive, size = self.times, self.queues, self.alive, self.size
        left, end, oldest = STEPS_MAX, self._next, self._next - size
        for interval, due_s in enumerate(self._due_s):
            if due_s > now_s:
                continue
            at, begin_s, enters_s = max(self._ages[interval], oldest), AGES[interval], now_s
            while at < end and left:
                place = at % size
                enters_s = times[place] + begin_s
                if enters_s > now_s:
                    break
                if alive[place]:
                    values.at_risk(queues[place] // LEVELS, interval, alive[place])
                at += 1
                left -= 1
            self._ages[interval] = at
            self._due_s[interval] = enters_s if at < end else now_s + begin_s
