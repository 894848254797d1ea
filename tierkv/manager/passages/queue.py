"""Passages that wait for slots, the oldest first."""

from __future__ import annotations

from heapq import heappop, heappush

from tierkv.manager.passages.passage import Passage
from tierkv.metrics.watched import WaitingRequests


class PassageQueue:
    """Incomplete passages by order. O(log n) per change; the head in O(1), amortised."""

    def __init__(self) -> None:
        self._waiting: dict[int, Passage] = {}
        self._orders: list[int] = []  # a heap; each order once
        self._queued: set[int] = set()  # the orders in it
        self._turn = 0  # order of the latest head

    def __len__(self) -> int:
        """Number of passages that wait, with those of lookups that are to be repeated."""
        return len(self._waiting)

    def __contains__(self, passage: Passage) -> bool:
        """Whether a passage waits."""
        return passage.order in self._waiting

    @property
    def head(self) -> Passage | None:
        """The oldest passage that waits; None if none does."""
        orders, waiting = self._orders, self._waiting
        while orders:
            passage = waiting.get(orders[0])
            if passage is not None and passage.waits_for_slots:
                return passage
            order = heappop(orders)
            self._queued.discard(order)
            waiting.pop(order, None)
        return None

    def peek(self) -> Passage | None:
        """The head, as any thread may see it: None also just after it has left."""
        return next((self._waiting.get(order) for order in self._orders[:1]), None)

    def starts_turn(self, passage: Passage) -> bool:
        """Whether a passage is the head now, and another one was at the latest call."""
        starts = self.head is passage and passage.order != self._turn
        if starts:
            self._turn = passage.order
        return starts

    def update(self, passage: Passage) -> None:
        """Add or remove a passage, as it waits for slots or does not."""
        if not passage.waits_for_slots:
            self._waiting.pop(passage.order, None)
        elif passage.order not in self._waiting:
            self._waiting[passage.order] = passage
            if passage.order not in self._queued:
                self._queued.add(passage.order)
                heappush(self._orders, passage.order)

    def remove(self, passage: Passage) -> None:
        """Remove a passage, whether it waits or not."""
        self._waiting.pop(passage.order, None)


def waiting_in(held: PassageQueue, copied: PassageQueue, now_s: float) -> WaitingRequests:
    """Requests that wait, by what the oldest of them waits for: the others are behind it. O(1). Any thread."""
    first, stream = held.peek(), copied.peek()
    age_s = max([0.0, *[now_s - head.moved_s for head in (first, stream) if head is not None]])
    behind_reads = len(held) if first is not None and first.is_held_back else 0
    return WaitingRequests(len(held) + len(copied) - behind_reads, behind_reads, age_s)
