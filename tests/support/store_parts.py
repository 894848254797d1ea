"""Helpers for tests of stores."""

from __future__ import annotations

from collections.abc import Sequence

from core_blocks import BedBlock
from core_parts import Core, TierSpec, make_core
from core_truth import BedRequest

from tierkv.scheduler.limits import SchedulerLimits
from tierkv.types.engine import Block
from tierkv.types.transfers import ConnectorMeta, TransferJob


def only_store(meta: ConnectorMeta) -> TransferJob:
    """The one store of a step."""
    (job,) = meta.stores
    return job


def chunk_indices(core: Core, request: BedRequest, meta: ConnectorMeta, group: int = 0) -> list[int]:
    """Indices of the chunks of a request that a step stores, in a group."""
    keys = core.truth.keys(request, group)
    return [
        keys.index(key)
        for job in meta.stores
        for key, of_group in zip(job.keys, job.chunk_groups, strict=True)
        if of_group == group and key in keys
    ]


class FreeQueue:
    """An engine's queue of free blocks that a test fills and empties by hand."""

    def __init__(self) -> None:
        self._order: list[BedBlock] = []
        self._entries: dict[int, int] = {}
        self._joined = 0
        self.asked = 0

    def free(self, *queued: BedBlock) -> None:
        """Append these blocks, in this order."""
        for block in queued:
            self._joined += 1
            self._order.append(block)
            self._entries[block.block_id] = self._joined

    def take(self, *block_ids: int) -> None:
        """Remove these blocks, wherever they are in the queue."""
        self._order = [block for block in self._order if block.block_id not in block_ids]
        for block_id in block_ids:
            del self._entries[block_id]

    def __len__(self) -> int:
        """Blocks in the queue."""
        return len(self._order)

    def head(self) -> BedBlock | None:
        """Block that is reused next."""
        return self._order[0] if self._order else None

    def after(self, block: Block) -> BedBlock | None:
        """Block behind one in the queue."""
        self.asked += 1
        place = [one.block_id for one in self._order].index(block.block_id)
        return self._order[place + 1] if place + 1 < len(self._order) else None

    def entry(self, block: Block) -> int | None:
        """Number of the entry of a block; None: not in the queue."""
        return self._entries.get(block.block_id)


def lazy_core(
    max_batched_tokens: int = 8, slots: int = 64, tiers: Sequence[TierSpec] = (), **limits: object
) -> tuple[Core, FreeQueue]:
    """Core with the lazy plan and its queue. Blocks of 4 tokens: 2 visits per 4 batched tokens."""
    plan = SchedulerLimits(store_plan="lazy", **limits)  # type: ignore[arg-type]
    core = make_core(slots=slots, tiers=tiers, limits=plan)
    queue = FreeQueue()
    core.scheduler.register_free_queue(queue, max_batched_tokens)
    return core, queue


def computed_blocks(request: BedRequest, ids: Sequence[int]) -> list[BedBlock]:
    """Blocks of 4 tokens that hold the front of a request."""
    return [BedBlock(block_id, request.block_hashes[i]) for i, block_id in enumerate(ids)]
