"""Load plan: destination blocks of the chunks to load, once blocks are allocated; pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import NamedTuple, TypeVar, overload

from tierkv.errors import EngineProtocolError
from tierkv.scheduler.requests.record import RequestRecord
from tierkv.types.engine import NULL_BLOCK_ID, Block, BlockTables
from tierkv.types.geometry import Geometry, GroupGeometry, cdiv
from tierkv.types.keys import Key
from tierkv.types.transfers import ChunksInBlocks, SlotRef, TransferJob

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Keys to load and their destination blocks; fields as in :class:`~tierkv.types.transfers.TransferJob`."""

    keys: tuple[Key, ...]
    chunk_groups: tuple[int, ...]
    block_ids: Sequence[int]
    group_sizes: tuple[int, ...]
    block_indices: tuple[int, ...]

    @property
    def reads_late(self) -> bool:
        """Whether the blocks are read as the jobs are made, and count as written from then on."""
        return isinstance(self.block_ids, LateBlockIds)

    def job(self, job_id: int, request_id: str, slots: tuple[SlotRef, ...], *, ends_load: bool = True) -> TransferJob:
        """Transfer job of the plan, for the workers."""
        return TransferJob(
            job_id=job_id,
            request_id=request_id,
            is_store=False,
            keys=self.keys,
            slots=slots,
            chunk_groups=self.chunk_groups,
            block_ids=tuple(self.block_ids),
            group_sizes=self.group_sizes,
            block_indices=self.block_indices,
            ends_load=ends_load,
        )


class LateBlockIds(Sequence[int]):
    """Ids of the blocks of a long load, which are read when they are asked for: a part of them for each job."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        """Ids of some blocks."""
        if isinstance(index, slice):
            return [block.block_id for block in self._blocks[index]]
        return self._blocks[index].block_id


def chunks_of_groups(load: ChunksInBlocks, blocks_per_chunk: int) -> list[int]:
    """Number of chunks of each group. They follow one another."""
    runs, per_chunk = zip(load.block_indices, load.group_sizes, strict=True), blocks_per_chunk
    return [cdiv(first + size, per_chunk) - first // per_chunk if size else 0 for first, size in runs]


def blocks_of_keys(load: ChunksInBlocks, keys: Container[Key], blocks_per_chunk: int) -> set[int]:
    """GPU blocks of those chunks of a load that are in ``keys``."""
    found: set[int] = set()
    ids, per_chunk, position, first = load.block_ids, blocks_per_chunk, 0, 0
    for index, size, count in zip(load.block_indices, load.group_sizes, chunks_of_groups(load, per_chunk), strict=True):
        start, stop = first - index % per_chunk, first + size
        for key in load.keys[position : position + count]:
            if key in keys:
                found.update(ids[max(start, first) : min(start + per_chunk, stop)])
            start += per_chunk
        position, first = position + count, stop
    return found


def tokens_of_chunks(plan: LoadPlan, geometry: Geometry, start: int, end: int) -> list[int]:
    """Number of tokens from ``start`` to ``end`` that each chunk of a load represents; the sum is ``end - start``.

    Only chunks of one group count, so that groups of different sizes count no token twice: the first group in lookup
    order (full attention first) that loads any chunk. Tokens before its first chunk (in blocks that the engine has, or
    outside a window) count for that chunk.
    """
    lead = next((index for index in geometry.lookup_order if plan.group_sizes[index]), None)
    if lead is None:
        return []
    size = geometry.groups[lead].chunk_tokens
    counts = chunks_of_groups(plan, geometry.blocks_per_chunk)
    at, count = sum(counts[:lead]), counts[lead]
    chunk = plan.block_indices[lead] // geometry.blocks_per_chunk
    tokens = [size] * count
    if count < len(plan.keys):
        tokens = [0] * at + tokens + [0] * (len(plan.keys) - at - count)
    tokens[at] -= start - chunk * size
    tokens[at + count - 1] -= (chunk + count) * size - end
    return tokens


class _GroupRun(NamedTuple):
    """Chunks of one group in a load plan. They follow one another, in the plan and in the group's table."""

    first_position: int
    """Position of its first chunk in the plan."""
    num_chunks: int
    """Number of its chunks."""
    first_chunk: int
    """Number of that chunk in the request."""
    first_block: int
    """Index in the group's table of the first block to fill."""
    offset: int
    """Index of that block in ``block_ids``."""
    stop: int
    """Index in ``block_ids`` behind its last block."""


