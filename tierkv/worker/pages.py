"""Pages of the engine's KV tensors as bytes: gathered into a part of a chunk's payload, and scattered from it.

A worker's part of a chunk holds, for each tensor of the group in turn, the pages of all its blocks. Each tensor takes
one ``numpy.take``, never a Python loop over pages: it is 1.5 to 3 times as fast, and releases the GIL.

A worker with several parts has the heads of all of them in each page. Each part takes its heads from every page, so it
equals the part of a worker with these heads alone. These copies are strided, one for each tensor and part.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from tierkv.errors import EngineProtocolError
from tierkv.memory.arena import Bytes
from tierkv.types.geometry import Geometry, GroupGeometry
from tierkv.types.transfers import ChunksInBlocks

_PIECE_BYTES = 256 << 10
"""Bytes that are copied before they are given out for a checksum: they fit the cache of a core."""


class HostPages:
    """KV tensors of one worker, in memory that the CPU can address.

    Args:
        geometry: sizes of groups and chunks.
        caches: per group, its tensors (torch on the CPU, or numpy), each ``[num_blocks, ...]`` and contiguous, with
            ``page_bytes`` bytes per block as the engine's spec says.

    Raises:
        EngineProtocolError: number, shape or device of the tensors differ from the spec; the message names the tensor.
    """

    def __init__(self, geometry: Geometry, caches: Sequence[Sequence[Any]]) -> None:
        check_counts(geometry, caches)
        self._blocks_per_chunk = geometry.blocks_per_chunk
        self._groups = geometry.groups
        self._pages = [_group_pages(group, tensors) for group, tensors in zip(geometry.groups, caches, strict=True)]
        self._num_blocks = [min(map(len, pages)) for pages in self._pages]
        self._ranges = [
            _ranges(_pieces(pages, group), geometry.blocks_per_chunk)
            for pages, group in zip(self._pages, geometry.groups, strict=True)
        ]

    def gather(self, group: int, skip: int, block_ids: Sequence[int], part: Bytes) -> None:
        """Copy blocks into this worker's parts of a chunk.

        The first ``skip`` blocks of the chunk, and those behind the last given one, become zeros. So no bytes of the
        slot's previous chunk remain.
        """
        for _ in self.gather_in_pieces(group, skip, block_ids, part):
            pass

    def gather_in_pieces(self, group: int, skip: int, block_ids: Sequence[int], part: Bytes) -> Iterable[Bytes]:
        """Copy blocks as :meth:`gather` does, and give each piece of ``part``, in order, once it is in place.

        The processor's cache still holds a piece when it is given: its checksum then costs half as much.
        """
        end = self._ranges[group][-1][2]
        if self._blocks_per_chunk == len(block_ids) == 1 and end <= _PIECE_BYTES:
            # As in most stores: a page or two, and one piece.
            for pages, start, stop in self._ranges[group]:
                part[start:stop].reshape(pages.shape[1:])[:] = pages[block_ids[0]]
            return (part[:end],)
        return self._pieces(group, skip, block_ids, part)

    def has_blocks(self, job: ChunksInBlocks) -> bool:
        """Whether all blocks of a job exist. One question for a job costs less than one for each chunk."""
        return has_blocks(job, self._num_blocks)

    def _pieces(self, group: int, skip: int, block_ids: Sequence[int], part: Bytes) -> Iterator[Bytes]:
        chunk_blocks, yielded = self._blocks_per_chunk, 0
        ids = np.asarray(block_ids, dtype=np.intp) if chunk_blocks > 1 else block_ids
        for pages, start, end in self._ranges[group]:
            page_bytes = (end - start) // chunk_blocks
            at_once = max(1, _PIECE_BYTES // page_bytes)
            rows = part[start:end].reshape(chunk_blocks, *pages.shape[1:])
            for first in range(0, chunk_blocks, at_once):
                last = min(chunk_blocks, first + at_once)
                if chunk_blocks == len(ids) == 1:
                    rows[0] = pages[ids[0]]
                else:
                    _gather_rows(pages, ids, skip, rows, first, last)
                ready = start + last * page_bytes
                if ready - yielded >= _PIECE_BYTES:
                    yield part[yielded:ready]
                    yielded = ready
        end = self._ranges[group][-1][2]
        if yielded < end:
            yield part[yielded:end]

    def scatter(self, group: int, skip: int, block_ids: Sequence[int], part: Bytes) -> None:
        """Copy a part to blocks, except its first ``skip`` blocks and those behind the last given one."""
        if self._blocks_per_chunk == len(block_ids) == 1:
            for pages, start, end in self._ranges[group]:
                pages[block_ids[0]] = part[start:end].reshape(pages.shape[1:])
            return
        ids = np.asarray(block_ids, dtype=np.intp)
        for pages, start, end in self._ranges[group]:
            rows = part[start:end].reshape(self._blocks_per_chunk, *pages.shape[1:])
            pages[ids] = rows[skip : skip + len(ids)]

    def gather_run(self, group: int, first_block: int, rows: Bytes) -> None:
        """Copy whole chunks, whose blocks follow one another from ``first_block`` on, into their parts, one a row."""
        for blocks, start, end in self._run_of(group, first_block, len(rows)):
            rows[:, start:end] = blocks

    def scatter_run(self, group: int, first_block: int, rows: Bytes) -> None:
        """Copy the parts of whole chunks, one a row, to blocks that follow one another from ``first_block`` on."""
        for blocks, start, end in self._run_of(group, first_block, len(rows)):
            blocks[:] = rows[:, start:end]

    def _run_of(self, group: int, first_block: int, chunks: int) -> Iterator[tuple[Bytes, int, int]]:
        stop = first_block + chunks * self._blocks_per_chunk
        for pages, start, end in self._ranges[group]:
            yield pages[first_block:stop].reshape(chunks, end - start), start, end

    def part_bytes(self, group: int) -> int:
        """Bytes of the pages of a chunk, from the front of its part."""
        return self._ranges[group][-1][2]

    def check_ids(self, group: int, block_ids: Sequence[int]) -> None:
        """Check that block ids exist.

        Raises:
            EngineProtocolError: one does not.
        """
        check_block_ids(group, block_ids, self._num_blocks[group])


def _gather_rows(  # noqa: PLR0913, PLR0917 - two arrays, and a range in each
    pages: Bytes, ids: Sequence[int] | npt.NDArray[np.intp], skip: int, rows: Bytes, first: int, last: int
) -> None:
    """Fill ``rows[first:last]`` with the pages of ``ids``, of which the first belongs to row ``skip``."""
    begin, end = max(first, skip), min(last, skip + len(ids))
    if begin >= end:
        rows[first:last] = 0
        return
    if begin > first:
        rows[first:begin] = 0
    if end < last:
        rows[end:last] = 0
    if end - begin == 1:  # a take costs as much as the copy of a page
        np.copyto(rows[begin], pages[ids[begin - skip]])
    elif pages.flags.c_contiguous:
        # clip: ids were checked; the default mode would copy through a buffer to undo a failed take
        pages.take(ids[begin - skip : end - skip], axis=0, out=rows[begin:end], mode="clip")
    else:  # a take would first copy the whole tensor
        rows[begin:end] = pages[ids[begin - skip : end - skip]]


def check_counts(geometry: Geometry, caches: Sequence[Sequence[Any]]) -> None:
    """Check that the numbers of registered groups and tensors match the spec.

    Raises:
        EngineProtocolError: they do not; the message names the group.
    """
    if not isinstance(caches, Sequence):
        raise EngineProtocolError(
            f"caches = {type(caches).__name__}: give a list with the list of tensors of each group"
        )
    if len(caches) != len(geometry.groups):
        raise EngineProtocolError(
            f"caches of {len(caches)} groups were registered, the spec has {len(geometry.groups)}"
        )
    for group, tensors in zip(geometry.groups, caches, strict=True):
        if not hasattr(tensors, "__len__"):
            raise EngineProtocolError(f"group {group.index}: caches = {tensors!r:.80}: give the list of its tensors")
        if len(tensors) != len(group.page_bytes):
            raise EngineProtocolError(
                f"group {group.index}: {len(tensors)} tensors were registered, the spec has {len(group.page_bytes)}"
            )


def has_blocks(job: ChunksInBlocks, num_blocks: Sequence[int]) -> bool:
    """Whether all blocks of a job exist. num_blocks: number of blocks of each group."""
    start = 0
    for count, size in zip(num_blocks, job.group_sizes, strict=True):
        ids, start = job.block_ids[start : start + size], start + size
        if ids and not 0 <= min(ids) <= max(ids) < count:
            return False
    return True


def check_block_ids(group: int, block_ids: Sequence[int], num_blocks: int) -> None:
    """Check that block ids exist.

    Raises:
        EngineProtocolError: one does not.
    """
    if block_ids and not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
        raise EngineProtocolError(f"group {group}: block ids {block_ids} are not all within 0..{num_blocks - 1}")


def _ranges(tensors: Sequence[Bytes], blocks_per_chunk: int) -> list[tuple[Bytes, int, int]]:
    """Return the pages of each tensor, or the pieces of a part in them, with begin and end of their range."""
    sizes = [pages[0].nbytes * blocks_per_chunk for pages in tensors]
    ends = list(accumulate(sizes))
    return [(pages, end - size, end) for pages, size, end in zip(tensors, sizes, ends, strict=True)]


def _pieces(tensors: Sequence[Bytes], group: GroupGeometry) -> list[Bytes]:
    """Return, part by part, views ``[num_blocks, head_rows, bytes]`` of a part's heads in each tensor's pages.

    With one part these are the pages themselves.
    """
    if group.worker_parts == 1:
        return list(tensors)
    return [
        pages.reshape(len(pages), group.head_rows, group.worker_parts, -1)[:, :, part]
        for part in range(group.worker_parts)
        for pages in tensors
    ]


def _group_pages(group: GroupGeometry, tensors: Sequence[Any]) -> list[Bytes]:
    return [_as_pages(group.index, i, tensor, group.page_bytes[i]) for i, tensor in enumerate(tensors)]


def _check_shape(what: str, shape: Sequence[int]) -> None:
    if not shape or 0 in shape:
        raise EngineProtocolError(f"{what}: shape {tuple(shape)} has no blocks: give [num_blocks, ...]")


def _as_pages(group: int, index: int, tensor: object, page_bytes: int) -> Bytes:
    """Return a ``[num_blocks, page_bytes]`` view of a tensor's memory."""
    what = f"group {group}, tensor {index}"
    if isinstance(tensor, np.ndarray):
        _check_shape(what, tensor.shape)
        array = tensor
    else:
        torch: Any = sys.modules.get("torch")  # a tensor implies the import
        if torch is None or not isinstance(tensor, torch.Tensor):
            raise EngineProtocolError(f"{what}: expected a torch tensor or numpy array, got {type(tensor).__name__}")
        _check_shape(what, tensor.shape)
        if tensor.device.type != "cpu":
            raise EngineProtocolError(f"{what} is on {tensor.device}, others in host memory: a worker has one device")
        if not tensor.is_contiguous():
            raise EngineProtocolError(f"{what} is not contiguous: one block must be one run of bytes")
        array = tensor.detach().reshape(tensor.shape[0], -1).view(torch.uint8).numpy()
    if not array.flags.c_contiguous:
        raise EngineProtocolError(f"{what} is not contiguous: one block must be one run of bytes")
    pages = array.reshape(array.shape[0], -1).view(np.uint8)
    if pages.shape[1] != page_bytes:
        raise EngineProtocolError(f"{what}: a block has {pages.shape[1]} bytes, the spec says {page_bytes}")
    return pages
