"""A request's claim on chunks in the host tier, from the moment it wants them until it loads them or lets go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tierkv.manager.contract import HOST
from tierkv.manager.host.chunk_state import ChunkState
from tierkv.manager.host.host_tier import HostTier
from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import Key

NOT_GRANTED = -1
"""Stands for a slot where a wanted chunk has none yet."""


class Reservation:
    """The chunks that one request wants, in prefix order, and how far they have come.

    keys, slots: one per wanted chunk. A slot is held from when it is granted, its chunk readable or on its way.
    num_granted: how many have a slot.
    position: every chunk before it has a slot.
    pinned: what the host tier had when the request came to take its turn is held.
    outstanding: granted chunks that are on their way.
    failed: a wanted chunk turned out not to be had: what is there and what is not must be asked again.
    """

    __slots__ = (
        "_host",
        "_origins",
        "failed",
        "hints",
        "keys",
        "num_granted",
        "outstanding",
        "owner",
        "pinned",
        "position",
        "slots",
    )

    def __init__(self, owner: str, keys: tuple[Key, ...], host: HostTier, hints: RequestHints = NO_HINTS) -> None:
        self.owner = owner
        self.hints = hints
        self.outstanding = 0
        self._host = host
        self.want(keys, {})

    def want(self, keys: tuple[Key, ...], granted: Mapping[Key, tuple[int, str]]) -> None:
        """Start over with these keys. granted: those of them that have a slot, and the tier their bytes came from."""
        self.keys = keys
        self.slots = [NOT_GRANTED] * len(keys)
        self.num_granted = 0
        self._origins: dict[int, str] = {}
        self.position = 0
        self.pinned = False
        self.failed = False
        for position, key in enumerate(keys if granted else ()):
            if key in granted:
                slot, origin = granted[key]
                self.grant(position, slot, origin)

    def grant(self, position: int, slot: int, origin: str) -> None:
        """A wanted chunk has its slot, which is held; the request will have used bytes from tier ``origin``."""
        self.slots[position] = slot
        self.num_granted += 1
        if origin != HOST:
            self._origins[position] = origin

    def grant_all(self, slots: list[int]) -> None:
        """All wanted chunks are readable in the host tier, and held."""
        self.slots = slots
        self.num_granted = len(slots)

    def granted(self) -> dict[Key, tuple[int, str]]:
        """The chunks that have a slot: each one's slot, and the tier its bytes came from."""
        return {
            key: (slot, self._origins.get(position, HOST))
            for position, (key, slot) in enumerate(zip(self.keys, self.slots, strict=True))
            if slot != NOT_GRANTED
        }

    def sources(self) -> list[str]:
        """Of each wanted chunk, the tier its bytes came from."""
        sources = [HOST] * len(self.keys)
        for position, origin in self._origins.items():
            sources[position] = origin
        return sources

    def count_sources(self) -> Counter[str]:
        """How many of the granted chunks came from which tier."""
        counts = Counter(self._origins.values())
        if self.num_granted > len(self._origins):
            counts[HOST] = self.num_granted - len(self._origins)
        return counts

    @property
    def complete(self) -> bool:
        """Whether every wanted chunk has its slot."""
        return self.num_granted == len(self.keys)

    @property
    def ready(self) -> bool:
        """Whether every wanted chunk is readable and held."""
        return self.complete and not self.outstanding and not self.failed

    def granted_ready(self) -> set[Key]:
        """The granted keys whose chunks are readable."""
        state, ready = self._host.slots.state, ChunkState.READY
        return {key for key, (slot, _) in self.granted().items() if state(slot) is ready}

    def held_tail_first(self, keys: Sequence[Key] | None = None) -> list[int]:
        """The slots granted for ``keys`` (all of them if left out), the last wanted one first (S54)."""
        slots = reversed(self.slots)
        if keys is None:
            return [slot for slot in slots if slot != NOT_GRANTED]
        chosen = set(keys)
        pairs = zip(reversed(self.keys), slots, strict=True)
        return [slot for key, slot in pairs if slot != NOT_GRANTED and key in chosen]

    def settled(self, *, readable: bool) -> None:
        """One of the chunks on their way became readable, or never will."""
        self.outstanding -= 1
        if not readable:
            self.failed = True
