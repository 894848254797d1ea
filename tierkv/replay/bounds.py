"""Reference results: an upper bound for every policy, and a simple policy as a lower reference."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from tierkv.policies.lru import LruPolicy
from tierkv.replay.replaying import Replayed
from tierkv.replay.trace import TraceRequest
from tierkv.types.keys import Key


class FifoPolicy:
    """First in, first out: the order of a tier that learns nothing from uses.

    Holds a :class:`~tierkv.policies.lru.LruPolicy` and forwards no use to it.
    """

    def __init__(self, chunks_max: int | None = None) -> None:
        self._order = LruPolicy(chunks_max)
        self.add = self._order.add
        self.remove = self._order.remove
        self.release_after_write = self._order.release_after_write
        self.evict = self._order.evict

    def __len__(self) -> int:
        """Number of known handles."""
        return len(self._order)

    def touch(self, handles: Sequence[int]) -> None:
        """Ignore a use."""

    def release(self, handles: Sequence[int]) -> None:
        """Append chunks that a choice passed over while they were pinned."""
        self._order.touch(handles)


def clairvoyant(requests: Sequence[TraceRequest], capacity: int) -> Replayed:
    """Replay Belady's choice with bypass: evict or refuse the chunk with the latest next use.

    It uses the whole trace, which no policy can. No policy that sees requests in order keeps more chunks until their
    next use.
    """
    asked = [
        key for request in requests for key in request.keys
    ]  # a lookup begins at the front, so deeper chunks are later
    never = len(asked)
    next_use, later = [never] * never, dict[Key, int]()
    for place in range(never - 1, -1, -1):
        next_use[place] = later.get(asked[place], never)
        later[asked[place]] = place
    resident: dict[Key, int] = {}  # key -> place of its next use
    latest: list[tuple[int, Key]] = []  # heap of the same, latest first; may have outdated entries
    end = hits = writes = 0
    for request in requests:
        end += len(request.keys)
        hits += next((i for i, key in enumerate(request.keys) if key not in resident), len(request.keys))
        for back, key in enumerate(reversed(request.keys), 1):
            use = next_use[end - back]
            is_here = resident.pop(key, None) is not None
            if use == never:
                continue
            if len(resident) >= capacity:
                while resident.get(latest[0][1]) != -latest[0][0]:
                    heapq.heappop(latest)
                if -latest[0][0] < use:
                    continue
                del resident[heapq.heappop(latest)[1]]
            resident[key] = use
            heapq.heappush(latest, (-use, key))
            writes += not is_here
    return Replayed(never, hits, writes)
