"""Pins: single readable chunks that are held for a request ahead of its passage. Sans-IO."""

from __future__ import annotations

from collections.abc import Container, Mapping

from tierkv.manager.host.chunk_state import ChunkState
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.passages.releases import SlotReleases
from tierkv.manager.passages.slot_account import SlotAccount, SlotUse
from tierkv.types.keys import Key


class Pins:
    """Pins by owner, for an owner whose lookup proceeds chunk by chunk. O(1) per chunk.

    Such an owner must remove its pins before it reserves, because an older owner may need the slots.
    """

    def __init__(self, host: HostTier, account: SlotAccount, releases: SlotReleases) -> None:
        self._host = host
        self._account = account
        self._releases = releases
        self._by_owner: dict[str, dict[Key, int]] = {}

    def __len__(self) -> int:
        """Number of pins. O(owners)."""
        return sum(map(len, self._by_owner.values()))

    def __bool__(self) -> bool:
        """Whether there is any pin."""
        return bool(self._by_owner)

    @property
    def owners(self) -> list[str]:
        """Owners that have pins."""
        return list(self._by_owner)

    def add(self, owner: str, key: Key) -> bool:
        """Hold one chunk for the owner, if it is readable and the account allows. Idempotent.

        Returns:
            Whether the owner holds it now.
        """
        pins = self._by_owner.get(owner)
        if pins is not None and key in pins:
            return True
        slot = self._host.slots.find(key) if self._account.hold_room() > 0 else None
        if slot is None or self._host.slots.state(slot) is not ChunkState.READY:
            return False
        self._host.pin((slot,))
        self._account.held += 1
        if pins is None:
            pins = self._by_owner[owner] = {}
        pins[key] = slot
        return True

    def remove(self, owner: str, keep: Container[Key] = ()) -> None:
        """Release the owner's pins except those in ``keep``; the last one added is released first (S54)."""
        pins = self._by_owner.get(owner)
        if pins is None:
            return
        gone = [key for key in reversed(pins) if key not in keep]
        self._releases.release([pins.pop(key) for key in gone], SlotUse.HELD)
        if not pins:
            del self._by_owner[owner]

    def of(self, owner: str) -> Mapping[Key, int]:
        """Slot of each of the owner's pins."""
        return self._by_owner.get(owner, {})
