"""Seals of a staged stack's stores, on the scheduler's side: slots are opened at the grant and sealed at the end.

The engine reports only that a job has ended. The slot itself shows whether the chunk is complete: it has the seal of
the worker that holds all parts, or the checksums of all parts, from which the seal is made here. An incomplete chunk is
a failed store. Sealing reads no payload.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tierkv.frames.sealer import FrameSealer
from tierkv.frames.unsealed import is_sealed, mark_unsealed, part_checksums
from tierkv.memory.arena import HostArena
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key
from tierkv.types.transfers import SlotRef

_log = logging.getLogger(__name__)


class StagedSeals:
    """Opens and seals the slots of stores. Scheduler's thread.

    Args:
        arena: memory of the host tier.
        sealer: writes headers.
        geometry: sizes of groups and chunks, and the number of workers.
    """

    def __init__(self, arena: HostArena, sealer: FrameSealer, geometry: Geometry) -> None:
        self._arena = arena
        self._sealer = sealer
        self._geometry = geometry
        self._parts_max = max(group.parts for group in geometry.groups)

    def open_slots(self, slots: Iterable[SlotRef]) -> None:
        """Open slots that were granted for a store, so that their previous content is not taken for its result."""
        for slot, _ in slots:
            mark_unsealed(self._arena.slot(slot), self._parts_max)

    def seal_slots(self, chunks: Iterable[tuple[Key, int, SlotRef]]) -> frozenset[Key]:
        """Seal the chunks (key, group, slot) of a store that has ended. Returns the keys of incomplete chunks."""
        return frozenset(key for key, group, ref in chunks if not self._seal_slot(key, group, ref.slot))

    def _seal_slot(self, key: Key, group: int, slot: int) -> bool:
        view, sizes = self._arena.slot(slot), self._geometry.groups[group]
        if sizes.parts == sizes.worker_parts:
            return is_sealed(view)
        digests = part_checksums(view, sizes.parts)
        if digests is None:
            return False
        try:
            self._sealer.seal_parts(view, key, sizes.payload_bytes, digests)
        except ValueError as error:  # the key does not fit a frame
            _log.warning("chunk %s cannot be sealed: %s", key.hex(), error)
            return False
        return True
