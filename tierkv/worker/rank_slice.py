"""One worker's parts of the arena's slots: where they are, how they are closed after a store and checked before a load.

A chunk's payload holds the parts of worker 0, 1, ... one after the other. A single worker seals its slots itself; where
there are several, each reports the checksum of its part, and the stack seals when it has all of them.

*Staged*: the engine's reports carry no checksums, and it cannot hear of a load that failed. Then each of several
workers leaves its checksum in the slot itself; and a load checks nothing, because the engine was told of a chunk only
after its frame had been checked, or made here, and a refusal could not be reported.
"""

from __future__ import annotations

from tierkv.errors import CorruptFrameError, EngineProtocolError
from tierkv.frames.frame import HEADER_BYTES, FrameSealer, checksum
from tierkv.frames.unsealed import put_part_checksum
from tierkv.memory.arena import Bytes, HostArena
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key


class RankSlice:
    """What the worker of one rank may touch of the arena. May be used on several threads.

    Args:
        rank: 0 to ``geometry.num_workers - 1``.
        verify_loads: check the part's checksum once more on its way to the GPU.
        staged: see above.

    Raises:
        EngineProtocolError: there is no such rank.
    """

    def __init__(  # noqa: PLR0913 - a worker's place, and how it may fail
        self,
        arena: HostArena,
        sealer: FrameSealer,
        geometry: Geometry,
        rank: int = 0,
        *,
        verify_loads: bool = True,
        staged: bool = False,
    ) -> None:
        if not 0 <= rank < geometry.num_workers:
            raise EngineProtocolError(f"rank {rank}: this stack has workers 0 to {geometry.num_workers - 1}")
        self.geometry = geometry
        self.rank = rank
        self.arena = arena
        self.is_alone = geometry.num_workers == 1
        self._sealer = sealer
        self._verify_loads = verify_loads
        self._staged = staged
        # A staged engine tells the bytes of a block, but not always how many of them each group uses.
        self._unused = [
            slice(geometry.blocks_per_chunk * sum(group.page_bytes), group.worker_bytes) for group in geometry.groups
        ]

    def part(self, slot: int, group: int) -> Bytes:
        """This worker's part of a slot that holds a chunk of the group: a writable array of one dimension."""
        part_bytes = self.geometry.groups[group].worker_bytes
        start = self.rank * part_bytes
        return self.arena.payload(slot)[start : start + part_bytes]

    def finish_store(self, key: Key, slot: int, group: int) -> bytes:
        """This worker's part is in place. Seals the slot, or returns the part's checksum for those who will.

        Raises:
            ValueError: the key does not fit a frame.
        """
        unused = self._unused[group]
        if unused.start < unused.stop:
            self.part(slot, group)[unused] = 0
        if self.is_alone:
            self._sealer.seal(self.arena.slot(slot), key, self.geometry.groups[group].payload_bytes)
            return b""
        part_bytes = self.geometry.groups[group].worker_bytes
        start = HEADER_BYTES + self.rank * part_bytes
        digest = checksum(self.arena.slot(slot)[start : start + part_bytes])
        if self._staged:
            put_part_checksum(self.arena.slot(slot), self.rank, digest)
        return digest

    def check_load(self, key: Key, slot: int, group: int) -> None:
        """Make sure that the slot holds this chunk, and that this worker's part of it is undamaged.

        Raises:
            CorruptFrameError: it does not; the message names what differs.
        """
        if self._staged:
            return
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
