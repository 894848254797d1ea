"""Which chunks go into which blocks when the engine has allocated them: pure functions (spec, section 9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.errors import EngineProtocolError
from tierkv.scheduler.records import RequestRecord
from tierkv.types.engine import NULL_BLOCK_ID, Block, BlockTables
from tierkv.types.geometry import Geometry, GroupGeometry, cdiv
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
    """Index of the first block up to ``end`` to load: no placeholder, and its content not computed (S58, S59)."""
    partly = computed_tokens // group.block_tokens
    if computed_tokens % group.block_tokens and _is_unfilled(table[partly]):
        raise EngineProtocolError(
            f"{what}: block {partly} is unfilled, but {computed_tokens} tokens are said to be computed"
        )
    for i in range(cdiv(computed_tokens, group.block_tokens), end):
        if _is_unfilled(table[i]):
            return i
    return end


def _is_unfilled(block: Block) -> bool:
    return block.block_hash is None and not block.is_null


def _check_window(what: str, group: GroupGeometry, blocks_per_chunk: int, pending: int) -> None:
    """A window that begins inside a block touches one block more than it fills."""
    if group.window_chunks is None:
        return
    pending_max = group.window_chunks * blocks_per_chunk + 1
    if pending > pending_max:
        raise EngineProtocolError(
            f"{what}: {pending} blocks are to be loaded, but its {group.kind.value} group needs {pending_max} at most: "
            "put the null block for those before the window"
        )