class ChunksOfPlan:
    """Chunks of a load, from which parts of it are made. Making one costs next to nothing per chunk.

    Attributes:
        starts: per chunk, its first token.
        ends: per chunk, the token behind its last one.
    """

    def __init__(self, plan: ChunksInBlocks, geometry: Geometry) -> None:
        self.plan = plan
        self._blocks_per_chunk = geometry.blocks_per_chunk
        self._runs: list[_GroupRun] = []
        starts: list[range] = []
        ends: list[range] = []
        offset = position = 0
        counts = chunks_of_groups(plan, geometry.blocks_per_chunk)
        for group, first, size, count in zip(
            geometry.groups, plan.block_indices, plan.group_sizes, counts, strict=True
        ):
            chunk, tokens = first // geometry.blocks_per_chunk, group.chunk_tokens
            self._runs.append(_GroupRun(position, count, chunk, first, offset, offset + size))
            if count:
                starts.append(range(chunk * tokens, (chunk + count) * tokens, tokens))
                ends.append(range((chunk + 1) * tokens, (chunk + count + 1) * tokens, tokens))
            offset, position = offset + size, position + count
        self._has_one_group = len(starts) == 1
        self.starts: Sequence[int] = starts[0] if self._has_one_group else [*chain.from_iterable(starts)]
        self.ends: Sequence[int] = ends[0] if self._has_one_group else [*chain.from_iterable(ends)]

    def find_null(self, positions: Sequence[int]) -> int | None:
        """Index in the table of a null block among those of adjacent chunks of the only group; None: there is none."""
        if not positions:
            return None
        run = self._runs[self.plan.chunk_groups[positions[0]]]
        first, offset, behind = self._blocks(run, positions[0], positions[-1] + 1)
        ids = self.plan.block_ids[offset:behind]
        return first + ids.index(NULL_BLOCK_ID) if NULL_BLOCK_ID in ids else None

    def in_order(self) -> Sequence[int]:
        """Positions of all chunks, in the order in which they end."""
        positions = range(len(self.ends))
        return positions if self._has_one_group else sorted(positions, key=self.ends.__getitem__)

    def part(self, positions: Sequence[int]) -> LoadPlan:
        """Load plan of the chunks at these positions only, in ascending order."""
        plan = self.plan
        sizes, indices = [0] * len(self._runs), [0] * len(self._runs)
        keys: list[Key] = []
        groups: list[int] = []
        block_ids: list[int] = []
        for first_position, end in _ranges(positions):
            start = first_position
            while start < end:  # one group after the other
                group = plan.chunk_groups[start]
                run = self._runs[group]
                stop = min(end, run.first_position + run.num_chunks)
                first, offset, behind = self._blocks(run, start, stop)
                if not sizes[group]:
                    indices[group] = first
                sizes[group] += behind - offset
                keys += plan.keys[start:stop]
                groups += [group] * (stop - start)
                block_ids += plan.block_ids[offset:behind]
                start = stop
        return LoadPlan(tuple(keys), tuple(groups), tuple(block_ids), tuple(sizes), tuple(indices))

    def _blocks(self, run: _GroupRun, start: int, stop: int) -> tuple[int, int, int]:
        """Index in the table of the first block to fill of adjacent chunks; start and stop in ``block_ids``."""
        size = self._blocks_per_chunk
        first = (run.first_chunk + start - run.first_position) * size
        offset = run.offset + first - run.first_block
        behind = min(offset + (stop - start) * size, run.stop)
        return max(first, run.first_block), max(offset, run.offset), behind


