"""Pages of KV tensors on a GPU: one indexed copy per tensor and batch of chunks, never a loop over pages.

Pages are moved as integers of the widest type that divides them, because an indexed copy handles one element per GPU
thread. The code runs on tensors of any device. :mod:`.copies` decides the order.

Where pages are long, no indexed copy is needed: the copy engine takes them from their blocks to the slot. For this,
:meth:`DevicePages.runs` gives addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch

from tierkv.errors import EngineProtocolError
from tierkv.types.geometry import Geometry, GroupGeometry
from tierkv.types.transfers import ChunksInBlocks
from tierkv.worker.cuda.batch_copy import Numbers
from tierkv.worker.pages import check_block_ids, check_counts, has_blocks

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))

ChunkBlocks = tuple[int, Sequence[int]]
"""Number of blocks that are skipped at the front of a chunk, and the GPU blocks of the rest."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors of one group."""

    word: torch.dtype
    """Integer type in which pages are moved."""
    pages: tuple[torch.Tensor, ...]
    """Each tensor as ``[num_blocks, page_words]``; with several parts, part by part, the pieces of a part in each
    tensor's pages, ``[num_blocks, head_rows, words]``."""
    starts: tuple[int, ...]
    """Begin of their range in the worker's parts, in words."""
    num_blocks: int
    """Blocks of the shortest tensor."""
    addresses: Numbers
    """Of each tensor."""
    page_bytes: Numbers
    """Of each tensor."""


@dataclass(frozen=True, slots=True)
class PageRuns:
    """Pages that follow one another both in a tensor and in a part, as operands of copies."""

    pages: Numbers
    """Address of each run on the device."""
    parts: Numbers
    """Its address in the part of a slot."""
    sizes: Numbers
    """Its bytes."""


