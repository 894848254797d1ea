"""Transfers between GPU and host memory, and their results: the values exchanged by scheduler and worker.

All values can be pickled, because workers may run in other processes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tierkv.types.keys import Key

NO_REQUEST = ""
"""Request id of a job that belongs to no request."""


class SlotRef(NamedTuple):
    """Lease on one slot of the host arena. A reference of an older generation is void (architecture: leases).

    A named tuple, because one is made per chunk and store: creating a frozen dataclass takes three times as long.
    """

    slot: int
    """Number of the slot."""
    generation: int
    """Generation of the slot when the lease was made."""


VOID_SLOT = SlotRef(-1, -1)
"""Placeholder for the slot of a chunk that will not be loaded. No arena has this slot and no lease its generation.

The worker reports the chunk as failed and accesses no memory for it.
"""


@dataclass(frozen=True, slots=True)
class TransferJob:
    """One store (GPU to host) or load (host to GPU) of some chunks of one request."""

    job_id: int
    """Number of the job."""
    request_id: str
    """Request that the chunks belong to; ``NO_REQUEST`` for a store of free blocks."""
    is_store: bool
    """Whether the job is a store."""
    keys: tuple[Key, ...]
    """One per chunk: group by group, and by position within a group. Chunks between two entries may be missing."""
    slots: tuple[SlotRef, ...]
    """One per chunk. A load may have ``VOID_SLOT`` for some."""
    chunk_groups: tuple[int, ...]
    """Group of each chunk."""
    block_ids: tuple[int, ...]
    """GPU blocks of all groups, flat, group by group."""
    group_sizes: tuple[int, ...]
    """Number of entries of ``block_ids`` per group; may be 0."""
    block_indices: tuple[int, ...]
    """Per group, index in the request's table of the first block in ``block_ids``. Modulo the blocks per chunk, it is
    the number of skipped blocks of the first chunk."""
    ends_load: bool = True
    """Whether a load job is the last of its load. False: more jobs of the load follow. The last can end first."""


@dataclass(frozen=True, slots=True)
class StagedTransfer:
    """One store or load for an engine that schedules itself: the instructions to its workers, without their blocks."""

    number: int
    """Each worker calls ``mark_ended`` with it when it has ended the job."""
    keys: tuple[Key, ...]
    """Chunks, in order."""
    groups: tuple[int, ...]
    """Group of each chunk."""
    slots: tuple[SlotRef, ...]
    """Host slot of each chunk."""


@dataclass(frozen=True, slots=True)
class StagedStore:
    """An accepted store. Without keys there is nothing to copy."""

    transfer: StagedTransfer
    """Instructions to the workers."""
    evicted: tuple[Key, ...]
    """Chunks evicted from the host tier to make room."""


class ChunksInBlocks(Protocol):
    """Chunks and their GPU blocks, with fields as in :class:`TransferJob`."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """Keys, one per chunk."""

    @property
    def chunk_groups(self) -> tuple[int, ...]:
        """Group of each chunk."""

    @property
    def block_ids(self) -> Sequence[int]:
        """GPU blocks of all groups, flat."""

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Number of blocks per group."""

    @property
    def block_indices(self) -> tuple[int, ...]:
        """Index in the request's table of the first block, per group."""


def blocks_of_groups(job: TransferJob, groups: Container[int]) -> list[int]:
    """GPU blocks of a job that belong to the given groups."""
    ids: list[int] = []
    offset = 0
    for group, size in enumerate(job.group_sizes):
        if group in groups:
            ids += job.block_ids[offset : offset + size]
        offset += size
    return ids


def chunk_blocks(job: ChunksInBlocks, blocks_per_chunk: int) -> list[tuple[int, tuple[int, ...]]]:
    """Per chunk of a job: number of skipped blocks at its front, and the GPU blocks of the rest.

    The first chunk of a group may begin with skipped blocks. The last may be covered only in
    part.
    """
    result: list[tuple[int, tuple[int, ...]]] = []
    offset = chunk = 0
    for group, size in enumerate(job.group_sizes):
        end = offset + size
        skip = job.block_indices[group] % blocks_per_chunk
        while chunk < len(job.keys) and job.chunk_groups[chunk] == group:
            take = min(blocks_per_chunk - skip, end - offset)
            result.append((skip, tuple(job.block_ids[offset : offset + take])))
            offset, chunk, skip = offset + take, chunk + 1, 0
        offset = end
    return result


@dataclass(frozen=True, slots=True)
class ConnectorMeta:
    """Instructions of one step to every worker: a snapshot that later scheduling does not change."""

    loads: tuple[TransferJob, ...] = ()
    """Loads to start."""
    stores: tuple[TransferJob, ...] = ()
    """Stores to queue."""
    jobs_to_flush: frozenset[int] = frozenset()
    """Jobs that must finish before the forward pass of this step may write a GPU block."""


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """Report of the workers after a step. :meth:`aggregate` joins the outputs of several workers."""

    finished: Mapping[int, int] = field(default_factory=dict)
    """Job id -> number of workers that ended the job since the previous report."""
    failed_keys: Mapping[int, frozenset[Key]] = field(default_factory=dict)
    """Job id -> keys that failed; absent if none failed."""
    parts: Mapping[int, Mapping[int, tuple[bytes, ...]]] = field(default_factory=dict)
    """Job id -> rank -> checksum of that worker's part of each chunk, in the order of the job. Empty bytes: the part
    failed. No checksums: a load. Only used where several workers share a stack, which seals a chunk from all parts."""
    transfers: Mapping[str, Sequence[Mapping[str, float]]] = field(default_factory=dict)
    """Ended operations by transfer type, each a mapping of ``op_size`` (bytes) and ``op_time`` (seconds)."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not self.finished

    @staticmethod
    def aggregate(outputs: Iterable[WorkerOutput]) -> WorkerOutput:
        """Sum the counts, and join failures and parts. The sources are not changed (S89)."""
        finished: dict[int, int] = {}
        failed: dict[int, frozenset[Key]] = {}
        parts: dict[int, dict[int, tuple[bytes, ...]]] = {}
        transfers: dict[str, list[Mapping[str, float]]] = {}
        for output in outputs:
            for job_id, count in output.finished.items():
                finished[job_id] = finished.get(job_id, 0) + count
            for job_id, keys in output.failed_keys.items():
                failed[job_id] = failed.get(job_id, frozenset()) | keys
            for job_id, by_rank in output.parts.items():
                parts.setdefault(job_id, {}).update(by_rank)
            for transfer_type, operations in output.transfers.items():
                transfers.setdefault(transfer_type, []).extend(operations)
        return WorkerOutput(finished, failed, parts, transfers)
