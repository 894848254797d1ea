"""Reservations collect the wanted chunks of requests in the host tier, the oldest request first.

Three rules guarantee that the oldest request progresses (decision 4). A reservation holds its granted chunks until its
owner loads or releases them. Only the oldest unfinished reservation takes slots while slots are short. All reserved
chunks together stay under a cap, so that stores have room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence

from tierkv.errors import require
from tierkv.manager.contract import HOST
from tierkv.manager.host.chunk import Chunk
from tierkv.manager.host.chunk_state import ChunkState
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.lower.lower_tier import LowerTier
from tierkv.manager.moves.tier_io import TierIO
from tierkv.manager.reservations.reservation import NOT_GRANTED, Reservation
from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import Key

RELEASED_PER_STEP_MAX = 16_384
"""Chunks of ended reservations that are released per step: three milliseconds' work. A reset ends all reservations at
once, and the host tier can be full of their chunks; the rest stays held until later steps."""


class Reservations:
    """Reservations and pins by owner, in order of arrival. Sans-IO.

    Args:
        chunks_max: cap on all reserved chunks together. May be changed between calls.
        released_per_step_max: number of chunks released per step.
        trusting: whether a shared tier whose answer has expired counts as having the chunk.
    """

    def __init__(
        self,
        host: HostTier,
        tier_io: TierIO,
        chunks_max: int,
        released_per_step_max: int = RELEASED_PER_STEP_MAX,
        *,
        trusting: bool = False,
    ) -> None:
        self.chunks_max = chunks_max
        self._trusting = trusting
        self._released_per_step_max = self._may_release = released_per_step_max
        self._to_release: list[list[int]] = []
        self._host = host
        self._tier_io = tier_io
        self._by_owner: dict[str, Reservation] = {}
        self._pins: dict[str, dict[Key, int]] = {}
        self.num_reserved = 0
        """Number of reserved chunks, including those that later steps release."""

    @property
    def owners(self) -> list[str]:
        """Owners that have a reservation, in order of arrival."""
        return list(self._by_owner)

    @property
    def is_idle(self) -> bool:
        """Whether there are no reservations."""
        return not self._by_owner

    def reserve(self, owner: str, keys: tuple[Key, ...], hints: RequestHints = NO_HINTS) -> Reservation:
        """Reserve ``keys``, in prefix order, and grant as many as the rules and the hints allow now.

        Called again in later steps it continues. Other keys than before replace the wanted ones.

        Returns:
            The owner's reservation.
        """
        reservation = self._by_owner.get(owner)
        if reservation is None:
            reservation = self._by_owner[owner] = Reservation(owner, keys, self._host, hints)
        elif reservation.failed or reservation.keys != keys:
            self._replace(reservation, keys)
        if not reservation.complete and self._may_take(reservation):
            self._grant(reservation)
        return reservation

    def _may_take(self, reservation: Reservation) -> bool:
        """Whether no older reservation waits for slots, or all wanted chunks are readable, so that no slot is taken."""
        for other in self._by_owner.values():
            if other is reservation:
                return True
            if not other.complete and not other.failed:
                break
        left = reservation.keys[reservation.position :]
        return len(self._host.slots.ready_prefix(left)) == len(left)

    # -- pins --------------------------------------------------------------------------------------------------------

    def pin(self, owner: str, key: Key) -> bool:
        """Hold one chunk for the owner ahead of a reservation, if it is readable and the cap allows. Idempotent.

        For an owner whose lookup proceeds chunk by chunk. It must unpin before it reserves, because an older owner may
        need the slots.

        Returns:
            Whether the owner holds it now.
        """
        pins = self._pins.get(owner)
        if pins is not None and key in pins:
            return True
        slot = self._host.slots.find(key) if self.num_reserved < self.chunks_max else None
        if slot is None or self._host.slots.state(slot) is not ChunkState.READY:
            return False
        self._host.pin((slot,))
        self.num_reserved += 1
        if pins is None:
            pins = self._pins[owner] = {}
        pins[key] = slot
        return True

    def unpin(self, owner: str, keep: Container[Key] = ()) -> None:
        """Release the owner's pins except those in ``keep``; the last one pinned is released first (S54)."""
        pins = self._pins.get(owner)
        if pins is None:
            return
        gone = [key for key in reversed(pins) if key not in keep]
        self._release_later([pins.pop(key) for key in gone])
        if not pins:
            del self._pins[owner]

    def pinned(self, owner: str) -> Mapping[Key, int]:
        """Slot of each of the owner's pins."""
        return self._pins.get(owner, {})

    # -- granting ----------------------------------------------------------------------------------------------------

    def _grant(self, reservation: Reservation) -> None:
        if not reservation.pinned:
            self._hold_present(reservation)
        keys, slots = reservation.keys, reservation.slots
        missing: list[tuple[int, LowerTier]] = []
        room = self._host.room
        spare: int | None = None
        for position in range(reservation.position, 0 if reservation.complete else len(keys)):
            if slots[position] != NOT_GRANTED:
                continue
            if self.num_reserved + len(missing) >= self.chunks_max:
                break
            slot = self._host.slots.find(keys[position])
            if slot is not None:
                self._host.pin((slot,))
                self._add(reservation, position, slot)
                room = self._host.room
                continue
            if room <= len(missing):
                spare = self._tier_io.admissions.dirty_pins.spare() if spare is None else spare
                if room + spare <= len(missing):
                    break
            tier = self._tier_io.source_of(keys[position], reservation.hints.load_tiers, trusting=self._trusting)
            if tier is None:
                reservation.failed = True
                break
            missing.append((position, tier))
        self._fetch(reservation, missing)
        while reservation.position < len(keys) and slots[reservation.position] != NOT_GRANTED:
            reservation.position += 1

    def _hold_present(self, reservation: Reservation) -> None:
        """Hold wanted chunks that are in the host tier, before an eviction for the same request can drop them (G3)."""
        reservation.pinned = True
        keys, host = reservation.keys, self._host
        budget = self.chunks_max - self.num_reserved
        if not reservation.num_granted and len(keys) <= budget:  # the hot path: all may be in the host tier
            slots = host.slots.ready_prefix(keys)
            if len(slots) == len(keys):
                host.pin(slots)
                reservation.grant_all(slots)
                reservation.position = len(keys)
                self.num_reserved += len(slots)
                return
        for position, key in enumerate(keys):
            if self.num_reserved >= self.chunks_max:
                break
            slot = host.slots.find(key) if reservation.slots[position] == NOT_GRANTED else None
            if slot is not None:
                host.pin((slot,))
                self._add(reservation, position, slot)

    def _fetch(self, reservation: Reservation, missing: Sequence[tuple[int, LowerTier]]) -> None:
        """Grant slots to missing chunks, and start to read them from their tiers."""
        positions: dict[int, list[int]] = {}
        for position, tier in missing:
            positions.setdefault(tier.index, []).append(position)
        tiers = {tier.index: tier for _, tier in missing}
        for index, wanted in positions.items():
            keys = [reservation.keys[position] for position in wanted]
            slots = self._tier_io.promote(keys, tiers[index], reservation.hints)
            if slots is None:
                continue
            for position, slot in zip(wanted, slots, strict=True):
                self._host.waiters.add(slot, reservation)
                reservation.grant(position, slot, tiers[index].name)
            reservation.outstanding += len(slots)
            self.num_reserved += len(slots)

    def _add(self, reservation: Reservation, position: int, slot: int) -> None:
        """Grant a chunk that is held. The source of one that is not readable yet is the tier that it is read from."""
        ready = self._host.slots.state(slot) is ChunkState.READY
        if not ready:
            reservation.outstanding += 1
            self._host.waiters.add(slot, reservation)
        reservation.grant(position, slot, HOST if ready else self._host.slots.origin(slot))
        self.num_reserved += 1

    # -- releasing ---------------------------------------------------------------------------------------------------

    def _replace(self, reservation: Reservation, keys: tuple[Key, ...]) -> None:
        """Replace the wanted keys after a change or a loss. Chunks that are still wanted and intact stay held."""
        wanted, state, doomed = set(keys), self._host.slots.state, ChunkState.DOOMED
        granted = reservation.granted()
        lost = [key for key, (slot, _) in granted.items() if key not in wanted or state(slot) is doomed]
        self._stop_holding(reservation, reservation.held_tail_first(lost))
        for key in lost:
            del granted[key]
        reservation.want(keys, granted)

    def shrink(self, owner: str, keys: tuple[Key, ...]) -> None:
        """Release the owner's granted chunks that are not in ``keys``, which must all be granted."""
        reservation = self._by_owner.get(owner)
        if reservation is not None:
            self._replace(reservation, keys)

    def granted(self, owner: str) -> dict[Key, tuple[Chunk, str]]:
        """Snapshots of the owner's granted chunks, each with its source tier."""
        reservation = self._by_owner.get(owner)
        pairs = {} if reservation is None else reservation.granted()
        chunks = {
            key: (self._host.slots.owner(ref), origin)
            for key, (slot, origin) in pairs.items()
            for ref in self._host.slots.refs([slot])
        }
        return {key: (chunk, origin) for key, (chunk, origin) in chunks.items() if chunk is not None}

    def count_sources(self, owner: str) -> Counter[str]:
        """Number of the owner's granted chunks by source tier."""
        reservation = self._by_owner.get(owner)
        return Counter() if reservation is None else reservation.count_sources()

    def hand_over(self, owner: str, keys: tuple[Key, ...]) -> tuple[list[int], list[str]] | Key:
        """End the owner's reservation, and pass its holds on ``keys`` to the caller.

        A reserved chunk that was dropped meanwhile is handed over all the same: its slot is still held. Chunks that
        were not reserved are held now if they are readable.

        Returns:
            Slots and sources; or the first key that is neither reserved nor readable: then nothing has changed.
        """
        reservation = self._by_owner.get(owner)
        if (
            reservation is not None
            and reservation.keys == keys
            and reservation.complete
            and not reservation.outstanding
        ):
            self.unpin(owner)
            del self._by_owner[owner]
            self.num_reserved -= len(keys)
            return reservation.slots, reservation.sources()
        reserved = {key: (slot, HOST) for key, slot in self.pinned(owner).items()}
        reserved |= {} if reservation is None else reservation.granted()
        slots, sources = [], []
        for key in keys:
            slot, source = reserved.get(key) or (self._host.slots.find(key), HOST)
            if slot is None or self._host.slots.state(slot) not in (ChunkState.READY, ChunkState.DOOMED):
                return key
            slots.append(slot)
            sources.append(source)
        self._host.pin(slots)
        self.release(owner)
        return slots, sources

    def release(self, owner: str) -> None:
        """End the owner's reservation and pins, if it has any."""
        self.unpin(owner)
        reservation = self._by_owner.pop(owner, None)
        if reservation is not None:
            self._stop_holding(reservation, reservation.held_tail_first())

    def begin_step(self) -> None:
        """Release chunks that exceeded the bound of previous steps."""
        self._may_release = self._released_per_step_max
        while self._to_release and self._may_release:
            slots = self._to_release.pop(0)
            if len(slots) > self._may_release:
                self._to_release.insert(0, slots[self._may_release :])
            self._release(slots[: self._may_release])

    def release_all(self) -> None:
        """End all reservations and pins."""
        for owner in [*self._by_owner, *self._pins]:
            self.release(owner)

    def _stop_holding(self, reservation: Reservation, slots: list[int]) -> None:
        if reservation.outstanding:
            reservation.outstanding -= sum(self._host.waiters.remove(slot, reservation) for slot in slots)
        self._release_later(slots)

    def _release_later(self, slots: list[int]) -> None:
        """Release slots now, as far as the step's bound allows, and the rest in later steps."""
        now = slots[: self._may_release]
        if len(now) < len(slots):
            self._to_release.append(slots[len(now) :])
        self._release(now)

    def _release(self, slots: list[int]) -> None:
        self._may_release -= len(slots)
        self._host.unpin(slots)
        self.num_reserved -= len(slots)

    # -- check -------------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check that every granted chunk is held, and that all together stay under the cap.

        Raises:
            InvariantError: a chunk is not held, or the cap is exceeded.
        """
        reservations = self._by_owner.values()
        held = sum(reservation.num_granted for reservation in reservations)
        held += sum(map(len, self._pins.values()))
        over = sum(map(len, self._to_release))
        require(self.num_reserved == held + over, f"{self.num_reserved} reserved chunks are counted wrong")
        require(held <= self.chunks_max, f"{held} chunks are reserved, {self.chunks_max} may be")
        for reservation in reservations:
            what = f"reservation of {reservation.owner!r}"
            require(len(reservation.slots) == len(reservation.keys), f"{what} holds what it does not want")
            granted = self.granted(reservation.owner)
            require(len(granted) == reservation.num_granted, f"{what}: its granted chunks are counted wrong")
            waiting = 0
            for key, (chunk, _) in granted.items():
                require(chunk.pins > 0, f"{what}: chunk {key.hex()} is granted, but not held")
                require(chunk.key == key, f"{what}: the slot of chunk {key.hex()} has another owner")
                waiting += self._host.waiters.has(chunk.slot, reservation)
            require(
                waiting == reservation.outstanding, f"{what} waits for {reservation.outstanding} chunks, not {waiting}"
            )
