"""Releases of host slots that passages held or jobs copied from, a bounded number per step. Sans-IO."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import cast

from tierkv.manager.host.dropping import SLOTS_PER_KEY
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.passages.passage import Passage
from tierkv.manager.passages.slot_account import SlotAccount, SlotUse
from tierkv.manager.step_budget import BudgetShare
from tierkv.types.geometry import cdiv
from tierkv.types.transfers import SlotRef

Slots = list[int] | list[SlotRef]
"""Slots to release: by their numbers, or leases on them."""


class SlotReleases:
    """Slots that are released now, as far as the step's budget allows, and in later steps. O(1) per slot.

    Args:
        host: the host tier.
        account: counts the slots until they are released.
        share: key operations of the step.
    """

    def __init__(self, host: HostTier, account: SlotAccount, share: BudgetShare) -> None:
        self._host = host
        self._account = account
        self._share = share
        self._waiting: deque[tuple[SlotUse, Slots]] = deque()
        self._ended: deque[Passage] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether no slot waits for its release."""
        return not (self._waiting or self._ended)

    def waiting(self) -> Iterator[tuple[SlotUse, list[int]]]:
        """Iterate over the slots that later steps release, with their use. O(slots)."""
        for use, slots in self._waiting:
            yield use, self._slots_of(slots, use)
        for passage in self._ended:
            yield passage.slot_use, passage.held_tail_first()

    def release(self, slots: Slots, use: SlotUse) -> None:
        """Release slots in this order, for which the list is used up. use: of all of them; leases of those COPIED."""
        if not self._waiting:
            self._host.unpin(self._take(slots, use))
        if slots:
            self._waiting.append((use, slots))

    def release_later(self, passages: Iterable[Passage]) -> None:
        """Release the slots of passages that have ended, in later steps, however many there are."""
        self._ended.extend(passages)

    def begin_step(self) -> None:
        """Release what earlier steps left, in one batch: a passage may hold only a few slots."""
        if self._waiting or self._ended:
            self._host.unpin(self._take_waiting())

    def _take_waiting(self) -> list[int]:
        """Take slots of as many passages as the budget allows, in order."""
        taken: list[int] = []
        while True:
            while self._waiting:
                use, slots = self._waiting[0]
                taken += self._take(slots, use)
                if slots:
                    return taken
                self._waiting.popleft()
            if not self._ended or not self._share.take(1):
                return taken
            passage = self._ended.popleft()
            self._waiting.append((passage.slot_use, passage.held_tail_first()))

    def _take(self, slots: Slots, use: SlotUse) -> list[int]:
        """Remove slots from the front of a list, as many as the budget allows; they do not count any more."""
        count = min(len(slots), SLOTS_PER_KEY * self._share.take(cdiv(len(slots), SLOTS_PER_KEY)))
        taken = self._slots_of(slots[:count], use)
        del slots[:count]
        self._account.released(len(taken), use)
        return taken

    def _slots_of(self, slots: Slots, use: SlotUse) -> list[int]:
        """The slots by their numbers. A load may have any number of leases, so a step looks at a part of them only."""
        if use is SlotUse.COPIED:
            return self._host.slots.leased(cast("list[SlotRef]", slots))
        return cast("list[int]", slots)
