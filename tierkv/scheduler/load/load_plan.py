"""Load plan: destination blocks of the chunks to load, once blocks are allocated; pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.errors import EngineProtocolError
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.types.engine import NULL_BLOCK_ID, Block, BlockTables
from tierkv.types.geometry import Geometry, GroupGeometry, cdiv
from tierkv.types.keys import Key
from tierkv.types.transfers import SlotRef, TransferJob, chunk_blocks


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Keys to load and their destination blocks; fields as in :class:`~tierkv.types.transfers.TransferJob`."""

    keys: tuple[Key, ...]
    chunk_groups: tuple[int, ...]
    block_ids: tuple[int, ...]
    group_sizes: tuple[int, ...]
    block_indices: tuple[int, ...]

    def job(self, job_id: int, request_id: str, slots: tuple[SlotRef, ...], *, ends_load: bool = True) -> TransferJob:
        """Transfer job of the plan, for the workers."""
        return TransferJob(
            job_id=job_id,
            request_id=request_id,
            is_store=False,
            keys=self.keys,
            slots=slots,
            chunk_groups=self.chunk_groups,
            block_ids=self.block_ids,
            group_sizes=self.group_sizes,
            block_indices=self.block_indices,
            ends_load=ends_load,
        )


def tokens_of_chunks(plan: LoadPlan, geometry: Geometry, start: int, end: int) -> list[int]:
    """Number of tokens from ``start`` to ``end`` that each chunk of a load represents; the sum is ``end - start``.

    Only chunks of one group count, so that groups of different sizes count no token twice: the first group in lookup
    order (full attention first) that loads any chunk. Tokens before its first chunk (in blocks that the engine has, or
    outside a window) count for that chunk.
    """
    tokens = [0] * len(plan.keys)
    lead = next((index for index in geometry.lookup_order if plan.group_sizes[index]), None)
    if lead is None:
        return tokens
    size = geometry.groups[lead].chunk_tokens
    chunk, counted, last = plan.block_indices[lead] // geometry.blocks_per_chunk, start, 0
    for i, group in enumerate(plan.chunk_groups):
        if group == lead:
            chunk += 1
            upto, last = min(end, chunk * size), i
            tokens[i] = upto - counted
            counted = upto
    tokens[last] += end - counted
    return tokens


class ChunksOfPlan:
    """Chunks of a load plan, from which parts of the plan are made.

    Attributes:
        starts: per chunk, its first token.
        ends: per chunk, the token behind its last one.
    """

    def __init__(self, plan: LoadPlan, geometry: Geometry) -> None:
        self.plan = plan
        self.starts: list[int] = []
        self.ends: list[int] = []
        self._num_groups = len(geometry.groups)
        self._blocks: list[tuple[int, ...]] = []
        self._first_blocks: list[int] = []
        per_chunk = geometry.blocks_per_chunk
        chunks = [first // per_chunk for first in plan.block_indices]
        for group, (skip, ids) in zip(plan.chunk_groups, chunk_blocks(plan, per_chunk), strict=True):
            size, chunk = geometry.groups[group].chunk_tokens, chunks[group]
            chunks[group] += 1
            self.starts.append(chunk * size)
            self.ends.append((chunk + 1) * size)
            self._blocks.append(ids)
            self._first_blocks.append(chunk * per_chunk + skip)

    def part(self, positions: Sequence[int]) -> LoadPlan:
        """Load plan of the chunks at these positions only, in ascending order."""
        plan = self.plan
        groups = [plan.chunk_groups[i] for i in positions]
        sizes, indices = [0] * self._num_groups, [0] * self._num_groups
        for group, i in zip(groups, positions, strict=True):
            if not sizes[group]:
                indices[group] = self._first_blocks[i]
            sizes[group] += len(self._blocks[i])
        return LoadPlan(
            tuple([plan.keys[i] for i in positions]),
            tuple(groups),
            tuple([block_id for i in positions for block_id in self._blocks[i]]),
            tuple(sizes),
            tuple(indices),
        )


def plan_load(
    record: RequestRecord, geometry: Geometry, blocks: BlockTables, computed_tokens: int, external_tokens: int
) -> LoadPlan:
    """Destination of tokens C to C + external, group by group.

    Raises:
        EngineProtocolError: a table is too short, covers locally computed tokens with unfilled blocks, has more blocks
            to fill than a window needs, or the null block among them.
    """
    total = computed_tokens + external_tokens
    keys: list[Key] = []
    chunk_groups: list[int] = []
    block_ids: list[int] = []
    sizes: list[int] = []
    indices: list[int] = []
    for group, table in zip(geometry.groups, blocks, strict=True):
        what = f"request {record.ctx.request_id!r}, group {group.index}"
        end = cdiv(total, group.block_tokens)
        if len(table) < end:
            raise EngineProtocolError(f"{what}: {len(table)} blocks for {total} tokens, {end} are needed")
        first = _first_to_load(what, group, table, computed_tokens, end)
        _check_window(what, group, geometry.blocks_per_chunk, end - first)
        sizes.append(end - first)
        indices.append(first if end > first else 0)
        if end > first:
            run = record.groups[group.index].keys[first // geometry.blocks_per_chunk : cdiv(total, group.chunk_tokens)]
            keys += run
            chunk_groups += [group.index] * len(run)
            ids = [block.block_id for block in table[first:end]]
            if NULL_BLOCK_ID in ids:
                raise EngineProtocolError(
                    f"{what}: block {first + ids.index(NULL_BLOCK_ID)} is the null block, but block {first} before it "
                    "is to be loaded"
                )
            block_ids += ids
    return LoadPlan(tuple(keys), tuple(chunk_groups), tuple(block_ids), tuple(sizes), tuple(indices))


def _first_to_load(what: str, group: GroupGeometry, table: Sequence[Block], computed_tokens: int, end: int) -> int:
    """Index of the first block up to ``end`` to load: not a null block, content not computed (S58, S59)."""
    partly = computed_tokens // group.block_tokens
    if computed_tokens % group.block_tokens and _is_unfilled(table[partly]):
        raise EngineProtocolError(
            f"{what}: block {partly} is unfilled, but {computed_tokens} tokens are reported as computed"
        )
    for i in range(cdiv(computed_tokens, group.block_tokens), end):
        if _is_unfilled(table[i]):
            return i
    return end


def _is_unfilled(block: Block) -> bool:
    return block.block_hash is None and not block.is_null


def _check_window(what: str, group: GroupGeometry, blocks_per_chunk: int, pending: int) -> None:
    """Check the number of blocks; a window that begins inside a block touches one block more than it fills."""
    if group.window_chunks is None:
        return
    pending_max = group.window_chunks * blocks_per_chunk + 1
    if pending > pending_max:
        raise EngineProtocolError(
            f"{what}: {pending} blocks are to be loaded, but its {group.kind.value} group needs {pending_max} at most: "
            "put the null block for those before the window"
        )
