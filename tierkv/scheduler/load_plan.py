"""Which chunks go into which blocks when the engine has allocated them: pure functions (spec, section 9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.errors import EngineProtocolError
from tierkv.scheduler.records import RequestRecord
from tierkv.types.engine import Block, BlockTables
from tierkv.types.geometry import Geometry, cdiv
from tierkv.types.keys import Key


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The keys to load and their destination blocks; fields as in :class:`~tierkv.types.transfers.TransferJob`."""

    keys: tuple[Key, ...]
    chunk_groups: tuple[int, ...]
    block_ids: tuple[int, ...]
    group_sizes: tuple[int, ...]
    block_indices: tuple[int, ...]


def plan_load(
    record: RequestRecord, geometry: Geometry, blocks: BlockTables, computed_tokens: int, external_tokens: int
) -> LoadPlan:
    """Destination of tokens C to C + external, group by group.

    Raises:
        EngineProtocolError: a table is too short, or covers locally computed tokens with unfilled blocks.
    """
    total = computed_tokens + external_tokens
    keys: list[Key] = []
    chunk_groups: list[int] = []
    block_ids: list[int] = []
    sizes: list[int] = []
    indices: list[int] = []
    for group, table in zip(geometry.groups, blocks, strict=True):
        end = cdiv(total, group.block_tokens)
        if len(table) < end:
            raise EngineProtocolError(
                f"request {record.ctx.request_id!r}, group {group.index}: {len(table)} blocks for {total} tokens, "
                f"{end} are needed"
            )
        first = _first_unfilled(table, computed_tokens // group.block_tokens, end)
        if computed_tokens > first * group.block_tokens:
            raise EngineProtocolError(
                f"request {record.ctx.request_id!r}, group {group.index}: block {first} is unfilled, "
                f"but {computed_tokens} tokens are said to be computed"
            )
        sizes.append(end - first)
        indices.append(first if end > first else 0)
        if end > first:
            run = record.groups[group.index].keys[first // geometry.blocks_per_chunk : cdiv(total, group.chunk_tokens)]
            keys += run
            chunk_groups += [group.index] * len(run)
            block_ids += [block.block_id for block in table[first:end]]
    return LoadPlan(tuple(keys), tuple(chunk_groups), tuple(block_ids), tuple(sizes), tuple(indices))


def _first_unfilled(table: Sequence[Block], start: int, end: int) -> int:
    """Index of the first block to load: it is not a placeholder and its content is not computed (S58, S59)."""
    for i in range(start, end):
        if table[i].block_hash is None and not table[i].is_null:
            return i
    return end
