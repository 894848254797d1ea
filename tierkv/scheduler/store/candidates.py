"""Candidates for storing, and their source blocks: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from tierkv.scheduler.requests.record import GroupRecord, RequestRecord
from tierkv.types.engine import NULL_BLOCK_ID
from tierkv.types.geometry import Geometry, GroupGeometry
from tierkv.types.keys import Key


class Candidate(NamedTuple):
    """Chunk whose blocks are all computed."""

    key: Key
    group: int
    number: int
    """Index of the chunk in its group."""
    end_token: int


@dataclass(frozen=True, slots=True)
class Candidates:
    """Chunks whose blocks are all computed, in columns: a run of a prompt needs no object per chunk."""

    keys: Sequence[Key] = ()
    groups: Sequence[int] = ()
    numbers: Sequence[int] = ()
    """Index of each chunk in its group."""
    end_tokens: Sequence[int] = ()

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.keys)

    def __iter__(self) -> Iterator[Candidate]:
        """Iterate over the chunks."""
        return map(Candidate, self.keys, self.groups, self.numbers, self.end_tokens)

    def part(self, start: int, stop: int) -> Candidates:
        """Chunks from ``start`` to ``stop``."""
        chosen = slice(start, stop)
        return Candidates(self.keys[chosen], self.groups[chosen], self.numbers[chosen], self.end_tokens[chosen])

    def chosen(self, indices: Sequence[int]) -> Candidates:
        """Chunks at these indices, in this order."""
        keys, groups, numbers, end_tokens = self.keys, self.groups, self.numbers, self.end_tokens
        return Candidates(
            [keys[i] for i in indices],
            [groups[i] for i in indices],
            [numbers[i] for i in indices],
            [end_tokens[i] for i in indices],
        )


@dataclass(frozen=True, slots=True)
class SourceBlocks:
    """Source blocks of the granted chunks of one job; fields as in :class:`~tierkv.types.transfers.TransferJob`."""

    chunks: Sequence[int]
    """Indices into the granted chunks."""
    chunk_groups: tuple[int, ...]
    block_ids: tuple[int, ...]
    group_sizes: tuple[int, ...]
    block_indices: tuple[int, ...]


def storable_chunks(
    group: GroupGeometry, state: GroupRecord, factor: int, tokens: int, chunks_max: int | None = None
) -> Iterable[int]:
    """Indices of chunks that were not offered, end within ``tokens``, and can serve a later request, in order.

    Left out are chunks in which no hit can end (S68), and chunks without a block that a hit would need: the window has
    passed it, or the engine has reused it (S69, S78). chunks_max: largest number of chunks; None: any.
    """
    first, stop = state.next_stored, _stop(group, state, factor, tokens)
    end = stop if chunks_max is None else min(stop, first + chunks_max)
    if group.aligned_chunks is None and NULL_BLOCK_ID not in state.block_ids[first * factor : end * factor]:
        return range(first, end)  # usual, and without a step of the interpreter per chunk
    return islice(_storable(group, state, factor, stop), chunks_max)


def _storable(group: GroupGeometry, state: GroupRecord, factor: int, stop: int) -> Iterator[int]:
    aligned, useful = group.aligned_chunks or 1, group.window_chunks or 1
    for i in range(state.next_stored, stop):
        if i % aligned < aligned - useful:
            continue
        end = (i + 1) * factor
        if NULL_BLOCK_ID not in state.block_ids[end - group.tail_blocks : end]:
            yield i


def _stop(group: GroupGeometry, state: GroupRecord, factor: int, tokens: int) -> int:
    return min(tokens // group.chunk_tokens, len(state.keys), len(state.block_ids) // factor)


def skip_useless(record: RequestRecord, geometry: Geometry, tokens: int) -> bool:
    """Move each group's cursor to its first storable chunk, so that chunks before it are checked only once.

    Returns:
        Whether there is a storable chunk. In most steps of most requests there is none.
    """
    found = False
    factor = geometry.blocks_per_chunk
    for group, state in zip(geometry.groups, record.groups, strict=True):
        stop, first = _stop(group, state, factor, tokens), state.next_stored
        if first >= stop:
            continue
        if group.aligned_chunks is not None or NULL_BLOCK_ID in state.block_ids[first * factor : (first + 1) * factor]:
            state.next_stored = next(iter(storable_chunks(group, state, factor, tokens, 1)), stop)
        found = found or state.next_stored < stop
    return found


def count_storable(record: RequestRecord, geometry: Geometry, tokens: int) -> int:
    """Number of storable chunks within ``tokens`` that were not offered."""
    return sum(
        1
        for group, state in zip(geometry.groups, record.groups, strict=True)
        for _ in storable_chunks(group, state, geometry.blocks_per_chunk, tokens)
    )


def candidates(record: RequestRecord, geometry: Geometry, tokens: int, chunks_max: int) -> Candidates:
    """Storable chunks within ``tokens``, ordered by group; at most ``chunks_max``, the nearest to the start."""
    factor = geometry.blocks_per_chunk
    found = [
        _candidates_of(group, state, storable_chunks(group, state, factor, tokens, chunks_max))
        for group, state in zip(geometry.groups, record.groups, strict=True)
    ]
    if len(found) == 1:
        return found[0]
    joined = Candidates(
        list(chain.from_iterable(of.keys for of in found)),
        list(chain.from_iterable(of.groups for of in found)),
        list(chain.from_iterable(of.numbers for of in found)),
        list(chain.from_iterable(of.end_tokens for of in found)),
    )
    if len(joined) <= chunks_max:
        return joined
    nearest = sorted(range(len(joined)), key=joined.end_tokens.__getitem__)[:chunks_max]
    return joined.chosen(sorted(nearest))


def _candidates_of(group: GroupGeometry, state: GroupRecord, numbers: Iterable[int]) -> Candidates:
    size = group.chunk_tokens
    if isinstance(numbers, range):
        first, stop = numbers.start, numbers.stop
        ends = range((first + 1) * size, (stop + 1) * size, size)
        return Candidates(state.keys[first:stop], (group.index,) * len(numbers), numbers, ends)
    some = list(numbers)
    return Candidates([state.keys[i] for i in some], (group.index,) * len(some), some, [(i + 1) * size for i in some])


def source_blocks(record: RequestRecord, geometry: Geometry, granted: Candidates) -> list[SourceBlocks]:
    """Source blocks of the granted candidates (ordered by group), one entry per job.

    Of a chunk with null blocks only the blocks behind the last one are taken, and the sizes count only these. A job can
    leave out blocks only at the front of a group (S70), so a later chunk with null blocks begins another job.
    """
    if not granted.keys:
        return []
    whole = _whole_runs(record, geometry, granted)
    if whole is not None:
        return [whole]
    tails = [
        _tail(record.groups[group], number, geometry.blocks_per_chunk)
        for group, number in zip(granted.groups, granted.numbers, strict=True)
    ]
    parts = _split(granted.groups, tails, geometry)
    return [_one_job(granted.groups, tails, part, len(geometry.groups)) for part in parts]


def _whole_runs(record: RequestRecord, geometry: Geometry, granted: Candidates) -> SourceBlocks | None:
    """The one job of chunks that follow one another in each group and have all their blocks; None if some do not.

    Usual, and without a step of the interpreter per chunk.
    """
    factor, groups, numbers, count = geometry.blocks_per_chunk, granted.groups, granted.numbers, len(granted.keys)
    block_ids: list[int] = []
    sizes, indices = [0] * len(geometry.groups), [0] * len(geometry.groups)
    start = 0
    while start < count:
        group = groups[start]
        stop = start + groups.count(group)
        first, end = numbers[start], numbers[stop - 1] + 1
        ids = record.groups[group].block_ids[first * factor : end * factor]
        if end - first != stop - start or NULL_BLOCK_ID in ids:
            return None
        block_ids += ids
        sizes[group], indices[group] = len(ids), first * factor
        start = stop
    return SourceBlocks(range(count), tuple(groups), tuple(block_ids), tuple(sizes), tuple(indices))


def _tail(state: GroupRecord, index: int, factor: int) -> tuple[int, tuple[int, ...]]:
    """Position in the table, and ids, of a chunk's blocks behind its last null block."""
    first, end = index * factor, (index + 1) * factor
    ids = tuple(state.block_ids[first:end])
    if NULL_BLOCK_ID in ids:
        behind = factor - ids[::-1].index(NULL_BLOCK_ID)
        first, ids = first + behind, ids[behind:]
    return first, ids


