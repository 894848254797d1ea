"""Chunks that loads are bringing to the GPU, and the latest progress of these loads. Sans-IO.

A request that wants such a chunk waits for the load (S49): the engine will find the chunk in its own cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tierkv.types.keys import Key


class LoadsInFlight:
    """Keys of loads by request. O(1) per key, and without a step of the interpreter for each.

    Args:
        active: whether the engine shares computed blocks. Otherwise no request waits for another's load (S51).
    """

    def __init__(self, *, active: bool) -> None:
        self._active = active
        self._owners: dict[Key, str] = {}
        self._earlier: dict[Key, list[str]] = {}  # more owners of keys that several loads bring
        self._moved_s: dict[str, float] = {}

    def __len__(self) -> int:
        """Number of keys that are being loaded."""
        return len(self._owners)

    def started(self, owner: str, keys: Sequence[Key], now_s: float) -> None:
        """Add the load of a request."""
        if not self._active:
            return
        self._moved_s[owner] = now_s
        owners = self._owners
        if not owners.keys().isdisjoint(keys):
            for key in owners.keys() & keys:
                self._earlier.setdefault(key, []).append(owners[key])
        owners.update(dict.fromkeys(keys, owner))

    def moved(self, owner: str, now_s: float) -> None:
        """Note progress of a load."""
        if owner in self._moved_s:
            self._moved_s[owner] = now_s

    def ended(self, owner: str, keys: Sequence[Key]) -> None:
        """Remove the load of a request. A reset may have removed it already."""
        if self._moved_s.pop(owner, None) is None:
            return
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
        return bool(self._owners) and not self._owners.keys().isdisjoint(wanted)

    def moved_s(self, wanted: tuple[Key, ...]) -> float | None:
        """Time of the latest progress of the load that brings the first of these chunks; None if none does."""
        for key in wanted if self._owners else ():
            owner = self._owners.get(key)
            if owner is not None:
                return max(self._moved_s.get(one, 0.0) for one in (owner, *self._earlier.get(key, ())))
        return None

    def clear(self) -> None:
        """Forget all loads after a reset: what they bring is outdated."""
        self._owners.clear()
        self._earlier.clear()
        self._moved_s.clear()
