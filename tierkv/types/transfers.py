"""What travels between scheduler and worker: GPU <-> host transfers and their results.

All of it is plain data that pickles, because workers may be other processes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tierkv.types.keys import Key

NO_REQUEST = ""
"""The request id of a job that belongs to no request."""


class SlotRef(NamedTuple):
    """A lease on one slot of the host arena. A reference of an older generation is void (architecture: leases).

    A named tuple, because one is made per chunk and store: a frozen dataclass takes three times as long to make.
    """

    slot: int
    generation: int


VOID_SLOT = SlotRef(-1, -1)
"""In place of a slot, in a load: this chunk will not come. No arena has such a slot and no lease its generation; the
worker reports the chunk as failed, and touches no memory for it."""


@dataclass(frozen=True, slots=True)
class TransferJob:
    """One store (GPU to host) or load (host to GPU) of some chunks of one request.

    request_id: whose chunks they are; ``NO_REQUEST`` where a store concerns blocks that nobody uses any more.
    keys, slots: one per chunk, groups in order, and within a group by position; chunks between two of them may be
        missing. A load may have ``VOID_SLOT`` for some.
    chunk_groups: the group of each chunk.
    block_ids: GPU blocks of all groups, flat, groups in order.
    group_sizes: how many entries of ``block_ids`` belong to each group (0 allowed).
    block_indices: per group, index in the request's table of the first block in ``block_ids``; modulo the blocks per
        chunk it says how many blocks of the first chunk are skipped.
    ends_load: of a load: it is the last job of it. False: more jobs of the same load follow (a load that streams).
    """

    job_id: int
    request_id: str
    is_store: bool
    keys: tuple[Key, ...]
    slots: tuple[SlotRef, ...]
    chunk_groups: tuple[int, ...]
    block_ids: tuple[int, ...]
    group_sizes: tuple[int, ...]
    block_indices: tuple[int, ...]
    ends_load: bool = True


class ChunksInBlocks(Protocol):
    """Chunks, and the GPU blocks that they go to or come from; fields as in :class:`TransferJob`."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """One per chunk."""

    @property
    def chunk_groups(self) -> tuple[int, ...]:
        """The group of each chunk."""

    @property
    def block_ids(self) -> tuple[int, ...]:
        """GPU blocks, flat."""

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Blocks of each group."""

    @property
    def block_indices(self) -> tuple[int, ...]:
        """Where the first block of each group stands."""


def blocks_of_groups(job: TransferJob, groups: Container[int]) -> list[int]:
    """The GPU blocks of a job that belong to some groups."""
    ids: list[int] = []
    offset = 0
    for group, size in enumerate(job.group_sizes):
        if group in groups:
            ids += job.block_ids[offset : offset + size]
        offset += size
    return ids


def chunk_blocks(job: ChunksInBlocks, blocks_per_chunk: int) -> list[tuple[int, tuple[int, ...]]]:
    """Per chunk of a job: how many blocks of it are skipped at its front, and the GPU blocks of the rest.

    Source: spec, section 9: one entry of ``group_sizes`` per group; the first chunk of a group may be skipped into, the
    last may be covered only in part.
    """
    result: list[tuple[int, tuple[int, ...]]] = []
    offset = chunk = 0
    for group, size in enumerate(job.group_sizes):
        end = offset + size
        skip = job.block_indices[group] % blocks_per_chunk
        while chunk < len(job.keys) and job.chunk_groups[chunk] == group:
            take = min(blocks_per_chunk - skip, end - offset)
            result.append((skip, job.block_ids[offset : offset + take]))
            offset, chunk, skip = offset + take, chunk + 1, 0
        offset = end
    return result


@dataclass(frozen=True, slots=True)
class ConnectorMeta:
    """Instructions of one step to every worker: a snapshot that later scheduling does not change.

    jobs_to_flush: jobs that must be finished before the forward pass of this step may write a GPU block.
    """

    loads: tuple[TransferJob, ...] = ()
    stores: tuple[TransferJob, ...] = ()
    jobs_to_flush: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class WorkerOutput:
    """What workers report after a step. Outputs of several workers are joined by :meth:`aggregate`.

    finished: job id -> number of workers that ended it since the last report.
    failed_keys: job id -> keys of it that failed (absent: none failed).
    parts: job id -> rank -> checksum of that worker's part of each chunk, in the job's order (empty bytes: failed; no
        checksums at all: a load). Only where several workers share a stack, which seals a chunk from all of them.
    transfers: operations that ended, by transfer type, each a mapping of ``op_size`` (bytes) and ``op_time`` (seconds).
    """

    finished: Mapping[int, int] = field(default_factory=dict)
    failed_keys: Mapping[int, frozenset[Key]] = field(default_factory=dict)
    parts: Mapping[int, Mapping[int, tuple[bytes, ...]]] = field(default_factory=dict)
    transfers: Mapping[str, Sequence[Mapping[str, float]]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not self.finished

    @staticmethod
    def aggregate(outputs: Iterable[WorkerOutput]) -> WorkerOutput:
        """Sum the counts, join failures and parts; the sources are left as they are (S89)."""
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
