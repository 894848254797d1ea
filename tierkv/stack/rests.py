"""Rests: steps that only decode, in which a stack leaves its tiers alone because nothing waits for them.

A step of requests that generate tokens needs nothing from a tier. What tiers and workers report meanwhile can wait, and
so can the writes of what was stored: taken together every few steps, they cost a fraction of the processor time. Most
of it is code that no earlier line of the step has brought into the processor's caches. For the same reason, chunks that
these requests complete in a rest may be offered together after it.

A rest ends at once when the engine asks about a request, when a store finds no room, when many chunks wait, and when a
tier is attached or detached. It ends by itself after some steps, or some time, whichever is first.
"""

from __future__ import annotations

from collections.abc import Callable, Sized

from tierkv.manager.moves.tier_io import SLOTS_PER_WAITING
from tierkv.metrics.counters import CoreCounters

REST_STEPS_MAX = 7
"""Default number of steps in a row in which tiers are left alone."""

REST_S = 0.25
"""Seconds after which a rest ends in any case. A chunk is offered in one rest and taken in after the next one, so its
write to a tier begins twice that much later at most."""


class Rests:
    """Number of steps that may still be left out. Engine's thread.

    Args:
        nothing_waits: whether neither scheduler nor manager nor dispatch has anything that waits for a tier.
        counters: a refused store ends a rest.
        changes: tiers that are to be attached or detached; each ends a rest.
        filling: slots of chunks that are being stored, or whose store has ended in this rest.
        num_slots: of the host tier.
        clock: seconds, monotonic.
        steps_max: steps in a row that may be left out; 0: none.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what a rest depends on
        self,
        nothing_waits: Callable[[], bool],
        counters: CoreCounters,
        changes: Sized,
        filling: Sized,
        num_slots: int,
        clock: Callable[[], float],
        steps_max: int = REST_STEPS_MAX,
    ) -> None:
        self._nothing_waits = nothing_waits
        self._counters = counters
        self._changes = changes
        self._clock = clock
        self._filling = filling
        self._filling_max = num_slots // SLOTS_PER_WAITING
        self._steps_max = steps_max
        self.left = 0
        """Steps that may still be left out. While it is above 0, reports of stores may wait, too."""
        self._ends_s = 0.0
        self._refused = 0

    def step_ended(self) -> None:
        """Allow a rest after a step that was not left out, if nothing waits."""
        if self._steps_max and len(self._filling) <= self._filling_max and self._nothing_waits():
            self.left = self._steps_max
            self._ends_s = self._clock() + REST_S
            self._refused = self._counters.stores_refused

    def take_step(self) -> bool:
        """Whether this step is left out."""
        if not self.left:
            return False
        full = len(self._filling) > self._filling_max or self._counters.stores_refused != self._refused
        if full or self._changes or self._clock() >= self._ends_s:
            self.left = 0
            return False
        self.left -= 1
        return True
