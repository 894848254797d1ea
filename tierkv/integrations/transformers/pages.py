"""Pages: KV in the form that a worker copies, ``[blocks, tokens, heads, head size]`` per tensor, in host memory.

Page 0 belongs to the null block. For a load, pages are arranged so that a layer's K or V is a view of them, without a
copy. For a store, pages are filled from the layers of a cache on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tierkv.integrations.transformers.layers import KvShape, ModelCache
from tierkv.integrations.transformers.restored import PrefixCache, kept_tokens, known_states
from tierkv.types.geometry import cdiv


@dataclass(frozen=True, slots=True)
class CachedRow:
    """One row of a cache."""

    cache: ModelCache
    """The cache."""
    row: int = 0
    """Index of the row."""
    pad: int = 0
    """Columns of padding before the row."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the row has processed."""
        length: int = self.cache.get_seq_length()
        return length - self.pad

    def states(self, number: int, wanted: range) -> tuple[torch.Tensor, ...]:
        """Return K and V of some tokens in one layer, each [heads, tokens, head size]; shorter if some are gone."""
        known = known_states(self.cache.layers[number])
        if known is None:
            return ()
        first = known[0].shape[2] - (self.num_tokens - wanted.start)
        return tuple(states[self.row, :, max(0, first) : max(0, first + len(wanted))] for states in known)

    def missing_tokens(self, shape: KvShape) -> list[int]:
        """Return per group the number of first tokens that its layers no longer have."""
        result = []
        for group in shape.groups:
            states = [known_states(self.cache.layers[number]) for number in group.layers]
            known = min(0 if one is None else one[0].shape[2] for one in states)
            result.append(max(0, self.num_tokens - known))
        return result


class Pages:
    """Pages of all groups for ``num_blocks`` blocks. Memory is only used once it is written."""

    def __init__(self, shape: KvShape, block_tokens: int, num_blocks: int) -> None:
        self._shape = shape
        self._block_tokens = block_tokens
        self.num_blocks = num_blocks
        self.tensors = [
            [torch.empty((num_blocks + 1, *page), dtype=shape.dtype) for page in shape.page_shapes(group, block_tokens)]
            for group in shape.groups
        ]
        """Tensors that a worker registers, per group."""

    def restore(self, cache: PrefixCache, num_tokens: int) -> None:
        """Fill a cache with the first ``num_tokens`` tokens, from blocks 1, 2, ... of every group."""
        for group, tensors in zip(self._shape.groups, self.tensors, strict=True):
            for place, number in enumerate(group.layers):
                layer = self._shape.layers[number]
                first = num_tokens - kept_tokens(layer, num_tokens)
                keys, values = (
                    tensor[1:].flatten(0, 1)[first:num_tokens].permute(1, 0, 2).unsqueeze(0).to(layer.device)
                    for tensor in tensors[2 * place : 2 * place + 2]
                )
                cache.fill(number, keys, values, num_tokens)

    def take(self, source: CachedRow, span: range, page: int, missing: Sequence[int] | None = None) -> None:
        """Copy the tokens ``span`` of one row, in whole blocks, to the pages from ``page`` on.

        Args:
            source: the row.
            span: tokens from the start of a block to the end of a block.
            page: page of the first block.
            missing: per group, number of first tokens that the row no longer has. Their blocks are skipped. None: the
                row has all of ``span``.

        Raises:
            ValueError: dtype or shape of the cache differ from the model's, or tokens are missing.
        """
        size = self._block_tokens
        for index, (group, tensors) in enumerate(zip(self._shape.groups, self.tensors, strict=True)):
            lost = 0 if missing is None else cdiv(missing[index], size) * size
            wanted = range(max(span.start, lost), span.stop)
            if not wanted:
                continue
            pages = slice(page + (wanted.start - span.start) // size, page + len(span) // size)
            for place, number in enumerate(group.layers):
                for tensor, run in zip(tensors[2 * place : 2 * place + 2], source.states(number, wanted), strict=True):
                    target = tensor[pages]
                    if run.dtype != tensor.dtype or run.shape != (target.shape[2], len(wanted), target.shape[3]):
                        expected = (target.shape[2], len(wanted), target.shape[3])
                        raise ValueError(
                            f"layer {number} has tokens {wanted} as {tuple(run.shape)} {run.dtype}, and should have "
                            f"them as {expected} {tensor.dtype}: the cache does not belong to the model of this "
                            "TieredPrefixCache, or was filled under autocast"
                        )
                    target.copy_(run.permute(1, 0, 2).reshape(target.shape))
