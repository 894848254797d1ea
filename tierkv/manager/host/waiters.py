"""Objects that wait for chunks to become readable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol


class Waiter(Protocol):
    """Object that waits for chunks which are not readable yet."""

    def settled(self, count: int, *, readable: bool) -> None:
        """Accept that ``count`` chunks became readable, or were dropped and never will be."""


class _ReadAhead:
    """Waits for what is read before a request asks for it."""

    def settled(self, count: int, *, readable: bool) -> None:
        """Do nothing."""


READ_AHEAD: Waiter = _ReadAhead()
"""Waiter for chunks that are read although no request holds them: they stay wanted until they are read."""


class Waiters:
    """Waiters by slot. O(1) per slot. Each chunk that is being read has one, unless it was given up."""

    __slots__ = ("by_slot",)

    def __init__(self) -> None:
        self.by_slot: dict[int, tuple[Waiter, ...]] = {}

    def add(self, slots: Collection[int], waiter: Waiter) -> None:
        """Count each of these chunks for ``waiter.settled``, once, when it becomes readable or is dropped."""
        by_slot, alone = self.by_slot, (waiter,)
        if by_slot.keys().isdisjoint(slots):
            by_slot.update(dict.fromkeys(slots, alone))
            return
        for slot in slots:
            by_slot[slot] = by_slot[slot] + alone if slot in by_slot else alone

    def remove(self, slots: Iterable[int], waiter: Waiter) -> int:
        """Undo :meth:`add` for some slots. Returns the number of those for which the waiter was still waiting."""
        by_slot, alone, removed = self.by_slot, (waiter,), 0
        for slot in slots:
            if slot not in by_slot or waiter not in (waiters := by_slot[slot]):
                continue
            removed += 1
            if waiters == alone:
                del by_slot[slot]
            else:
                at = waiters.index(waiter)
                by_slot[slot] = waiters[:at] + waiters[at + 1 :]
        return removed

    def has_any(self, slots: Sequence[int]) -> bool:
        """Whether anything waits for one of these chunks. Any thread."""
        return not self.by_slot.keys().isdisjoint(slots)

    def has(self, slot: int, waiter: Waiter) -> bool:
        """Whether ``waiter`` waits for the chunk in a slot."""
        return waiter in self.by_slot.get(slot, ())

    def settle(self, slots: Iterable[int], *, readable: bool) -> None:
        """Notify and remove all waiters of these slots."""
        by_slot = self.by_slot
        for waiters, count in Counter([by_slot.pop(slot) for slot in slots if slot in by_slot]).items():
            for waiter in waiters:
                waiter.settled(count, readable=readable)
