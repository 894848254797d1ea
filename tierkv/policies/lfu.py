"""Policy ``lfu``: evict the least frequently used chunks, where old uses count less."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

from tierkv.structures.columns import column, longer, longer_bytes
from tierkv.structures.rings import PASSED_OVER_MAX, Rings
from tierkv.types.keys import Key

COUNT_MAX = 15
"""Largest count of uses. Four halvings reduce it to 0."""

_OWN_USE = 1
"""Number of uses by the request that stores a chunk. They say nothing about other requests."""

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
        self._counted_at = column("I", self._rings.length)
        self._halvings = 0
        self._uses = 0  # uses since the last halving
        self._room = chunks_max or 0
        self._known = 0

    def __len__(self) -> int:
        """Number of known handles, pinned or not."""
        return self._known

    def add(self, handles: Sequence[int], keys: Sequence[Key]) -> None:  # noqa: ARG002 - frequency needs no keys
        """Add handles with a count of 0. The request that stored them will be the first use."""
        self._begin(handles)
        self._rings.append(0, handles)

    def add_behind(self, handles: Sequence[int], keys: Sequence[Key], behind: int) -> None:  # noqa: ARG002 - as add
        """Add handles that are less recently used than ``behind``. Behind a used chunk they count as used once."""
        self._begin(handles)
        known = self._count_of(behind)
        count = min(known, _OWN_USE)
        for handle in handles if count else ():
            self._counts[handle], self._counted_at[handle] = count, self._halvings
        if known > count or self._rings.is_aside(behind):
            self._rings.append(count, handles)
        else:
            self._rings.insert(handles, behind)

    def _begin(self, handles: Sequence[int]) -> None:
        if self._rings.make_room(handles):
            longer_bytes(self._counts, self._rings.length)
            self._counted_at = longer(self._counted_at, self._rings.length)
        for handle in handles:
            self._counts[handle] = 0
        self._known += len(handles)
        self._room = max(self._room, self._known)

    def _count_of(self, handle: int) -> int:
        return self._counts[handle] >> (self._halvings - self._counted_at[handle])

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
        for handle in handles:
            self._rings.move(self._count_of(handle), (handle,))

    def release_after_write(self, handles: Sequence[int]) -> None:
        """Move handles that were passed over to the front of the ring of their count."""
        for handle in reversed(handles):
            if self._rings.is_aside(handle):
                self._rings.prepend(self._count_of(handle), handle)

    def remove(self, handles: Sequence[int]) -> None:
        """Forget the handles."""
        self._rings.unlink(handles)
        self._known -= len(handles)

    def evict(self, count: int, pins: Sequence[int]) -> list[int]:
        """Forget and return unpinned handles with the lowest counts, least recently used first."""
        return self._evict(count, count, pins, -1)

    def evict_before(self, count: int, pins: Sequence[int], stop: int) -> list[int]:
        """Forget and return up to ``count`` unpinned handles that are evicted before ``stop``.

        If ``stop`` has no use yet, handles with one use, most of them of ended requests, come before it.
        """
        return self._evict(count, 1, pins, stop)

    def _evict(self, count: int, least: int, pins: Sequence[int], stop: int) -> list[int]:
        victims: list[int] = []
        rings = self._rings
        rings.passed_over = 0
        uses = COUNT_MAX if stop < 0 else self._count_of(stop)
        for ring in range(max(uses, _OWN_USE) + 1):
            victims += islice(rings.unpinned(ring, pins, stop), count - len(victims))
            if ring == uses == 0:  # the request that stored `stop` still runs, and its own use is to come
                rings.passed_over = 0
            if len(victims) == count or rings.passed_over >= PASSED_OVER_MAX:
                break
        if len(victims) < least:
            return []
        rings.unlink(victims)
        self._known -= len(victims)
        return victims
