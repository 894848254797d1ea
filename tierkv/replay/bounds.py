"""What no policy can be better than, and what none should be worse than."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from tierkv.policies.lru import LruPolicy
from tierkv.replay.replaying import Replayed
from tierkv.replay.trace import TraceRequest
from tierkv.types.keys import Key


class FifoPolicy(LruPolicy):
    """First in, first out: what a tier does that knows nothing."""

    def touch(self, handles: Sequence[int]) -> None:
        """A use changes nothing."""

    def release(self, handles: Sequence[int]) -> None:
        """What was passed over while it was held is as good as new."""
        super().touch(handles)


def clairvoyant(requests: Sequence[TraceRequest], capacity: int) -> Replayed:
    """Belady's choice with bypass: what is used again last does not stay, be it the newcomer.

    It knows the whole trace, so no policy can do it; none that sees one request after the other keeps more chunks until
    their next use.
    """
    asked = [key for request in requests for key in request.keys]  # a lookup begins at the front: so deeper is later
    never = len(asked)
    next_use, later = [never] * never, dict[Key, int]()
    for place in range(never - 1, -1, -1):
        next_use[place] = later.get(asked[place], never)
        later[asked[place]] = place
    resident: dict[Key, int] = {}  # key -> place of its next use
    latest: list[tuple[int, Key]] = []  # the same as a heap, the latest first; with what is out of date
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
