"""Chunks that loads are bringing to the GPU, and the latest progress of these loads. Sans-IO.

A request that wants such a chunk waits for the load (S49): the engine will find the chunk in its own cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.manager.step_budget import KEYS_PER_LOOK, BudgetShare
from tierkv.types.geometry import cdiv
from tierkv.types.keys import Key


@dataclass(slots=True)
class _Change:
    """Load whose keys are entered, or removed. done: number of those for which that is done."""

    owner: str
    keys: Sequence[Key]
    enters: bool
    done: int = 0


class LoadsInFlight:
    """Keys of loads by request. O(1) per key, and without a step of the interpreter for each.

    A load may have any number of keys, so they are entered and removed a part at a time, in the order of the calls. A
    load that has ended counts no more from that call on. Of one that begins, the front counts at once: a request that
    wants its other keys wants the front, too, or finds it in the engine's own cache.

    Args:
        share: key operations of the step.
        active: whether the engine shares computed blocks. Otherwise no request waits for another's load (S51).
    """

    def __init__(self, share: BudgetShare, *, active: bool) -> None:
        self._share = share
        self._active = active
        self._owners: dict[Key, str] = {}
        self._earlier: dict[Key, list[str]] = {}  # more owners of keys that several loads bring
        self._moved_s: dict[str, float] = {}  # of the loads that have not ended
        self.waiting: deque[_Change] = deque()
        """Changes that :meth:`begin_step` has not made, or not for all keys."""

    def __len__(self) -> int:
        """Number of keys that are being loaded, or are not removed yet."""
        return len(self._owners)

    def started(self, owner: str, keys: Sequence[Key], now_s: float) -> None:
        """Add the load of a request."""
        if self._active:
            self._moved_s[owner] = now_s
            change = _Change(owner, keys, enters=True)
            if not self._make(change):  # the front at once, whatever waits
                self.waiting.append(change)

    def moved(self, owner: str, now_s: float) -> None:
        """Note progress of a load."""
        if owner in self._moved_s:
            self._moved_s[owner] = now_s

    def ended(self, owner: str, keys: Sequence[Key]) -> None:
        """Remove the load of a request. A reset may have removed it already."""
        if self._moved_s.pop(owner, None) is not None:
            self.waiting.append(_Change(owner, keys, enters=False))
            self.begin_step()

    def begin_step(self) -> None:
        """Make changes, the oldest first, as far as the budget allows."""
        while self.waiting and self._share.left > 0:
            if self._make(self.waiting[0]):
                self.waiting.popleft()

    def _make(self, change: _Change) -> bool:
        """Make a part of a change. Returns whether that was the last one."""
        part = change.keys[change.done : change.done + KEYS_PER_LOOK * max(1, self._share.left)]
        (self._enter if change.enters else self._remove)(change.owner, part)
        self._share.take(cdiv(len(part), KEYS_PER_LOOK))
        change.done += len(part)
        return change.done == len(change.keys)

    def _enter(self, owner: str, keys: Sequence[Key]) -> None:
        owners = self._owners
        if not owners.keys().isdisjoint(keys):
            for key in owners.keys() & keys:
                self._earlier.setdefault(key, []).append(owners[key])
        owners.update(dict.fromkeys(keys, owner))

    def _remove(self, owner: str, keys: Sequence[Key]) -> None:
        if self._earlier and not self._earlier.keys().isdisjoint(keys):
            for key in self._earlier.keys() & keys:
                self._leave(key, owner)
            keys = [key for key in keys if self._owners.get(key) == owner]
        deque(map(self._owners.pop, keys), maxlen=0)

    def _leave(self, key: Key, owner: str) -> None:
        """Remove one of several owners of a key."""
        owners = [*self._earlier.pop(key), self._owners[key]]
        owners.remove(owner)
        self._owners[key] = owners.pop()
        if owners:
            self._earlier[key] = owners

    def has_any(self, wanted: tuple[Key, ...]) -> bool:
        """Whether any of these chunks is being loaded."""
        if not self._moved_s or self._owners.keys().isdisjoint(wanted):
            return False
        return not self.waiting or self.moved_s(wanted) is not None

    def moved_s(self, wanted: tuple[Key, ...]) -> float | None:
        """Time of the latest progress of the load that brings the first of these chunks; None if none does."""
        moved_s = self._moved_s
        for key in wanted if moved_s else ():
            owner = self._owners.get(key)
            if owner is not None and (
                times := [moved_s[one] for one in (owner, *self._earlier.get(key, ())) if one in moved_s]
            ):
                return max(times)
        return None

    def clear(self) -> None:
        """Forget all loads after a reset: what they bring is outdated."""
        self._owners.clear()
        self._earlier.clear()
        self._moved_s.clear()
        self.waiting.clear()