class DevicePages:
    """KV tensors of one worker on one device.

    Args:
        geometry: sizes of groups and chunks.
        caches: per group, its tensors, each ``[num_blocks, ...]`` and contiguous, with ``page_bytes`` bytes per block.

    Attributes:
        device: device of the tensors.

    Raises:
        EngineProtocolError: number, shape or device of the tensors differ from the spec; the message names the tensor.
    """

    def __init__(self, geometry: Geometry, caches: Sequence[Sequence[Any]]) -> None:
        check_counts(geometry, caches)
        self._blocks_per_chunk = geometry.blocks_per_chunk
        self._sizes = geometry.groups
        self.device: torch.device = caches[0][0].device
        self._groups = [
            _group(sizes, tensors, geometry.blocks_per_chunk, self.device)
            for sizes, tensors in zip(geometry.groups, caches, strict=True)
        ]

    def gather(self, group: int, chunks: Sequence[ChunkBlocks], ids: torch.Tensor, staging: torch.Tensor) -> None:
        """Copy the blocks of chunks into ``staging``, one part after the other. Bytes without a block become zeros.

        Args:
            group: group of all the chunks.
            chunks: blocks of each chunk.
            ids: all their block ids in order, on the device.
            staging: bytes on the device, with the total length of the parts.
        """
        for pages, stretch, some in self._stretches(group, chunks, ids, staging, clear=True):
            torch.ops.aten.index.Tensor_out(pages, [some], out=stretch)

    def scatter(self, group: int, chunks: Sequence[ChunkBlocks], ids: torch.Tensor, staging: torch.Tensor) -> None:
        """Copy the parts in ``staging`` to the blocks of their chunks. Arguments as in :meth:`gather`."""
        for pages, stretch, some in self._stretches(group, chunks, ids, staging, clear=False):
            pages.index_put_((some,), stretch)

    def runs(self, group: int, chunks: Sequence[ChunkBlocks], parts: Numbers) -> PageRuns:
        """Return the runs of pages of chunks of one group, which must have one part for each worker.

        Args:
            group: group of all the chunks.
            chunks: blocks of each chunk; their ids exist.
            parts: address of each chunk's part.
        """
        tensors, found = self._groups[group], []
        page_bytes = tensors.page_bytes
        starts = (np.cumsum(page_bytes) - page_bytes) * np.uint64(self._blocks_per_chunk)
        for first, count, skip, take in _alike(chunks):
            if not take:
                continue
            ids = np.fromiter(chain.from_iterable(ids for _, ids in chunks[first : first + count]), np.int64)
            begins = np.ones((count, take), bool)  # a run ends with its chunk
            np.not_equal(ids[1:], ids[:-1] + 1, out=begins.reshape(-1)[1:])
            begins[:, 0] = True
            at = np.flatnonzero(begins)
            lengths = np.diff(at, append=count * take).astype(np.uint64)
            number, block = np.divmod(at, take)
            blocks = (block + skip).astype(np.uint64)
            found.append(
                (
                    tensors.addresses + ids[at].astype(np.uint64)[:, None] * page_bytes,
                    parts[first + number][:, None] + starts + blocks[:, None] * page_bytes,
                    lengths[:, None] * page_bytes,
                )
            )
        if not found:
            none = np.empty(0, np.uint64)
            return PageRuns(none, none, none)
        return PageRuns(
            *(np.concatenate([numbers.reshape(-1) for numbers in column]) for column in zip(*found, strict=True))
        )

    def has_blocks(self, job: ChunksInBlocks) -> bool:
        """Whether all blocks of a job exist. One question for a job costs less than one for each chunk."""
        return has_blocks(job, [tensors.num_blocks for tensors in self._groups])

    def check_ids(self, group: int, block_ids: Sequence[int]) -> None:
        """Check that block ids exist.

        Raises:
            EngineProtocolError: one does not.
        """
        check_block_ids(group, block_ids, self._groups[group].num_blocks)

    def _stretches(
        self, group: int, chunks: Sequence[ChunkBlocks], ids: torch.Tensor, staging: torch.Tensor, *, clear: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield per run of like chunks, and per tensor and part, the operands of one indexed copy.

        These are pages ``[num_blocks, page]``, their range of the staged parts ``[chunks, blocks, page]``, and the ids
        ``[chunks, blocks]``.
        """
        tensors, part_bytes = self._groups[group], self._sizes[group].worker_bytes
        parts = staging[: len(chunks) * part_bytes].view(tensors.word).view(len(chunks), -1)
        offset = 0
        for first, count, skip, take in _alike(chunks):
            run = parts[first : first + count]
            if clear and take < self._blocks_per_chunk:
                run.zero_()
            if not take:
                continue
            some = ids[offset : offset + count * take].view(count, take)
            offset += count * take
            for pages, start in zip(tensors.pages, tensors.starts, strict=True):
                words = pages[0].numel()
                begin = start + skip * words
                yield pages, run[:, begin : begin + take * words].view(count, take, *pages.shape[1:]), some


def _alike(chunks: Sequence[ChunkBlocks]) -> Iterator[tuple[int, int, int, int]]:
    """Yield runs of neighbouring chunks with equal skip and take: number of the first, length, skip, take."""
    first = 0
    for number in range(1, len(chunks) + 1):
        skip, blocks = chunks[first]
        if number == len(chunks) or (chunks[number][0], len(chunks[number][1])) != (skip, len(blocks)):
            yield first, number - first, skip, len(blocks)
            first = number


def _group(sizes: GroupGeometry, tensors: Sequence[Any], blocks_per_chunk: int, device: torch.device) -> _Group:
    rows = [_rows(sizes, i, tensor, device) for i, tensor in enumerate(tensors)]
    pieces = [size // sizes.worker_parts for size in sizes.page_bytes] * sizes.worker_parts
    starts = [0, *accumulate(size * blocks_per_chunk for size in pieces)]
    runs = sizes.worker_parts * (sizes.head_rows if sizes.worker_parts > 1 else 1)
    for word_bytes, word in _WORDS:
        places = [place for row in rows for place in (row.shape[1] // runs, row.data_ptr())]
        if all(place % word_bytes == 0 for place in places):
            pages = _pieces([row.view(word) for row in rows], sizes)
            return _Group(
                word, pages, tuple(start // word_bytes for start in starts[:-1]), min(map(len, rows)),
                np.array([row.data_ptr() for row in rows], np.uint64), np.array(sizes.page_bytes, np.uint64),
            )  # fmt: skip
    raise AssertionError("a page has whole bytes")  # pragma: no cover - the last word is one byte


def _pieces(rows: Sequence[torch.Tensor], sizes: GroupGeometry) -> tuple[torch.Tensor, ...]:
    """Return, part by part, views of a part's heads in each tensor's pages; with one part the pages themselves."""
    if sizes.worker_parts == 1:
        return tuple(rows)
    return tuple(
        row.view(len(row), sizes.head_rows, sizes.worker_parts, -1)[:, :, part]
        for part in range(sizes.worker_parts)
        for row in rows
    )


def _rows(sizes: GroupGeometry, index: int, tensor: object, device: torch.device) -> torch.Tensor:
    """Return a ``[num_blocks, page_bytes]`` view of a tensor's memory."""
    what = f"group {sizes.index}, tensor {index}"
    if not isinstance(tensor, torch.Tensor):
        raise EngineProtocolError(f"{what}: expected a torch tensor on {device}, got {type(tensor).__name__}")
    if tensor.device != device:
        raise EngineProtocolError(f"{what} is on {tensor.device}, the first one on {device}: a worker has one device")
    if not tensor.is_contiguous():
        raise EngineProtocolError(f"{what} is not contiguous: one block must be one run of bytes")
    rows = tensor.detach().reshape(tensor.shape[0], -1).view(torch.uint8)
    if rows.shape[1] != sizes.page_bytes[index]:
        raise EngineProtocolError(f"{what}: a block has {rows.shape[1]} bytes, the spec says {sizes.page_bytes[index]}")
    return rows
