"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from tierkv.types.keys import Key


class LruPolicy:
    """Evicts what was not used for the longest time. See :class:`tierkv.abc.EvictionPolicy`; every verb is O(1).

    Evictable keys stand in an ordered dict, oldest first (a plain dict would walk over the gaps of removed keys to
    find its oldest). A held key has no place in the order: it comes back as the most recently used.
    """

    def __init__(self) -> None:
        self._evictable: OrderedDict[Key, None] = OrderedDict()
        self._held: set[Key] = set()

    def add(self, key: Key) -> None:
        """A chunk became resident, as the most recently used. Known keys are left as they are."""
        if key not in self._held:
            self._evictable.setdefault(key)

    def hold(self, key: Key) -> None:
        """Take a key out of the order. Unknown and held keys are left as they are."""
        if key in self._evictable:
            del self._evictable[key]
            self._held.add(key)

    def release(self, key: Key) -> None:
        """Put a held key back, as the most recently used. Keys that are not held are left as they are."""
        if key in self._held:
            self._held.remove(key)
            self._evictable[key] = None

    def touch(self, keys: Iterable[Key]) -> None:
        """Make these the most recently used, the last one most of all."""
        evictable = self._evictable
        for key in keys:
            if key in evictable:
                evictable.move_to_end(key)

    def remove(self, key: Key) -> None:
        """Forget a key."""
        self._evictable.pop(key, None)
        self._held.discard(key)

    def evict(self) -> Key | None:
        """Forget and return the least recently used key that is not held."""
        return self._evictable.popitem(last=False)[0] if self._evictable else None

    def __len__(self) -> int:
        """How many keys are evictable."""
        return len(self._evictable)
