"""The scheduler's side of a staged stack's stores: slots are opened when they are granted, and closed when they end.

The engine reports that a job has ended, and no more. Whether a chunk is really there says its slot: the seal of the
only worker, or the checksums that all of them left, from which the seal is made here. What is missing is a failed
store. Sealing reads no payload.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tierkv.frames.frame import FrameSealer
from tierkv.frames.unsealed import is_sealed, mark_unsealed, part_checksums
from tierkv.memory.arena import HostArena
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key
from tierkv.types.transfers import SlotRef

_log = logging.getLogger(__name__)


class StagedSeals:
    """Scheduler's thread."""

    def __init__(self, arena: HostArena, sealer: FrameSealer, geometry: Geometry) -> None:
        self._arena = arena
        self._sealer = sealer
        self._geometry = geometry

    def open_slots(self, slots: Iterable[SlotRef]) -> None:
        """These slots were granted for a store: what they held before must not pass for its result."""
        for slot, _ in slots:
            mark_unsealed(self._arena.slot(slot), self._geometry.num_workers)

    def seal_slots(self, chunks: Iterable[tuple[Key, int, SlotRef]]) -> frozenset[Key]:
        """The store of these chunks (key, group, slot) has ended. Returns those that are not whole."""
        return frozenset(key for key, group, ref in chunks if not self._is_whole(key, group, ref.slot))

    def _is_whole(self, key: Key, group: int, slot: int) -> bool:
        view, parts = self._arena.slot(slot), self._geometry.num_workers
        if parts == 1:
            return is_sealed(view)
        digests = part_checksums(view, parts)
        if digests is None:
            return False
        try:
            self._sealer.seal_parts(view, key, self._geometry.groups[group].payload_bytes, digests)
        except ValueError as error:  # the key does not fit a frame
            _log.warning("chunk %s cannot be sealed: %s", key.hex(), error)
            return False
        return True
