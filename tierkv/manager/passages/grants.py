"""Grants of host slots to a passage, and the reads that fill them. Sans-IO."""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.manager.contract import HOST
from tierkv.manager.host.chunk_state import ChunkState
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.moves.tier_io import TierIO
from tierkv.manager.passages.passage import NOT_GRANTED, Passage
from tierkv.manager.passages.slot_account import SlotAccount
from tierkv.manager.step_budget import KEYS_PER_LOOK, BudgetShare
from tierkv.types.keys import Key

SOURCES = 64
"""Chunks whose tiers are looked up in one batch."""


class _Sources:
    """Tiers that the wanted chunks of a passage would be read from, looked up in batches from the front on."""

    def __init__(self, tier_io: TierIO, passage: Passage) -> None:
        self._tier_io = tier_io
        self._passage = passage
        self._first = 0
        self._tiers: Sequence[LowerTier | None] = ()

    def of(self, position: int) -> LowerTier | None:
        """Tier of the chunk at a position; None if no tier has it."""
        if position >= self._first + len(self._tiers):
            passage, self._first = self._passage, position
            self._tiers = self._tier_io.sources_of(
                passage.keys[position : position + SOURCES],
                passage.hints.load_tiers,
                since=passage.asked_s,
                trusting=passage.is_trusting,
            )
        return self._tiers[position - self._first]


class SlotGrants:
    """Gives wanted chunks their slots: those in the host tier first, then those below, from the front.

    Args:
        host: the host tier.
        tier_io: reads from lower tiers.
        account: counts the slots of all passages.
        share: key operations of the step.
    """

    def __init__(self, host: HostTier, tier_io: TierIO, account: SlotAccount, share: BudgetShare) -> None:
        self._host = host
        self._tier_io = tier_io
        self._account = account
        self._share = share

    def grant(self, passage: Passage, room: int) -> bool:
        """Grant free slots, as far as the host tier and the step's budget allow.

        Args:
            passage: that waits for slots.
            room: slots that it may have on the account.

        Returns:
            Whether it wants more slots than there are.
        """
        before, passage.lacks_host_slots = passage.num_granted, False
        refused = self._hold_present(passage, room)
        if passage.looked == len(passage.keys) and not passage.complete:
            refused = self._grant_missing(passage, room - (passage.num_granted - before))
        keys, slots = passage.keys, passage.slots
        while passage.position < len(keys) and slots[passage.position] != NOT_GRANTED:
            passage.position += 1
        return refused

    def hold_ready(self, passage: Passage, room: int) -> bool:
        """Hold the wanted chunks of a passage without any slot, if all are readable. Returns whether it does."""
        count = len(passage.keys)
        if count > room:
            return False
        slots = self._host.slots.ready_prefix(passage.keys)
        if len(slots) < count:
            return False
        self._host.pin(slots)
        passage.grant_all(slots)
        self._account.granted(count, copies=passage.copies)
        return True

    def _hold_present(self, passage: Passage, room: int) -> bool:
        """Hold wanted chunks that are in the host tier, before an eviction for the same request can drop them (G3)."""
        keys, host = passage.keys, self._host
        if not (passage.num_granted or passage.looked) and self.hold_ready(passage, room):  # the hot path
            return False
        share = self._share
        end = min(len(keys), passage.looked + max(1, share.left) * KEYS_PER_LOOK)
        share.take((end - passage.looked) // KEYS_PER_LOOK)
        for position in range(passage.looked, end):
            if passage.slots[position] != NOT_GRANTED:
                continue
            slot = host.slots.find(keys[position])
            if slot is None:
                continue
            if room <= 0:
                passage.looked = len(keys)  # nothing is read while chunks that are here find no room
                return True
            host.pin((slot,))
            self._add(passage, position, slot)
            room -= 1
        passage.looked = end
        return False

    def _grant_missing(self, passage: Passage, room: int) -> bool:
        keys, slots, host = passage.keys, passage.slots, self._host
        missing: list[tuple[int, LowerTier]] = []
        coming: set[Key] = set()
        host_room, refused = host.room, False
        spare: int | None = None
        sources = _Sources(self._tier_io, passage)
        for position in range(passage.position, len(keys)):
            if slots[position] != NOT_GRANTED:
                continue
            if room <= 0:
                refused = True
                break
            if not self._share.take(1):
                break
            key = keys[position]
            slot = host.slots.find(key)
            if slot is not None:
                host.pin((slot,))
                self._add(passage, position, slot)
                room -= 1
                host_room = host.room
                continue
            if key in coming:
                continue
            if host_room <= len(missing):
                spare = self._tier_io.admissions.dirty_pins.spare() if spare is None else spare
                if host_room + spare <= len(missing):
                    refused = passage.lacks_host_slots = True
                    break
            tier = sources.of(position)
            if tier is None:
                passage.failed = True
                break
            missing.append((position, tier))
            coming.add(key)
            room -= 1
        return self._fetch(passage, missing) or refused

    def _fetch(self, passage: Passage, missing: Sequence[tuple[int, LowerTier]]) -> bool:
        """Grant slots to missing chunks, and start to read them from their tiers. Returns whether some got none."""
        refused = False
        positions: dict[int, list[int]] = {}
        for position, tier in missing:
            positions.setdefault(tier.index, []).append(position)
        tiers = {tier.index: tier for _, tier in missing}
        for index, wanted in positions.items():
            keys = [passage.keys[position] for position in wanted]
            slots = self._tier_io.promote(keys, tiers[index], passage.hints)
            if slots is None:
                refused = passage.lacks_host_slots = True
                continue
            for position, slot in zip(wanted, slots, strict=True):
                self._host.waiters.add(slot, passage)
                passage.grant(position, slot, tiers[index].name)
            passage.await_chunks(len(slots))
            self._account.granted(len(slots), copies=passage.copies)
        return refused

    def _add(self, passage: Passage, position: int, slot: int) -> None:
        """Grant a chunk that is held. The source of one that is not readable yet is the tier that it is read from."""
        ready = self._host.slots.state(slot) is ChunkState.READY
        if not ready:
            passage.await_chunks(1)
            self._host.waiters.add(slot, passage)
        passage.grant(position, slot, HOST if ready else self._host.slots.origin(slot))
        self._account.granted(1, copies=passage.copies)
