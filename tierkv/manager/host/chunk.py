"""What the host tier tells of one chunk, at the moment it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tierkv.manager.host.chunk_state import ChunkState
from tierkv.types.keys import Key
from tierkv.types.transfers import SlotRef


@dataclass(frozen=True, slots=True)
class Chunk:
    """A picture of a chunk that owns a slot; the chunk itself lives in the columns of :class:`HostTier`.

    holders: how many need its slot to stay. origin: the tier its bytes come from, while they are on their way.
    """

    key: Key
    slot: int
    generation: int
    state: ChunkState
    holders: int
    origin: str

    @property
    def ref(self) -> SlotRef:
        """The lease on its slot."""
        return SlotRef(self.slot, self.generation)


class Waiter(Protocol):
    """Somebody who holds a chunk that is not readable yet."""

    def settled(self, *, readable: bool) -> None:
        """The chunk became readable, or never will."""


class Filled(NamedTuple):
    """Chunks that just became readable, tail first as they were named: their slots and their keys."""

    slots: list[int]
    keys: list[Key]


class Evicted(NamedTuple):
    """Chunks that have just left the host tier: the slots they had, free now, and their keys."""

    slots: Sequence[int]
    keys: list[Key]
