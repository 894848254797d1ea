"""Bounded retries for keys whose failure may pass, never beyond the deadline of the operation."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tierkv.types.tier_ops import Outcome, OutcomeKind

TIMED_OUT = Outcome(OutcomeKind.TIMED_OUT)
NOT_TRIED = Outcome(OutcomeKind.TIMED_OUT, error="the deadline passed before it was tried")
"""Outcome of a key that no call to the backend included."""


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """Number of tries per key, and delays between them.

    The delay before a try is drawn between 0 and its limit ("full jitter"). So the clients of a recovered tier do not
    return in step.

    Raises:
        ValueError: a value is out of range.
    """

    attempts: int = 3
    """Tries in all; 1 means no retry."""
    base_delay_s: float = 0.05
    """Limit of the delay before the second try. It doubles with each further try."""
    delay_s_max: float = 2.0
    """Upper bound of the limit."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.attempts < 1 or self.base_delay_s < 0 or self.delay_s_max < 0:
            raise ValueError(f"attempts must be 1 or more and delays 0 or more, got {self}")


@dataclass(frozen=True, slots=True)
class Timing:
    """Time and randomness of a tier, injected so that tests and simulations control them."""

    clock: Callable[[], float] = time.monotonic
    """The stack's clock; deadlines are on it."""
    sleep: Callable[[float], None] = time.sleep
    """Waits between tries on the thread of a blocking backend. On an event loop ``asyncio.sleep`` is used."""
    rng: random.Random = field(default_factory=random.Random)
    """Source of jitter."""


class KeyResult(NamedTuple):
    """Result of one try for one key."""

    outcome: Outcome
    retryable: bool = False
    """Whether another try may succeed."""


class OpResult(NamedTuple):
    """Result of one operation on a tier."""

    outcomes: list[Outcome]
    """One per key, in order."""
    retries: int = 0
    """Tries of a key after its first one, over all keys."""


class Retrier:
    """Tries keys in batches until each has a final result, the tries are used up, or the deadline has passed.

    Args:
        limits: number of tries and delays.
        timing: clock and randomness.
        sleep: waits between tries. For a blocking backend, a coroutine function that blocks its thread.
    """

    def __init__(self, limits: RetryLimits, timing: Timing, sleep: Callable[[float], Awaitable[None]]) -> None:
        self._limits = limits
        self._clock = timing.clock
        self._rng = timing.rng
        self._sleep = sleep

    async def run(
        self,
        attempt: Callable[[Sequence[int]], Awaitable[Sequence[KeyResult]]],
        count: int,
        batch: int,
        deadline_s: float,
        outcomes: list[Outcome] | None = None,
    ) -> OpResult:
        """Try the keys 0 to ``count`` - 1.

        Args:
            attempt: takes up to ``batch`` indices and returns a result for each.
            count: number of keys.
            batch: maximum number of keys per try.
            deadline_s: time on the clock after which no try starts. Keys that were never tried are NOT_TRIED.
            outcomes: list of ``count`` times NOT_TRIED that receives each outcome as soon as it is known, for another
                thread to read.
        """
        outcomes = [NOT_TRIED] * count if outcomes is None else outcomes
        todo: Sequence[int] = range(count)
        retries = 0
        for number in range(1, self._limits.attempts + 1):
            again: list[int] = []
            for indices in _batches(todo, batch):
                if self._clock() >= deadline_s:
                    return OpResult(outcomes, retries)
                retries += len(indices) if number > 1 else 0
                for index in indices:
                    outcomes[index] = TIMED_OUT
                for index, answer in zip(indices, await attempt(indices), strict=True):
                    outcomes[index] = answer.outcome
                    if answer.retryable:
                        again.append(index)
            todo = again
            if not todo or number == self._limits.attempts:
                break
            delay_s = self._delay_s(number)
            if self._clock() + delay_s >= deadline_s:
                break
            await self._sleep(delay_s)
        return OpResult(outcomes, retries)

    def _delay_s(self, number: int) -> float:
        limit = min(self._limits.delay_s_max, self._limits.base_delay_s * 2.0 ** (number - 1))
        return self._rng.uniform(0.0, limit)


def _batches(indices: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    for start in range(0, len(indices), size):
        yield indices[start : start + size]
