"""Grants of host slots to a passage, and the reads that fill them. Sans-IO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from tierkv.manager.host.chunk_state import ChunkState
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.moves.tier_io import TierIO
from tierkv.manager.passages.passage import NOT_GRANTED, Passage
from tierkv.manager.passages.slot_account import SlotAccount
from tierkv.manager.step_budget import KEYS_PER_LOOK, BudgetShare
from tierkv.types.cache_events import HOST
from tierkv.types.keys import Key

PIECE_CHUNKS = 64
"""Missing chunks that are looked up together."""


class SlotGrants:
    """Gives wanted chunks their slots: those in the host tier first, then those below, from the front.

    Args:
        host: the host tier.
        tier_io: reads from lower tiers.
        account: counts the slots of all passages.
        share: key operations of the step.
        together_max: chunks that are held together, if all are readable, whatever is left of the share.
    """

    def __init__(
        self, host: HostTier, tier_io: TierIO, account: SlotAccount, share: BudgetShare, together_max: int
    ) -> None:
        self._host = host
        self._tier_io = tier_io
        self._account = account
        self._share = share
        self.together_max = together_max

    def grant(self, passage: Passage, room: int) -> bool:
        """Grant free slots, as far as the host tier and the step's budget allow.

        Args:
            passage: that waits for slots.
            room: slots that it may have on the account.

        Returns:
            Whether it wants more slots than there are.
        """
        if passage.stays_held_back:
            return False
        before, passage.lacks_host_slots, passage.held_back_version = passage.num_granted, False, None
        passage.missing = None
        refused = self._hold_present(passage, room)
        if passage.looked == len(passage.keys) and not passage.complete:
            refused = self._grant_missing(passage, room - (passage.num_granted - before))
        passage.pass_granted()
        return refused

    def hold_ready(self, passage: Passage, room: int) -> bool:
        """Hold the wanted chunks of a passage without any slot, if all are readable. Returns whether it does.

        Those of a passage that is longer than a step's budget are held in several steps.
        """
        count = len(passage.keys)
        if count > min(room, self.together_max):
            return False
        slots = self._host.slots.ready_prefix(passage.keys)
        if len(slots) < count:
            return False
        self._host.pin(slots)
        passage.grant_all(slots)
        self._account.granted(count, copies=passage.copies)
        return True

    def are_readable(self, passage: Passage) -> bool:
        """Whether all wanted chunks behind the front are readable. Asked again, it looks at the first missing one."""
        table, num_left = self._host.slots, len(passage.keys) - passage.position
        if passage.missing is not None and not table.is_readable(passage.missing):
            return False
        if not self._share.left or num_left > self.together_max:  # more are held a part at a time, in their turn
            return False
        self._share.take(max(1, num_left // KEYS_PER_LOOK))
        left = passage.keys[passage.position :]
        count = len(table.ready_prefix(left))
        passage.missing = left[count] if count < num_left else None
        return count == num_left

    def _hold_present(self, passage: Passage, room: int) -> bool:
        """Hold wanted chunks that are in the host tier, before an eviction for the same request can drop them (G3)."""
        keys, host = passage.keys, self._host
        if not (passage.num_granted or passage.looked) and self.hold_ready(passage, room):  # the hot path
            return False
        share = self._share
        end = min(len(keys), passage.looked + max(1, share.left) * KEYS_PER_LOOK)
        share.take((end - passage.looked) // KEYS_PER_LOOK)
        if passage.position == passage.num_granted == passage.looked:  # these have slots, and none behind them has
            room -= self._hold_front(passage, min(end, passage.looked + max(0, room)))
        for position, slot in enumerate(host.slots.find_all(keys[passage.looked : end]), passage.looked):
            if slot is None or passage.slots[position] != NOT_GRANTED:
                continue
            if room <= 0:
                passage.looked = len(keys)  # nothing is read while chunks that are here find no room
                return True
            host.pin((slot,))
            self._add(passage, position, slot)
            room -= 1
        passage.looked = end
        return False

    def _hold_front(self, passage: Passage, end: int) -> int:
        """Hold the readable chunks that follow those held so far, up to position ``end``. Returns their number."""
        slots = self._host.slots.ready_run(passage.keys[passage.looked : end])
        self._host.pin(slots)
        passage.grant_next(slots)
        self._account.granted(len(slots), copies=passage.copies)
        return len(slots)

    def hold_again(self, keys: Sequence[Key], held: Mapping[Key, tuple[int, str]]) -> tuple[list[int], list[str]] | Key:
        """Hold chunks for a job, also those that are held already. held: slot and source of these.

        Returns:
            Slots and sources; or the first key that is neither held nor readable: then nothing has changed.
        """
        slots: list[int] = []
        sources: list[str] = []
        for key in keys:
            slot, source = held.get(key) or (self._host.slots.find(key), HOST)
            if slot is None or self._host.slots.state(slot) not in (ChunkState.READY, ChunkState.DOOMED):
                return key
            slots.append(slot)
            sources.append(source)
        self._host.pin(slots)
        return slots, sources

    def _grant_missing(self, passage: Passage, room: int) -> bool:
        """Grant slots to the chunks without one, in pieces, as far as the rules allow. Returns as :meth:`grant`."""
        keys, slots, host = passage.keys, passage.slots, self._host
        missing: dict[LowerTier, list[int]] = {}
        coming: set[Key] = set()
        host_room, refused = host.room, False
        spare: int | None = None
        wanted = (position for position in range(passage.position, len(keys)) if slots[position] == NOT_GRANTED)
        while not (refused or passage.failed) and (piece := list(islice(wanted, max(1, min(room, PIECE_CHUNKS))))):
            if room <= 0:
                refused = True
                break
            if not (taken := self._share.take(len(piece))):
                break
            for position, slot, tier in self._look_up(passage, piece[:taken]):
                if slot is not None:
                    host.pin((slot,))
                    self._add(passage, position, slot)
                    room -= 1
                    host_room = host.room
                    continue
                if (key := keys[position]) in coming:
                    continue
                if host_room <= len(coming):
                    spare = self._tier_io.admissions.dirty_pins.spare() if spare is None else spare
                    if host_room + spare <= len(coming):
                        refused = passage.lacks_host_slots = True
                        break
                if tier is None:
                    passage.failed = True
                    break
                missing.setdefault(tier, []).append(position)
                coming.add(key)
                room -= 1
        return self._fetch(passage, missing) or refused

    def _look_up(
        self, passage: Passage, positions: Sequence[int]
    ) -> Iterator[tuple[int, int | None, LowerTier | None]]:
        """Each position with the slot of its chunk in the host tier, otherwise with the tier to read it from."""
        found = self._host.slots.find_all([passage.keys[position] for position in positions])
        below = [passage.keys[position] for position, slot in zip(positions, found, strict=True) if slot is None]
        tiers = iter(
            self._tier_io.sources_of(
                below, passage.hints.load_tiers, since=passage.asked_s, trusting=passage.is_trusting
            )
        )
        for position, slot in zip(positions, found, strict=True):
            yield position, slot, next(tiers) if slot is None else None

    def _fetch(self, passage: Passage, missing: Mapping[LowerTier, Sequence[int]]) -> bool:
        """Grant slots to missing chunks, and start to read them from their tiers. Returns whether some got none.

        missing: positions of the chunks that are read from each tier.
        """
        refused = False
        for tier, wanted in missing.items():
            positions = wanted[: self._tier_io.promises_max(tier, len(wanted))]
            if len(positions) < len(wanted):
                passage.hold_back()
            if not positions:
                continue
            keys = [passage.keys[position] for position in positions]
            slots = self._tier_io.promote(keys, tier, passage.hints, passage.num_lacking, passage.outstanding)
            if slots is None:
                refused = passage.lacks_host_slots = True
                continue
            self._host.waiters.add(slots, passage)
            passage.grant_some(positions, slots, tier.name)
            passage.await_chunks(len(slots))
            self._account.granted(len(slots), copies=passage.copies)
        return refused

    def _add(self, passage: Passage, position: int, slot: int) -> None:
        """Grant a chunk that is held. The source of one that is not readable yet is the tier that it is read from."""
        ready = self._host.slots.state(slot) is ChunkState.READY
        if not ready:
            passage.await_chunks(1)
            self._host.waiters.add((slot,), passage)
        passage.grant(position, slot, HOST if ready else self._host.slots.fills.source(slot))
        self._account.granted(1, copies=passage.copies)
