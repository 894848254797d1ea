"""Population of an arena: its pages are provided in the background after open, before chunks need them.

The first write to memory that has no pages waits for the kernel to find and clear each of them, at a tenth of the speed
of a copy. Until then the first fill of a host tier would be that slow.

Slices are small and each is followed by a pause, so that the engine's own allocations are not held up. It ends early
where the system lacks the call (Linux before 5.14), or memory: pages are then provided by the first write, as ever.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tierkv.memory.arena import HostArena
from tierkv.memory.available import available_bytes

SLICE_BYTES = 8 << 20
"""Bytes that are populated by one call: a few milliseconds, in a fresh virtual machine some tens."""
PAUSE_SHARE = 1.0
"""Pause after each slice, as a multiple of the time that it took."""
SPARE_BYTES = 512 << 20
"""Memory that must remain available on the machine. Population ends before less is left."""
POPULATED_FROM_BYTES = 64 << 20
"""Shortest arena that is populated: a shorter one is filled in a moment."""
_log = logging.getLogger(__name__)


class Population:
    """Runner that populates an arena, for a thread of its own.

    Args:
        arena: its memory.
        sleep: pauses on that thread.
        clock: seconds, for the length of pauses.
        available: returns the bytes that this process may still use, or None where that is unknown.
    """

    def __init__(
        self,
        arena: HostArena,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
        available: Callable[[], int | None] = available_bytes,
    ) -> None:
        self._arena = arena
        self._sleep = sleep
        self._clock = clock
        self._available = available
        self._is_stopped = False
        self._wanted_bytes = arena.num_slots * arena.slot_bytes
        self.populated_bytes = 0
        """Bytes at the beginning of the arena that have pages."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._is_stopped or self.populated_bytes >= self._wanted_bytes

    def stop(self) -> None:
        """End after the present slice. Any thread."""
        self._is_stopped = True

    def run(self) -> None:
        """Populate slice by slice until the end."""
        while not self.done:
            began_s = self._clock()
            self.step()
            if not self.done:
                self._sleep(PAUSE_SHARE * (self._clock() - began_s))

    def step(self) -> bool:
        """Populate one slice; False if there is none left."""
        if self.done:
            return False
        length = min(SLICE_BYTES, self._wanted_bytes - self.populated_bytes)
        available = self._available()
        if available is not None and available < length + SPARE_BYTES:
            self._end(f"{available} bytes of memory are available on this machine")
            return False
        try:
            self._arena.populate(self.populated_bytes, length)
        except (OSError, ValueError) as error:  # no such call in this kernel, no memory; or the arena was closed
            self._end(str(error))
            return False
        self.populated_bytes += length
        return True

    def _end(self, reason: str) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            _log.debug(
                "the arena is populated up to %d of %d bytes (%s): the first writes to the rest are slower",
                self.populated_bytes, self._wanted_bytes, reason,
            )  # fmt: skip


def begin_population(
    arena: HostArena,
    spawn: Callable[[str, Population], object],
    sleep: Callable[[float], None] = time.sleep,
    *,
    wanted: bool = True,
) -> Population:
    """Begin to populate an arena on a thread of its own, unless it is short, or not wanted. Stop it before a close."""
    population = Population(arena, sleep)
    if wanted and arena.num_slots * arena.slot_bytes >= POPULATED_FROM_BYTES:
        try:
            spawn("tierkv-populate", population)
        except RuntimeError:  # no thread available: the first writes are slower, nothing else
            population.stop()
    return population
