"""Values that the host tier returns: snapshots of chunks, and batches that were filled or evicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tierkv.manager.host.chunk_state import ChunkState
from tierkv.types.keys import Key
from tierkv.types.transfers import SlotRef


@dataclass(frozen=True, slots=True)
class Chunk:
    """Snapshot of a chunk that owns a slot. The chunk itself is an entry in the columns of the host tier."""

    key: Key
    slot: int
    generation: int
    state: ChunkState
    pins: int
    """Number of pins on its slot."""
    origin: str
    """Tier that it is being read from, or the host tier."""

    @property
    def ref(self) -> SlotRef:
        """Lease on its slot."""
        return SlotRef(self.slot, self.generation)


class Filled(NamedTuple):
    """Chunks that just became readable, tail first, as the caller named them."""

    slots: list[int]
    keys: list[Key]


class Evicted(NamedTuple):
    """Chunks that were just evicted from the host tier, and the slots that became free."""

    slots: Sequence[int]
    keys: list[Key]
