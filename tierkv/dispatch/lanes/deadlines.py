"""Deadlines of the tickets in flight."""

from __future__ import annotations

import heapq
import itertools

from tierkv.dispatch.lanes.ticket import Ticket
from tierkv.types.tier_ops import Verb

_AWAITED = (Verb.READ, Verb.PROBE)
_SPARE = 64


class Deadlines:
    """Heap of tickets by deadline. Engine's thread; amortised O(log n) per ticket.

    Ended tickets are removed lazily: when their deadline passes, or when they fill half of the heap. So its length is
    at most twice the number of tickets in flight plus 64.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Ticket]] = []
        self._sequence = itertools.count()

    def add_ticket(self, ticket: Ticket, in_flight: int) -> None:
        """Add a ticket. in_flight: number of tickets that have not ended, this one included."""
        if len(self._heap) >= 2 * in_flight + _SPARE:
            self._heap = [entry for entry in self._heap if not entry[2].ended]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (ticket.deadline_s, next(self._sequence), ticket))

    def hasten(self, tier: int, now_s: float) -> None:
        """Let the deadlines of a tier's reads and probes pass now: requests wait for these. O(n)."""
        self._heap = [
            (now_s if ticket.op.tier == tier and ticket.op.verb in _AWAITED else due_s, number, ticket)
            for due_s, number, ticket in self._heap
        ]
        heapq.heapify(self._heap)

    def take_overdue(self, now_s: float) -> Ticket | None:
        """Remove and return the ticket of the oldest deadline that passed before its I/O ended; None if none did."""
        while self._heap and self._heap[0][0] <= now_s:
            ticket = heapq.heappop(self._heap)[2]
            if not ticket.ended and ticket.result is None:
                return ticket
        return None

    def postpone(self, ticket: Ticket, until_s: float) -> None:
        """Give a ticket that was taken out as overdue another deadline."""
        heapq.heappush(self._heap, (until_s, next(self._sequence), ticket))

    def unreported(self) -> list[Ticket]:
        """Tickets that have neither ended nor missed their deadline, by deadline. O(n log n); for shutdown."""
        return [ticket for _, _, ticket in sorted(self._heap) if not ticket.ended]

    def tickets_of(self, tier: int) -> list[Ticket]:
        """Tickets of one tier that have neither ended nor missed their deadline, in no order. O(n)."""
        return [ticket for _, _, ticket in self._heap if ticket.op.tier == tier and not ticket.ended]

    def __len__(self) -> int:
        """Length of the heap."""
        return len(self._heap)
