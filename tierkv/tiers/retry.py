"""A few more tries for keys whose failure may pass, never beyond the operation's deadline."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tierkv.types.tier_ops import Outcome, OutcomeKind

TIMED_OUT = Outcome(OutcomeKind.TIMED_OUT)


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """How often, and how soon.

    attempts: tries in all; 1 means no second one.
    base_delay_s: before the second try, at most; doubles with each further one. What is waited is drawn between 0 and
        that ("full jitter"), so that clients of a tier that came back do not return in step.
    delay_s_max: no wait is longer.
    """

    attempts: int = 3
    base_delay_s: float = 0.05
    delay_s_max: float = 2.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.attempts < 1 or self.base_delay_s < 0 or self.delay_s_max < 0:
            raise ValueError(f"attempts must be 1 or more and delays 0 or more, got {self}")


@dataclass(frozen=True, slots=True)
class Timing:
    """Time and chance, handed in so that tests and simulations own them.

    clock: the stack's clock; deadlines are on it.
    sleep: waits between tries on the threads of a blocking backend (on an event loop its own sleep is used).
    rng: source of jitter.
    """

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    rng: random.Random = field(default_factory=random.Random)


class KeyResult(NamedTuple):
    """What one try gave for one key."""

    outcome: Outcome
    retryable: bool = False


class OpResult(NamedTuple):
    """What became of an operation on a tier: an outcome per key, and how many further tries of a key it took."""

    outcomes: list[Outcome]
    retries: int = 0


class Retrier:
    """Runs tries in batches until every key has a lasting answer, tries are used up, or time is.

    Args:
        limits: how often and how soon.
        timing: clock and chance.
        sleep: waits; for blocking backends a coroutine that blocks its thread.
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
    ) -> OpResult:
        """Try the keys 0 to ``count`` - 1.

        Args:
            attempt: given at most ``batch`` indices, returns an answer for each.
            count: how many keys there are.
            batch: the most keys of one try.
            deadline_s: on the clock; no try starts after it. Keys that were never tried are TIMED_OUT.
        """
        outcomes = [TIMED_OUT] * count
        todo: Sequence[int] = range(count)
        retries = 0
        for number in range(1, self._limits.attempts + 1):
            again: list[int] = []
            for indices in _batches(todo, batch):
                if self._clock() >= deadline_s:
                    return OpResult(outcomes, retries)
                retries += len(indices) if number > 1 else 0
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