def _ranges(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Start and stop of each run of adjacent positions."""
    if positions and positions[-1] - positions[0] + 1 == len(positions):  # ascending, so there is no gap
        yield positions[0], positions[-1] + 1
        return
    for _, pairs in groupby(enumerate(positions), lambda pair: pair[1] - pair[0]):
        run = [position for _, position in pairs]
        yield run[0], run[-1] + 1


def plan_load(  # noqa: PLR0913, PLR0917 - a load and its bound
    record: RequestRecord,
    geometry: Geometry,
    blocks: BlockTables,
    computed_tokens: int,
    external_tokens: int,
    chunks_max: float = math.inf,
) -> LoadPlan:
    """Destination of tokens C to C + external, group by group.

    chunks_max: chunks whose block ids are read, and checked, at once. Of a longer load in an engine with one group, of
    full attention, those of the others are checked in later steps (:meth:`.Stream.check_blocks`).

    Raises:
        EngineProtocolError: a table is too short, covers locally computed tokens with unfilled blocks, has more blocks
            to fill than a window needs, the null block or a block twice among them, or the null block where the hit
            ends.
    """
    total, request_id = computed_tokens + external_tokens, record.ctx.request_id
    keys: list[Sequence[Key]] = []
    chunk_groups: tuple[int, ...] = ()
    to_fill: list[Sequence[Block]] = []
    block_ids: list[int] = []
    sizes: list[int] = []
    indices: list[int] = []
    is_split = not geometry.has_windows and len(geometry.groups) == 1
    ids_max = chunks_max * geometry.blocks_per_chunk if is_split else math.inf
    for group, table in zip(geometry.groups, blocks, strict=True):
        end = cdiv(total, group.block_tokens)
        if len(table) < end:
            raise _refusal(request_id, group, f"{len(table)} blocks for {total} tokens, {end} are needed")
        first = _first_to_load(request_id, group, table, computed_tokens, end)
        _check_window(request_id, group, end - first)
        sizes.append(end - first)
        indices.append(first if end > first else 0)
        if end > first:
            run = _keys_of(record, group.index, first // geometry.blocks_per_chunk, cdiv(total, group.chunk_tokens))
            keys.append(run)
            chunk_groups += (group.index,) * len(run)
            to_fill.append(table[first:end])
            ids = [block.block_id for block in table[first : int(min(end, first + ids_max))]]
            if NULL_BLOCK_ID in ids:
                null = first + ids.index(NULL_BLOCK_ID)
                why = f"block {null} is the null block, but block {first} before it is to be loaded"
                raise _refusal(request_id, group, why)
            if len(set(ids)) < len(ids):
                twice = next(block for block, count in Counter(ids).items() if count > 1)
                raise _refusal(request_id, group, f"two blocks to load have the id {twice}: give each its own")
            block_ids += ids
    reads_late = len(block_ids) < sum(sizes)
    ids_of_all = LateBlockIds(to_fill[0]) if reads_late else tuple(block_ids)
    return LoadPlan(_joined(keys), chunk_groups, ids_of_all, tuple(sizes), tuple(indices))


def _refusal(request_id: str, group: GroupGeometry, why: str) -> EngineProtocolError:
    return EngineProtocolError(f"request {request_id!r}, group {group.index}: {why}", request_id=request_id)


def _keys_of(record: RequestRecord, group: int, start: int, stop: int) -> Sequence[Key]:
    """Keys of a run of chunks: those of the hit as they are, if they are all of them. Hashes are chained."""
    keys, wanted = record.groups[group].keys, record.lookup.wanted
    is_whole = len(record.groups) == 1 and len(wanted) == stop - start <= len(keys) - start
    return wanted if is_whole and wanted[0] == keys[start] and wanted[-1] == keys[stop - 1] else keys[start:stop]


def _joined(runs: Sequence[Sequence[_T]]) -> tuple[_T, ...]:
    """All runs in one tuple."""
    return tuple(runs[0]) if len(runs) == 1 else tuple(chain.from_iterable(runs))


def _first_to_load(
    request_id: str, group: GroupGeometry, table: Sequence[Block], computed_tokens: int, end: int
) -> int:
    """Index of the first block up to ``end`` to load: not a null block, content not computed (S58, S59)."""
    partly = computed_tokens // group.block_tokens
    if computed_tokens % group.block_tokens and _is_unfilled(table[partly]):
        why = f"block {partly} is unfilled, but {computed_tokens} tokens are reported as computed"
        raise _refusal(request_id, group, why)
    start = cdiv(computed_tokens, group.block_tokens)
    if group.window_chunks is not None:
        start = _behind_nulls(table, start, end - _pending_max(group.window_chunks, group))
    for i in range(start, end):
        if _is_unfilled(table[i]):
            return i
    if start < end and group.needs_end and table[end - 1].is_null:
        raise _refusal(request_id, group, f"block {end - 1} is the null block, but the hit ends in it, and needs it")
    return end


def _behind_nulls(table: Sequence[Block], start: int, stop: int) -> int:
    """Position ``stop`` if the null block fills the table from ``start`` to there, as before a window.

    Otherwise ``start``. A long prompt has thousands of such entries in each group with a window. They are
    compared by identity.
    """
    if start >= stop or not table[start].is_null:
        return start
    return stop if list(table[start:stop]).count(table[start]) == stop - start else start


def _pending_max(window_chunks: int, group: GroupGeometry) -> int:
    """Blocks to fill of a window at most: one that begins inside a block touches one more than it fills."""
    return window_chunks * (group.chunk_tokens // group.block_tokens) + 1


def _is_unfilled(block: Block) -> bool:
    return block.block_hash is None and not block.is_null


def _check_window(request_id: str, group: GroupGeometry, pending: int) -> None:
    """Check the number of blocks to fill of a group with a window."""
    if group.window_chunks is None:
        return
    pending_max = _pending_max(group.window_chunks, group)
    if pending > pending_max:
        kind = group.kind.value
        why = f"{pending} blocks are to be loaded, but its {kind} group needs {pending_max} at most"
        raise _refusal(request_id, group, f"{why}: put the null block for those before the window")
