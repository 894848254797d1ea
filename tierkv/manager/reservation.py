"""A request's claim on chunks in the host tier, from the moment it wants them until it loads them or lets go."""

from __future__ import annotations

from tierkv.manager.chunk_state import ChunkState
from tierkv.manager.host_index import Chunk
from tierkv.types.keys import Key


class Reservation:
    """The chunks that one request wants, in prefix order, and how far they have come.

    The first ``len(chunks)`` keys are *granted*: each is held, readable or on its way. ``sources`` names, per granted
    key, the tier whose bytes the request will have used. ``failed`` says that a wanted chunk turned out not to be
    had: what is there and what is not must be asked again.
    """

    __slots__ = ("chunks", "failed", "keys", "outstanding", "owner", "sources")

    def __init__(self, owner: str, keys: tuple[Key, ...]) -> None:
        self.owner = owner
        self.keys = keys
        self.chunks: list[Chunk] = []
        self.sources: list[str] = []
        self.outstanding = 0
        self.failed = False

    @property
    def granted(self) -> bool:
        """Whether every wanted chunk has its slot."""
        return len(self.chunks) == len(self.keys)

    @property
    def ready(self) -> bool:
        """Whether every wanted chunk is readable and held."""
        return self.granted and not self.outstanding and not self.failed

    def granted_ready(self) -> set[Key]:
        """The granted keys whose chunks are readable."""
        return {chunk.key for chunk in self.chunks if chunk.state is ChunkState.READY}

    def settled(self, *, readable: bool) -> None:
        """One of the chunks on their way became readable, or never will."""
        self.outstanding -= 1
        if not readable:
            self.failed = True
