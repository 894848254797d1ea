"""Reservation of one request: the chunks that it wants, until it loads or releases them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from tierkv.manager.contract import HOST
from tierkv.manager.host.chunk_state import ChunkState
from tierkv.manager.host.host_tier import HostTier
from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import Key

NOT_GRANTED = -1
"""Slot number of a wanted chunk that has none yet."""


class Reservation:
    """Wanted chunks of one request in prefix order, and the slots granted for them.

    Attributes:
        keys: one per wanted chunk.
        slots: one per wanted chunk, or NOT_GRANTED. A granted slot is held; its chunk is readable or being read.
        num_granted: number of slots that are granted.
        position: every chunk before this one has a slot.
        pinned: whether the wanted chunks that were in the host tier at the first grant are held.
        outstanding: number of granted chunks that are not readable yet.
        failed: whether a wanted chunk turned out to be unavailable: the lookup must be repeated.
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
        """Replace the wanted keys. granted: slot and source tier of those that have a slot already."""
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
        """Grant a held slot to the chunk at a position. origin: tier that its bytes come from."""
        self.slots[position] = slot
        self.num_granted += 1
        if origin != HOST:
            self._origins[position] = origin

    def grant_all(self, slots: list[int]) -> None:
        """Grant the held slots of all wanted chunks, which are readable in the host tier."""
        self.slots = slots
        self.num_granted = len(slots)

    def granted(self) -> dict[Key, tuple[int, str]]:
        """Slot and source tier of every chunk that has a slot."""
        return {
            key: (slot, self._origins.get(position, HOST))
            for position, (key, slot) in enumerate(zip(self.keys, self.slots, strict=True))
            if slot != NOT_GRANTED
        }

    def sources(self) -> list[str]:
        """Source tier of each wanted chunk."""
        sources = [HOST] * len(self.keys)
        for position, origin in self._origins.items():
            sources[position] = origin
        return sources

    def count_sources(self) -> Counter[str]:
        """Number of granted chunks by source tier."""
        counts = Counter(self._origins.values())
        if self.num_granted > len(self._origins):
            counts[HOST] = self.num_granted - len(self._origins)
        return counts

    @property
    def complete(self) -> bool:
        """Whether every wanted chunk has a slot."""
        return self.num_granted == len(self.keys)

    @property
    def ready(self) -> bool:
        """Whether every wanted chunk is readable and held."""
        return self.complete and not self.outstanding and not self.failed

    def granted_ready(self) -> set[Key]:
        """Granted keys whose chunks are readable."""
        state, ready = self._host.slots.state, ChunkState.READY
        return {key for key, (slot, _) in self.granted().items() if state(slot) is ready}

    def held_tail_first(self, keys: Sequence[Key] | None = None) -> list[int]:
        """Slots granted for ``keys`` (all if left out), the last wanted one first (S54)."""
        slots = reversed(self.slots)
        if keys is None:
            return [slot for slot in slots if slot != NOT_GRANTED]
        chosen = set(keys)
        pairs = zip(reversed(self.keys), slots, strict=True)
        return [slot for key, slot in pairs if slot != NOT_GRANTED and key in chosen]

    def settled(self, *, readable: bool) -> None:
        """Accept that one outstanding chunk became readable, or was dropped (see :class:`Waiter`)."""
        self.outstanding -= 1
        if not readable:
            self.failed = True
