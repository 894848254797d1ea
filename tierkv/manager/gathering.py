"""Reservations: bring a request's wanted chunks together in the host tier, oldest request first.

Three rules make the oldest request always progress (decision 4): a reservation holds what it was granted until its
owner loads it or lets go; only the oldest unfinished reservation may take slots while they are short; and all reserved
chunks together stay under a cap that leaves room for stores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierkv.errors import require
from tierkv.manager.chunk_state import ChunkState
from tierkv.manager.contract import HOST
from tierkv.manager.host_index import Chunk, HostIndex
from tierkv.manager.reservation import Reservation
from tierkv.manager.tier_traffic import TierTraffic
from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import Key, split_key


class Gathering:
    """All reservations, in order of arrival (a dict keeps it)."""

    def __init__(self, host: HostIndex, traffic: TierTraffic, group_bytes: Sequence[int], chunks_max: int) -> None:
        self.chunks_max = chunks_max
        self._host = host
        self._traffic = traffic
        self._group_bytes = group_bytes
        self._by_owner: dict[str, Reservation] = {}
        self._held = 0

    def reserve(self, owner: str, keys: tuple[Key, ...], hints: RequestHints = NO_HINTS) -> Reservation:
        """The owner's reservation for ``keys``, granted as far as the rules, and the owner's hints, allow now."""
        reservation = self._by_owner.get(owner)
        if reservation is None:
            reservation = self._by_owner[owner] = Reservation(owner, keys, hints)
        elif reservation.keys != keys or reservation.failed:
            self._replace(reservation, keys)
        if not reservation.complete and self._may_take(reservation):
            self._grant(reservation)
        return reservation

    def _may_take(self, reservation: Reservation) -> bool:
        """Nobody older waits for slots, or everything wanted is readable already: then nothing new is taken."""
        for other in self._by_owner.values():
            if other is reservation:
                return True
            if not other.complete and not other.failed:
                break
        first, wanted = reservation.position, len(reservation.keys)
        return self._host.resident_prefix(reservation.keys, first, wanted) == wanted - first

    def _grant(self, reservation: Reservation) -> None:
        if not reservation.pinned:
            self._hold_what_is_there(reservation)
        if reservation.complete:  # the hot path: everything was in the host tier already
            reservation.position = len(reservation.keys)
        while reservation.position < len(reservation.keys):
            key = reservation.keys[reservation.position]
            if key not in reservation.granted and not self._take(reservation, key):
                return
            reservation.position += 1

    def _hold_what_is_there(self, reservation: Reservation) -> None:
        """Before any slot is taken: it must not be taken from a chunk that the same request wants further on (G3)."""
        reservation.pinned = True
        granted, ready = reservation.granted, ChunkState.READY
        missing = [key for key in reservation.keys if key not in granted] if granted else reservation.keys
        for chunk in self._host.hold_present(missing, self.chunks_max - self._held):
            if chunk.state is ready:
                granted[chunk.key] = (chunk, HOST)
                self._held += 1
            else:
                self._add(reservation, chunk)

    def _take(self, reservation: Reservation, key: Key) -> bool:
        """Hold the chunk of ``key``, or give it a slot and start to fetch it; False if neither can be done now."""
        if self._held >= self.chunks_max:
            return False
        chunk = self._host.get(key)
        if chunk is not None:
            self._host.hold(chunk)
            self._add(reservation, chunk)
            return True
        if not self._host.room:
            return False
        tier = self._traffic.source_of(key, reservation.hints.load_tiers)
        if tier is None:
            reservation.failed = True
            return False
        raw_bytes = self._group_bytes[split_key(key)[1]]
        self._add(reservation, self._traffic.promote(key, raw_bytes, tier, reservation.hints.route))
        return True

    def _add(self, reservation: Reservation, chunk: Chunk) -> None:
        """Count a chunk that is held as granted. What is not readable yet will have come from where it is read."""
        ready = chunk.state is ChunkState.READY
        if not ready:
            reservation.outstanding += 1
            chunk.waiters = [*(chunk.waiters or ()), reservation]
        reservation.granted[chunk.key] = (chunk, HOST if ready else chunk.origin)
        self._held += 1

    def _replace(self, reservation: Reservation, keys: tuple[Key, ...]) -> None:
        """Other chunks are wanted now, or one was lost. What is still wanted and good stays held, with its source."""
        wanted = set(keys)
        for key in reversed(reservation.keys):
            granted = reservation.granted.get(key)
            if granted is not None and (key not in wanted or granted[0].state is ChunkState.DOOMED):
                self._let_go(reservation, key)
        reservation.want(keys)

    def trim(self, owner: str, keys: tuple[Key, ...]) -> None:
        """Shrink the owner's reservation to ``keys``, a part of what it was granted."""
        reservation = self._by_owner.get(owner)
        if reservation is not None:
            self._replace(reservation, keys)

    def granted(self, owner: str) -> Mapping[Key, tuple[Chunk, str]]:
        """The owner's granted chunks, each with the tier it came from."""
        reservation = self._by_owner.get(owner)
        return {} if reservation is None else reservation.granted

    def release(self, owner: str) -> None:
        """End the owner's reservation."""
        reservation = self._by_owner.pop(owner, None)
        if reservation is not None:
            for key in reversed(reservation.keys):  # tail first: the head of a prefix stays longest (S54)
                if key in reservation.granted:
                    self._let_go(reservation, key)

    def release_all(self) -> None:
        """End every reservation."""
        for owner in list(self._by_owner):
            self.release(owner)

    def _let_go(self, reservation: Reservation, key: Key) -> None:
        chunk, _ = reservation.granted.pop(key)
        if chunk.waiters and reservation in chunk.waiters:
            chunk.waiters.remove(reservation)
            reservation.outstanding -= 1
        self._host.release(chunk)
        self._held -= 1

    def validate(self) -> None:
        """Check that every granted chunk is held, and that together they keep the cap.

        Raises:
            InvariantError: one of it is not so.
        """
        reservations = self._by_owner.values()
        require(
            self._held == sum(len(r.granted) for r in reservations), f"{self._held} reserved chunks are counted wrong"
        )
        require(self._held <= self.chunks_max, f"{self._held} chunks are reserved, {self.chunks_max} may be")
        for reservation in reservations:
            what = f"reservation of {reservation.owner!r}"
            require(reservation.granted.keys() <= set(reservation.keys), f"{what} holds what it does not want")
            waiting = 0
            for chunk, _ in reservation.granted.values():
                require(chunk.holders > 0, f"{what}: chunk {chunk.key.hex()} is granted, but not held")
                waiting += bool(chunk.waiters and reservation in chunk.waiters)
            require(
                waiting == reservation.outstanding, f"{what} waits for {reservation.outstanding} chunks, not {waiting}"
            )
