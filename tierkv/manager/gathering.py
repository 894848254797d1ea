"""Reservations: bring a request's wanted chunks together in the host tier, oldest request first.

Three rules make the oldest request always progress (decision 4): a reservation holds what it was granted until its
owner loads it or lets go; only the oldest unfinished reservation may take slots while they are short; and all reserved
chunks together stay under a cap that leaves room for stores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierkv.manager.chunk_state import ChunkState
from tierkv.manager.contract import HOST
from tierkv.manager.host_index import Chunk, HostIndex
from tierkv.manager.reservation import Reservation
from tierkv.manager.tier_traffic import TierTraffic
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

    def reserve(self, owner: str, keys: tuple[Key, ...]) -> Reservation:
        """The owner's reservation for ``keys``, granted as far as the rules allow now."""
        reservation = self._by_owner.get(owner)
        if reservation is None:
            reservation = self._by_owner[owner] = Reservation(owner, keys)
        elif reservation.keys != keys or reservation.failed:
            self._replace(reservation, keys)
        if not reservation.granted and not reservation.failed and self._may_take(reservation):
            self._grant(reservation)
        return reservation

    def _may_take(self, reservation: Reservation) -> bool:
        """Nobody older waits for slots, or everything wanted is readable already: then nothing new is taken."""
        for other in self._by_owner.values():
            if other is reservation:
                return True
            if not other.granted and not other.failed:
                break
        first, wanted = len(reservation.chunks), len(reservation.keys)
        return self._host.resident_prefix(reservation.keys, first, wanted) == wanted - first

    def _grant(self, reservation: Reservation) -> None:
        for key in reservation.keys[len(reservation.chunks) :]:
            if self._held >= self.chunks_max:
                return
            chunk = self._host.get(key)
            if chunk is not None:
                self._host.hold(chunk)
                source = HOST if chunk.state is ChunkState.READY else chunk.origin
            else:
                if not self._host.room:
                    return
                tier = self._traffic.source_of(key)
                if tier is None:
                    reservation.failed = True
                    return
                chunk = self._traffic.promote(key, self._group_bytes[split_key(key)[1]], tier)
                source = tier.name
            if chunk.state is not ChunkState.READY:
                reservation.outstanding += 1
                chunk.waiters = [*(chunk.waiters or ()), reservation]
            reservation.chunks.append(chunk)
            reservation.sources.append(source)
            self._held += 1

    def _replace(self, reservation: Reservation, keys: tuple[Key, ...]) -> None:
        """Other chunks are wanted now, or one was lost.

        What is still wanted and good, from the front of the new keys on, stays held and keeps its source: a hit that
        starts later, because the engine has found its front in its own cache, is still the hit that was gathered.
        """
        old = {chunk.key: (chunk, source) for chunk, source in zip(reservation.chunks, reservation.sources, strict=True)}
        kept: list[tuple[Chunk, str]] = []
        for key in keys:
            chunk_and_source = old.get(key)
            if chunk_and_source is None or chunk_and_source[0].state is ChunkState.DOOMED:
                break
            kept.append(old.pop(key))
        for chunk, _ in reversed(old.values()):
            self._let_go(reservation, chunk)
        reservation.chunks = [chunk for chunk, _ in kept]
        reservation.sources = [source for _, source in kept]
        reservation.keys = keys
        reservation.failed = False

    def trim(self, owner: str, keys: tuple[Key, ...]) -> None:
        """Shrink the owner's reservation to ``keys``, a prefix of what it wants."""
        reservation = self._by_owner.get(owner)
        if reservation is not None:
            self._replace(reservation, keys)

    def granted(self, owner: str) -> Mapping[Key, tuple[Chunk, str]]:
        """The owner's granted chunks, each with the tier it came from."""
        reservation = self._by_owner.get(owner)
        if reservation is None:
            return {}
        return dict(zip(reservation.keys, zip(reservation.chunks, reservation.sources, strict=True), strict=False))

    def release(self, owner: str) -> None:
        """End the owner's reservation."""
        reservation = self._by_owner.pop(owner, None)
        if reservation is not None:
            for chunk in reversed(reservation.chunks):  # tail first: the head of a prefix stays longest (S54)
                self._let_go(reservation, chunk)

    def release_all(self) -> None:
        """End every reservation."""
        for owner in list(self._by_owner):
            self.release(owner)

    def _let_go(self, reservation: Reservation, chunk: Chunk) -> None:
        if chunk.waiters and reservation in chunk.waiters:
            chunk.waiters.remove(reservation)
            reservation.outstanding -= 1
        self._host.release(chunk)
        self._held -= 1
