"""A request's claim on chunks in the host tier, from the moment it wants them until it loads them or lets go."""

from __future__ import annotations

from tierkv.manager.chunk_state import ChunkState
from tierkv.manager.host_index import Chunk
from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import Key


class Reservation:
    """The chunks that one request wants, in prefix order, and how far they have come.

    granted: the keys that have their slot: each one's chunk, held, readable or on its way, and the name of the tier
        whose bytes the request will have used.
    position: every key before it is granted.
    pinned: what the host tier had when the request came to take its turn is held.
    outstanding: granted chunks that are on their way.
    failed: a wanted chunk turned out not to be had: what is there and what is not must be asked again.
    """

    __slots__ = ("failed", "granted", "hints", "keys", "outstanding", "owner", "pinned", "position")

    def __init__(self, owner: str, keys: tuple[Key, ...], hints: RequestHints = NO_HINTS) -> None:
        self.owner = owner
        self.hints = hints
        self.granted: dict[Key, tuple[Chunk, str]] = {}
        self.outstanding = 0
        self.want(keys)

    def want(self, keys: tuple[Key, ...]) -> None:
        """Start over with these keys; what is granted stays so."""
        self.keys = keys
        self.position = 0
        self.pinned = False
        self.failed = False

    @property
    def complete(self) -> bool:
        """Whether every wanted chunk has its slot."""
        return len(self.granted) == len(self.keys)

    @property
    def ready(self) -> bool:
        """Whether every wanted chunk is readable and held."""
        return self.complete and not self.outstanding and not self.failed

    def granted_ready(self) -> set[Key]:
        """The granted keys whose chunks are readable."""
        return {key for key, (chunk, _) in self.granted.items() if chunk.state is ChunkState.READY}

    def settled(self, *, readable: bool) -> None:
        """One of the chunks on their way became readable, or never will."""
        self.outstanding -= 1
        if not readable:
            self.failed = True
