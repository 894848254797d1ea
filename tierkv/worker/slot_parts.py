"""One worker's parts of the arena's slots: where they are, how they are closed after a store and checked before a load.

A chunk's payload holds the parts of worker 0, 1, ... one after the other. A single worker seals its slots itself; where
there are several, each reports the checksum of its part, and the stack seals when it has all of them.
"""

from __future__ import annotations

from tierkv.codecs.frame import HEADER_BYTES, FrameSealer, checksum
from tierkv.errors import CorruptFrameError, EngineProtocolError
from tierkv.tiers.arena import Bytes, HostArena
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key


class SlotParts:
    """What the worker of one rank may touch of the arena. May be used on several threads.

    Args:
        rank: 0 to ``geometry.num_workers - 1``.
        verify_loads: check the part's checksum once more on its way to the GPU.

    Raises:
        EngineProtocolError: there is no such rank.
    """

    def __init__(
        self, arena: HostArena, sealer: FrameSealer, geometry: Geometry, rank: int = 0, *, verify_loads: bool = True
    ) -> None:
        if not 0 <= rank < geometry.num_workers:
            raise EngineProtocolError(f"rank {rank}: this stack has workers 0 to {geometry.num_workers - 1}")
        self.geometry = geometry
        self.rank = rank
        self.arena = arena
        self.is_alone = geometry.num_workers == 1
        self._sealer = sealer
        self._verify_loads = verify_loads

    def part(self, slot: int, group: int) -> Bytes:
        """This worker's part of a slot that holds a chunk of the group: a writable array of one dimension."""
        part_bytes = self.geometry.groups[group].worker_bytes
        start = self.rank * part_bytes
        return self.arena.payload(slot)[start : start + part_bytes]

    def close_store(self, key: Key, slot: int, group: int) -> bytes:
        """This worker's part is in place. Seals the slot, or returns the part's checksum for those who will.

        Raises:
            ValueError: the key does not fit a frame.
        """
        if self.is_alone:
            self._sealer.seal(self.arena.slot(slot), key, self.geometry.groups[group].payload_bytes)
            return b""
        part_bytes = self.geometry.groups[group].worker_bytes
        start = HEADER_BYTES + self.rank * part_bytes
        return checksum(self.arena.slot(slot)[start : start + part_bytes])

    def check_load(self, key: Key, slot: int, group: int) -> None:
        """Make sure that the slot holds this chunk, and that this worker's part of it is undamaged.

        Raises:
            CorruptFrameError: it does not; the message names what differs.
        """
        sizes, view = self.geometry.groups[group], self.arena.slot(slot)
        header = self._sealer.check(view, key, payload=self._verify_loads and self.is_alone)
        if header.raw_bytes != sizes.payload_bytes:
            raise CorruptFrameError(
                f"chunk of {header.raw_bytes} bytes, this group's chunks have {sizes.payload_bytes}", key=key
            )
        if self.is_alone:
            return
        if len(header.part_checksums) != self.geometry.num_workers:
            raise CorruptFrameError(
                f"chunk of {len(header.part_checksums)} parts, there are {self.geometry.num_workers} workers", key=key
            )
        if self._verify_loads:
            self._sealer.check_parts(view, header, (self.rank,))
