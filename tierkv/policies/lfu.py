"""Policy ``lfu``: evict the least frequently used chunks, where old uses count less."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tierkv.structures.rings import PASSED_OVER_MAX, Rings, longer, longer_bytes, numbers
from tierkv.types.keys import Key

COUNT_MAX = 15
"""Largest count of uses. Four halvings reduce it to 0."""

AGING_USES_PER_CHUNK = 2
"""Uses per chunk of room after which all counts are halved."""


class LfuPolicy:
    """Eviction policy of frequency. Among equal counts, the least recently used chunk is evicted first.

    One ring of handles per count. To halve all counts, every two rings are joined into one, and no count is written.
    Each count is stored with the number of halvings at that time, and is shifted by the halvings since then.
    """

    def __init__(self, chunks_max: int | None = None) -> None:
        self._rings = Rings(COUNT_MAX + 1, chunks_max)
        self._counts = bytearray(self._rings.length)
        self._counted_at = numbers(self._rings.length)
        self._halvings = 0
        self._uses = 0  # uses since the last halving
        self._room = chunks_max or 0
        self._known = 0

    def __len__(self) -> int:
        """Number of known handles, pinned or not."""
        return self._known

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:  # noqa: ARG002 - frequency needs no keys
        """Add handles with a count of 0. The request that stored them will be the first use."""
        if self._rings.make_room(handles):
            longer_bytes(self._counts, self._rings.length)
            self._counted_at = longer(self._counted_at, self._rings.length)
        for handle in handles:
            self._counts[handle] = 0
        self._rings.append(0, handles)
        self._known += len(handles)
        self._room = max(self._room, self._known)

    def touch(self, handles: Sequence[int]) -> None:
        """Count one more use per handle."""
        counts, counted_at, halvings = self._counts, self._counted_at, self._halvings
        rings: defaultdict[int, list[int]] = defaultdict(list)
        for handle in handles:
            count = (counts[handle] >> (halvings - counted_at[handle])) + 1
            if count > COUNT_MAX:  # noqa: PLR1730 - min() takes as long as the rest of the loop
                count = COUNT_MAX
            counts[handle] = count
            counted_at[handle] = halvings
            rings[count].append(handle)
        for count, used in rings.items():
            self._rings.move(count, used)
        self._uses += len(handles)
        if self._uses > AGING_USES_PER_CHUNK * self._room:
            self._age()

    def _age(self) -> None:
        """Halve every count."""
        for count in range(1, COUNT_MAX + 1):
            self._rings.join(count // 2, count)
        self._halvings += 1
        self._uses = 0

    def release(self, handles: Sequence[int]) -> None:
        """Make the handles the most recently used of their count."""
        halvings = self._halvings
        for handle in handles:
            count = self._counts[handle] >> (halvings - self._counted_at[handle])
            self._rings.move(count, (handle,))

    def release_after_write(self, handles: Sequence[int]) -> None:
        """Move handles that were passed over to the front of the ring of their count."""
        for handle in reversed(handles):
            if self._rings.is_aside(handle):
                count = self._counts[handle] >> (self._halvings - self._counted_at[handle])
                self._rings.prepend(count, handle)

    def remove(self, handles: Sequence[int]) -> None:
        """Forget the handles."""
        self._rings.unlink(handles)
        self._known -= len(handles)

    def evict(self, count: int, pins: Sequence[int]) -> list[int]:
        """Forget and return unpinned handles with the lowest counts, least recently used first."""
        victims: list[int] = []
        self._rings.passed_over = 0
        for ring in range(COUNT_MAX + 1):
            for handle in self._rings.unpinned(ring, pins):
                victims.append(handle)
                if len(victims) == count:
                    self._rings.unlink(victims)
                    self._known -= count
                    return victims
            if self._rings.passed_over >= PASSED_OVER_MAX:
                break
        return []
