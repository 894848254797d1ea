"""Slice of the arena's slots that belongs to one rank: its position, sealing after a store, checks before a load.

A chunk's payload holds the parts of worker 0, 1, ... one after the other. Each worker reports the checksums of its
parts, and the stack seals the slot when it has all of them. A worker that holds all parts seals the slot itself.

Workers that hold equal pages share their parts: one of them stores a chunk, and all of them load it. They take turns by
slot, so each stores an equal share of the chunks.

*Staged*: the reports of an engine that schedules itself carry no checksums, and it cannot receive a failed load. Then
each of several workers writes its checksum to the slot. A load checks nothing: the engine learned of the chunk only
after its frame had been verified, or sealed here, and a refusal could not be reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from tierkv.errors import CorruptFrameError, EngineProtocolError
from tierkv.frames.frame import HEADER_BYTES, checksum, checksum_of_pieces
from tierkv.frames.sealer import FrameSealer
from tierkv.frames.unsealed import put_part_checksum
from tierkv.logs.stack_log import StackLog
from tierkv.memory.arena import Bytes, HostArena
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key


class RankSlice:
    """Parts of the arena's slots that the worker of one rank may access. May be used on several threads.

    Args:
        arena: memory of the host tier.
        sealer: writes and checks frames.
        geometry: sizes of groups and chunks.
        rank: 0 to ``geometry.num_workers - 1``.
        verify_loads: verify the part's checksum again before a load.
        staged: whether the engine schedules itself; see above.

    Raises:
        EngineProtocolError: there is no such rank.
    """

    def __init__(  # noqa: PLR0913 - collaborators, and the options of a worker
        self,
        arena: HostArena,
        sealer: FrameSealer,
        geometry: Geometry,
        rank: int = 0,
        *,
        verify_loads: bool = True,
        staged: bool = False,
        log: StackLog | None = None,
    ) -> None:
        if not 0 <= rank < geometry.num_workers:
            raise EngineProtocolError(f"rank {rank}: this stack has workers 0 to {geometry.num_workers - 1}")
        self.log = log or StackLog()
        self.geometry = geometry
        self.rank = rank
        self.arena = arena
        self._sealer = sealer
        self._verify_loads = verify_loads
        self._staged = staged
        self._ranges = [
            slice(start := rank // group.copies * group.worker_bytes, start + group.worker_bytes)
            for group in geometry.groups
        ]
        # A staged engine gives the bytes of a block, but not always how many of them each group uses.
        used = [geometry.blocks_per_chunk * sum(group.page_bytes) for group in geometry.groups]
        self._unused = [
            slice(end, group.worker_bytes) if end < group.worker_bytes else None
            for end, group in zip(used, geometry.groups, strict=True)
        ]
        self.takes_turns = any(group.copies > 1 for group in geometry.groups)
        """Whether there are workers with equal pages, so that :meth:`stores` may deny."""

    def part(self, slot: int, group: int) -> Bytes:
        """Return this worker's parts of a slot that holds a chunk of ``group``: a writable array of one dimension."""
        return self.arena.payload(slot)[self._ranges[group]]

    def rows(self, first: int, last: int, group: int) -> Bytes:
        """Return this worker's parts of the slots from ``first`` to ``last``, up or down, one a row."""
        rows = self.arena.payloads(min(first, last), abs(last - first) + 1)[:, self._ranges[group]]
        return rows if first <= last else rows[::-1]

    def part_addresses(self, slots: Sequence[int], group: int) -> npt.NDArray[np.uint64]:
        """Return the address of this worker's parts of each slot, for a copy engine.

        Raises:
            IndexError: there is no such slot.
        """
        return self.arena.payload_addresses(slots) + np.uint64(self._ranges[group].start)

    def stores(self, slot: int, group: int) -> bool:
        """Whether this worker stores a chunk of ``group`` to a slot. Otherwise one with equal pages does."""
        return (self.rank - slot) % self.geometry.groups[group].copies == 0

    def finish_store(self, key: Key, slot: int, group: int, pieces: Iterable[Bytes] | None = None) -> bytes:
        """Complete a store: seal the slot, or compute the checksums of the parts.

        Args:
            key: key of the chunk.
            slot: its slot.
            group: its group.
            pieces: puts the parts in place, and gives each piece of them in order; None: they are in place.

        Returns:
            Checksums of the parts in order; empty bytes if this worker sealed the slot.

        Raises:
            ValueError: the key does not fit a frame.
            Exception: any error of ``pieces``.
        """
        sizes, unused = self.geometry.groups[group], self._unused[group]
        zeros = () if unused is None else (self.part(slot, group)[unused],)
        for rest in zeros:
            rest[:] = 0
        view = self.arena.slot(slot)
        if sizes.parts == 1:
            if pieces is None:
                self._sealer.seal(view, key, sizes.payload_bytes)
            else:
                digest = checksum_of_pieces(chain(pieces, zeros) if zeros else pieces)
                self._sealer.seal_as(view, key, sizes.payload_bytes, digest)
            return b""
        for _ in pieces or ():
            pass
        size = sizes.payload_bytes // sizes.parts
        starts = [HEADER_BYTES + part * size for part in self._parts(group)]
        digests = [checksum(view[start : start + size]) for start in starts]
        if sizes.parts == sizes.worker_parts:
            self._sealer.seal_parts(view, key, sizes.payload_bytes, digests)
            return b""
        if self._staged:
            for part, digest in zip(self._parts(group), digests, strict=True):
                put_part_checksum(view, part, digest)
        return b"".join(digests)

    def check_load(self, key: Key, slot: int, group: int) -> None:
        """Check that the slot holds this chunk, and that this worker's parts of it are undamaged.

        Raises:
            CorruptFrameError: it does not; the message names the difference.
        """
        if self._staged:
            return
        sizes, view = self.geometry.groups[group], self.arena.slot(slot)
        is_whole = sizes.parts == sizes.worker_parts
        header = self._sealer.check_slot(view, key, payload=self._verify_loads and is_whole)
        if header.raw_bytes != sizes.payload_bytes:
            raise CorruptFrameError(
                f"chunk of {header.raw_bytes} bytes, this group's chunks have {sizes.payload_bytes}", key=key
            )
        if len(header.part_checksums) != (sizes.parts if sizes.parts > 1 else 0):
            raise CorruptFrameError(
                f"chunk of {len(header.part_checksums)} parts, this engine's have {sizes.parts}", key=key
            )
        if self._verify_loads and not is_whole:
            self._sealer.check_parts(view, header, self._parts(group))

    def _parts(self, group: int) -> range:
        """Numbers of this worker's parts."""
        sizes = self.geometry.groups[group]
        first = self.rank // sizes.copies * sizes.worker_parts
        return range(first, first + sizes.worker_parts)