def _split(groups: Sequence[int], tails: Sequence[tuple[int, tuple[int, ...]]], geometry: Geometry) -> list[list[int]]:
    """Indices of the granted chunks, job by job."""
    if {len(ids) for _, ids in tails} == {geometry.blocks_per_chunk}:
        return [list(range(len(groups)))]
    parts: list[list[int]] = []
    group = part = -1
    for i, of_chunk in enumerate(groups):
        if of_chunk != group:
            group, part = of_chunk, 0
        elif len(tails[i][1]) < geometry.blocks_per_chunk:
            part += 1
        if part == len(parts):
            parts.append([])
        parts[part].append(i)
    return parts


def _one_job(
    groups: Sequence[int], tails: Sequence[tuple[int, tuple[int, ...]]], part: Sequence[int], num_groups: int
) -> SourceBlocks:
    block_ids: list[int] = []
    sizes, indices = [0] * num_groups, [0] * num_groups
    for i in part:
        first, ids = tails[i]
        group = groups[i]
        if not sizes[group]:
            indices[group] = first
        sizes[group] += len(ids)
        block_ids += ids
    of_chunks = tuple([groups[i] for i in part])
    return SourceBlocks(tuple(part), of_chunks, tuple(block_ids), tuple(sizes), tuple(indices))
