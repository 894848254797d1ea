"""Which chunks of a request are worth storing, and from which blocks: pure functions (spec, section 10)."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.scheduler.records import RequestRecord
from tierkv.types.engine import NULL_BLOCK_ID
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key


@dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk whose blocks are all computed: chunk ``index`` of ``group``."""

    key: Key
    group: int
    index: int
    end_token: int


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Source blocks of granted chunks; fields as in :class:`~tierkv.types.transfers.TransferJob`."""

    chunk_groups: tuple[int, ...]
    block_ids: tuple[int, ...]
    group_sizes: tuple[int, ...]
    block_indices: tuple[int, ...]


def candidates(record: RequestRecord, geometry: Geometry, offload_tokens: int, chunks_max: int) -> list[Candidate]:
    """Chunks not yet offered that end within ``offload_tokens``, ordered by group.

    At most ``chunks_max``: those nearest to the start. Chunks whose last block is a placeholder are skipped.
    """
    found: list[Candidate] = []
    factor = geometry.blocks_per_chunk
    for group, state in zip(geometry.groups, record.groups, strict=True):
        stop = min(offload_tokens // group.chunk_tokens, len(state.keys), len(state.block_ids) // factor)
        for i in range(state.next_stored, min(stop, state.next_stored + chunks_max)):
            if state.block_ids[(i + 1) * factor - 1] != NULL_BLOCK_ID:
                found.append(Candidate(state.keys[i], group.index, i, (i + 1) * group.chunk_tokens))
    found.sort(key=lambda candidate: candidate.end_token)
    return sorted(found[:chunks_max], key=lambda candidate: (candidate.group, candidate.index))


def plan_store(record: RequestRecord, geometry: Geometry, granted: list[Candidate]) -> StorePlan:
    """Source blocks of the granted candidates, group by group.

    Leading placeholder blocks of a chunk are left out, and the sizes count what is really there.
    """
    factor = geometry.blocks_per_chunk
    block_ids: list[int] = []
    sizes: list[int] = []
    indices: list[int] = []
    for group, state in zip(geometry.groups, record.groups, strict=True):
        ids: list[int] = []
        first: int | None = None
        for candidate in granted:
            if candidate.group != group.index:
                continue
            for i in range(candidate.index * factor, (candidate.index + 1) * factor):
                if state.block_ids[i] != NULL_BLOCK_ID:
                    first = i if first is None else first
                    ids.append(state.block_ids[i])
        block_ids += ids
        sizes.append(len(ids))
        indices.append(first or 0)
    return StorePlan(tuple(candidate.group for candidate in granted), tuple(block_ids), tuple(sizes), tuple(indices))
