"""KV of a prompt, cut into chunks as in an engine's pages, and joined again.

A page holds one layer's KV of one block: the keys of its tokens, then their values. A chunk holds, for each layer of
its group in turn, the pages of its blocks: what :mod:`tierkv.worker.pages` makes of an engine's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class PromptKv:
    """Keys and values of a prompt's tokens, 16 bits each: ``[layers, tokens, channels]``."""

    keys: Array
    values: Array

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return int(self.keys.shape[1])

    def first(self, tokens: int) -> PromptKv:
        """KV of the first ``count`` tokens."""
        return PromptKv(self.keys[:, :tokens], self.values[:, :tokens])


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Layout of the cut. block_tokens: tokens of a page. blocks_per_chunk: pages of each layer in a chunk."""

    block_tokens: int
    blocks_per_chunk: int

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.block_tokens * self.blocks_per_chunk

    def cut(self, kv: PromptKv, layers: Sequence[int]) -> Array:
        """Chunks of some layers, ``[chunks, values]``, each row one payload. Tokens behind the last chunk are left out.

        Raises:
            ValueError: there are fewer tokens than a chunk has.
        """
        chunks = kv.num_tokens // self.chunk_tokens
        if not chunks:
            raise ValueError(f"{kv.num_tokens} tokens do not fill a chunk of {self.chunk_tokens}")
        both = np.stack([kv.keys[layers], kv.values[layers]])[:, :, : chunks * self.chunk_tokens]
        shape = (2, len(layers), chunks, self.blocks_per_chunk, self.block_tokens, -1)
        return np.ascontiguousarray(both.reshape(shape).transpose(2, 1, 3, 0, 4, 5)).reshape(chunks, -1)

    def join(self, chunks: Array, num_layers: int) -> PromptKv:
        """Undo :meth:`cut`, without the tokens that it left out."""
        shape = (len(chunks), num_layers, self.blocks_per_chunk, 2, self.block_tokens, -1)
        both = chunks.reshape(shape).transpose(3, 1, 0, 2, 4, 5)
        keys, values = both.reshape(2, num_layers, len(chunks) * self.chunk_tokens, -1)
        return PromptKv(keys, values)


def groups_of(kinds: Sequence[str]) -> Mapping[str, list[list[int]]]:
    """Kind of layer -> its KV cache groups, each the layers that share a chunk.

    As engines group them: all groups have as many layers as the rarest kind, the last one of a kind perhaps fewer.
    """
    by_kind: dict[str, list[int]] = {}
    for layer, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(layer)
    size = min(map(len, by_kind.values()))
    return {kind: [layers[i : i + size] for i in range(0, len(layers), size)] for kind, layers in by_kind.items()}
