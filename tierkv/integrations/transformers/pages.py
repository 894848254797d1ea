"""Pages: KV as the core moves it, ``[blocks, tokens, heads, head size]`` per tensor, in host memory.

Page 0 is the null block's. To load, pages lie so that a layer's K or V is a view of them: nothing is copied. To store,
they are filled from the layers of a cache, on whatever device those are.
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
    """One row of a cache, which begins behind ``pad`` columns."""

    cache: ModelCache
    row: int = 0
    pad: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that have passed through it."""
        length: int = self.cache.get_seq_length()
        return length - self.pad

    def states(self, number: int, wanted: range) -> tuple[torch.Tensor, ...]:
        """K and V of some tokens in one layer, each [heads, tokens, head size]; shorter if it does not have them."""
        known = known_states(self.cache.layers[number])
        if known is None:
            return ()
        first = known[0].shape[2] - (self.num_tokens - wanted.start)
        return tuple(states[self.row, :, max(0, first) : max(0, first + len(wanted))] for states in known)

    def missing_tokens(self, shape: KvShape) -> list[int]:
        """Per group, how many of the first tokens its layers no longer have."""
        result = []
        for group in shape.groups:
            states = [known_states(self.cache.layers[number]) for number in group.layers]
            known = min(0 if one is None else one[0].shape[2] for one in states)
            result.append(max(0, self.num_tokens - known))
        return result


class Pages:
    """Pages of all groups for so many blocks. Memory that is not written to is not taken."""

    def __init__(self, shape: KvShape, block_tokens: int, num_blocks: int) -> None:
        self._shape = shape
        self._block_tokens = block_tokens
        self.num_blocks = num_blocks
        self.tensors = [
            [torch.empty((num_blocks + 1, *page), dtype=shape.dtype) for page in shape.page_shapes(group, block_tokens)]
            for group in shape.groups
        ]
        """Per group, what a worker registers."""

    def restore(self, cache: PrefixCache, num_tokens: int) -> None:
        """Make the first ``num_tokens`` tokens, which lie in blocks 1, 2, ... of every group, a cache's content."""
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
        """Copy the tokens ``span`` of one row, whole blocks, into the pages from ``page`` on.

        Args:
            source: where they are.
            span: from the begin of a block to the end of one.
            page: of its first block.
            missing: per group, how many of the row's first tokens it does not have: their blocks are left out. None:
                it has all of ``span``.

        Raises:
            ValueError: the cache is of another dtype or shape than the model's was, or lacks what it should have.
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
                            f"them as {expected} {tensor.dtype}: the cache is not of the model that TieredPrefixCache "
                            "was made for, or was filled under autocast"
                        )
                    target.copy_(run.permute(1, 0, 2).reshape(target.shape))
