"""Objects that wait for chunks to become readable."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Waiter(Protocol):
    """Object that waits for chunks which are not readable yet."""

    def settled(self, *, readable: bool) -> None:
        """Accept that one chunk became readable, or was dropped and never will be."""


class Waiters:
    """Waiters by slot. O(1) per slot."""

    __slots__ = ("by_slot",)

    def __init__(self) -> None:
        self.by_slot: dict[int, list[Waiter]] = {}

    def add(self, slot: int, waiter: Waiter) -> None:
        """Call ``waiter.settled`` once, when the chunk in the slot becomes readable or is dropped."""
        self.by_slot.setdefault(slot, []).append(waiter)

    def remove(self, slot: int, waiter: Waiter) -> bool:
        """Undo :meth:`add`. Returns whether the waiter was still waiting."""
        waiters = self.by_slot.get(slot, [])
        if waiter not in waiters:
            return False
        waiters.remove(waiter)
        if not waiters:
            del self.by_slot[slot]
        return True

    def has(self, slot: int, waiter: Waiter) -> bool:
        """Whether ``waiter`` waits for the chunk in a slot."""
        return waiter in self.by_slot.get(slot, ())

    def settle(self, slots: Iterable[int], *, readable: bool) -> None:
        """Notify and remove all waiters of these slots."""
        for slot in slots:
            for waiter in self.by_slot.pop(slot, ()):
                waiter.settled(readable=readable)
