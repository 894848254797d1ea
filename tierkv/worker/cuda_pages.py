"""Pages of KV tensors on a GPU: whole batches of chunks at once, one indexed copy a tensor, never a loop over pages.

Pages are moved as integers of the widest kind that divides them, since an indexed copy handles one element a thread.
What is written here runs on tensors of any device; the order in which it runs is :mod:`tierkv.worker.cuda_copies`'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from tierkv.errors import EngineProtocolError
from tierkv.types.geometry import Geometry, GroupGeometry
from tierkv.worker.pages import check_block_ids, check_counts

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))

ChunkBlocks = tuple[int, Sequence[int]]
"""How many blocks of a chunk are skipped at its front, and the GPU blocks of the rest."""


@dataclass(frozen=True, slots=True)
class _Group:
    """One group's tensors as ``[num_blocks, page_words]``, and where each begins in a part, in words."""

    word: torch.dtype
    pages: tuple[torch.Tensor, ...]
    starts: tuple[int, ...]
    num_blocks: int


class DevicePages:
    """The KV tensors of one worker on one device.

    Args:
        geometry: sizes of groups and chunks.
        caches: per group, its tensors, each ``[num_blocks, ...]`` and contiguous, with ``page_bytes`` bytes per block.

    Attributes:
        device: where they are.

    Raises:
        EngineProtocolError: number, shape or place of the tensors differ from the spec; says which and how.
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
        """Copy the blocks of chunks into ``staging``, one part after the other. What no block covers becomes zeros.

        Args:
            group: of all the chunks.
            chunks: what each takes.
            ids: all their block ids in order, on the device.
            staging: bytes on the device, as long as the parts together.
        """
        for pages, stretch, some in self._stretches(group, chunks, ids, staging, clear=True):
            torch.ops.aten.index.Tensor_out(pages, [some], out=stretch)

    def scatter(self, group: int, chunks: Sequence[ChunkBlocks], ids: torch.Tensor, staging: torch.Tensor) -> None:
        """The way back: copy the parts in ``staging`` to the chunks' blocks, and to no others."""
        for pages, stretch, some in self._stretches(group, chunks, ids, staging, clear=False):
            pages.index_put_((some,), stretch)

    def check_ids(self, group: int, block_ids: Sequence[int]) -> None:
        """Make sure that block ids exist.

        Raises:
            EngineProtocolError: one does not.
        """
        check_block_ids(group, block_ids, self._groups[group].num_blocks)

    def _stretches(
        self, group: int, chunks: Sequence[ChunkBlocks], ids: torch.Tensor, staging: torch.Tensor, *, clear: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Per run of like chunks and per tensor: pages ``[num_blocks, page]``, their place in the staged parts
        ``[chunks, blocks, page]``, and the ids ``[chunks, blocks]``.
        """  # noqa: D205 - three shapes in a row
        tensors, part_bytes = self._groups[group], self._sizes[group].worker_bytes
        parts = staging[: len(chunks) * part_bytes].view(tensors.word).view(len(chunks), -1)
        offset = 0
        for first, count, skip, take in _runs(chunks):
            run = parts[first : first + count]
            if clear and take < self._blocks_per_chunk:
                run.zero_()
            if not take:
                continue
            some = ids[offset : offset + count * take].view(count, take)
            offset += count * take
            for pages, start in zip(tensors.pages, tensors.starts, strict=True):
                words = pages.shape[1]
                begin = start + skip * words
                yield pages, run[:, begin : begin + take * words].view(count, take, words), some


def _runs(chunks: Sequence[ChunkBlocks]) -> Iterator[tuple[int, int, int, int]]:
    """Neighbouring chunks that skip and take the same: the first one's number, how many, skip, take."""
    first = 0
    for number in range(1, len(chunks) + 1):
        skip, blocks = chunks[first]
        if number == len(chunks) or (chunks[number][0], len(chunks[number][1])) != (skip, len(blocks)):
            yield first, number - first, skip, len(blocks)
            first = number


def _group(sizes: GroupGeometry, tensors: Sequence[Any], blocks_per_chunk: int, device: torch.device) -> _Group:
    rows = [_rows(sizes, i, tensor, device) for i, tensor in enumerate(tensors)]
    starts = [0, *accumulate(size * blocks_per_chunk for size in sizes.page_bytes)]
    for word_bytes, word in _WORDS:
        places = [place for row in rows for place in (row.shape[1], row.data_ptr())]
        if all(place % word_bytes == 0 for place in places):
            pages = tuple(row.view(word) for row in rows)
            return _Group(word, pages, tuple(s // word_bytes for s in starts[:-1]), min(map(len, rows)))
    raise AssertionError("a page has whole bytes")  # pragma: no cover - the last word is one byte


def _rows(sizes: GroupGeometry, index: int, tensor: object, device: torch.device) -> torch.Tensor:
    """A ``[num_blocks, page_bytes]`` view of a tensor's memory."""
    what = f"group {sizes.index}, tensor {index}"
    if not isinstance(tensor, torch.Tensor):
        raise EngineProtocolError(f"{what}: expected a torch tensor on {device}, got {type(tensor).__name__}")
    if tensor.device != device:
        raise EngineProtocolError(f"{what} is on {tensor.device}, the first tensor on {device}: one worker, one device")
    if not tensor.is_contiguous():
        raise EngineProtocolError(f"{what} is not contiguous: one block must be one run of bytes")
    rows = tensor.detach().reshape(tensor.shape[0], -1).view(torch.uint8)
    if rows.shape[1] != sizes.page_bytes[index]:
        raise EngineProtocolError(f"{what}: a block has {rows.shape[1]} bytes, the spec says {sizes.page_bytes[index]}")
    return rows
