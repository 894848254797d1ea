"""Pins: single readable chunks that are held for a request ahead of its passage. Sans-IO."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

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
        by_owner = self._by_owner
        if owner in by_owner and key in by_owner[owner]:
            return True
        slot = self._host.pin_readable(key) if self._account.hold_room() > 0 else None
        if slot is None:
            return False
        self._account.held += 1
        if owner not in by_owner:
            by_owner[owner] = {}
        by_owner[owner][key] = slot
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

    def are(self, owner: str, keys: Sequence[Key]) -> bool:
        """Whether the owner has pins on these chunks, and on no others."""
        pins = self._by_owner.get(owner)
        return pins is not None and len(keys) == len(pins) and pins.keys() == set(keys)

    def hand_over(self, owner: str, keys: Sequence[Key]) -> list[int]:
        """End all pins of the owner, which are on ``keys``, without a release. Returns their slots: they stay held."""
        pins = self._by_owner.pop(owner)
        self._account.held -= len(pins)
        return [pins[key] for key in keys]

    def of(self, owner: str) -> Mapping[Key, int]:
        """Slot of each of the owner's pins."""
        return self._by_owner.get(owner, {})
