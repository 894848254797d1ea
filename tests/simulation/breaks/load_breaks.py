"""Promises about load broken on purpose: deadlines, turns, the account of slots, probes, repeated hashes.

Importing this module adds them to :data:`~simulation.breaks.core_breaks.BREAKS`.
"""

from __future__ import annotations

from typing import Any

import pytest

from simulation.breaks.core_breaks import BREAKS, Break, breaks
from tierkv.manager.lower.probe_queue import ProbeQueue
from tierkv.manager.moves.write_through import Cascades
from tierkv.manager.passages.slot_account import SlotAccount, SlotUse
from tierkv.scheduler.lookup.lookups import Lookups
from tierkv.scheduler.requests.request_state import RequestState

Patch = pytest.MonkeyPatch

PASSAGES = "tierkv.manager.passages"

__all__ = ["BREAKS", "Break"]

# -- deadlines -------------------------------------------------------------------------------------------------------


@breaks("silent", 10)
def a_deadline_counts_silence(patch: Patch) -> None:
    """The time in which nothing is outstanding counts, so a silent or full engine makes requests late."""
    moves: dict[tuple[int, str], tuple[object, float]] = {}

    def is_late(self: Any, owner: str, deadline_s: float) -> bool:
        passage, now_s = self.get(owner), self._step.now
        if passage is None or passage.ready:
            return False
        state = (passage.order, passage.num_granted, passage.outstanding)
        before, since_s = moves.get((id(self), owner), (None, now_s))
        moves[id(self), owner] = state, since_s if state == before else now_s
        return bool(state == before and now_s - since_s >= deadline_s)

    patch.setattr(f"{PASSAGES}.passages.Passages.is_late", is_late)


@breaks("overload", 10)
def a_deadline_counts_a_queue_that_moves(patch: Patch) -> None:
    """Only the beginning of a passage counts as its progress."""
    begun: dict[tuple[int, int], float] = {}

    def is_late(self: Any, owner: str, deadline_s: float) -> bool:
        passage = self.get(owner)
        if passage is None or passage.ready:
            return False
        return bool(self._step.now - begun.setdefault((id(self), passage.order), self._step.now) >= deadline_s)

    patch.setattr(f"{PASSAGES}.passages.Passages.is_late", is_late)


@breaks("silent", 10)
def a_lapse_keeps_the_time(patch: Patch) -> None:
    """A lookup that the engine has not repeated for the deadline is late when it is asked again."""
    late = f"{Lookups.__module__}.Lookups._is_late"
    first_asked: dict[tuple[int, str], float] = {}

    def is_late(self: Any, record: Any) -> bool:
        since_s = first_asked.setdefault((id(self), record.ctx.request_id), self.now_s)
        waits = record.state in (RequestState.ASKING, RequestState.GATHERING)
        return waits and self.now_s - since_s >= self._deadline_s

    patch.setattr(late, is_late)


# -- slots -----------------------------------------------------------------------------------------------------------


@breaks("overload", 10)
def what_is_copied_is_not_on_the_account(patch: Patch) -> None:
    released = SlotAccount.released

    def release_others(self: SlotAccount, count: int, use: SlotUse) -> None:
        if use is not SlotUse.COPIED:
            released(self, count, use)

    patch.setattr(SlotAccount, "sent", lambda self, chunks, *, unreserved: None)
    patch.setattr(SlotAccount, "released", release_others)


# -- hashes ----------------------------------------------------------------------------------------------------------


@breaks("overload", 10)
def repeated_hashes_are_accepted(patch: Patch) -> None:
    """The scheduler accepts a request whose hashes repeat."""
    patch.setattr("tierkv.scheduler.scheduler.check_hashes", lambda record: None)


# -- probes ----------------------------------------------------------------------------------------------------------


@breaks("probes", 30)
def all_that_waits_is_one_probe(patch: Patch) -> None:
    """One probe of all chunks that wait: its deadline passes before the tier has looked at each of them."""

    def take(self: ProbeQueue, keys_max: int) -> list[tuple[Any, ...]]:
        if self._in_flight or not self._waiting:
            return []
        keys = tuple(self._waiting)
        self._waiting.clear()
        self._asked.update(keys)
        self._in_flight += 1
        return [keys]

    patch.setattr(ProbeQueue, "take", take)


# -- writes ----------------------------------------------------------------------------------------------------------


@breaks("silent", 20)
def a_shared_tier_is_not_asked_before_a_write(patch: Patch) -> None:
    """Its chunks are written again once its answers about them have expired."""
    patch.setattr(Cascades, "ask_first", lambda self, tier, chunks, now, *, stored=False: [])
