"""Llama-style decoder over a paged KV cache, whose results are a function of the tokens alone.

**Why tiles.** A matrix product of 16 rows may differ in its last bits from the same rows computed as 7 and 9, because
the library picks another kernel or another order of summation for another shape. So an engine that batches and chunks
freely gives KV bytes, and sometimes tokens, that depend on the other requests of a step. Rounding would hide a
damaged cache. Here the unit of computation is the *tile*: the ``block_tokens`` positions of one block of one
request. A tile is always computed with the same shapes: all of its rows, against keys from the first block that its
first row attends to up to its own end. Rows that are not requested are padding; keys not yet written, or outside a
row's window, are masked. Shapes depend on the tile's index in the sequence only, never on the batch, the chunk budget,
or the end of a cached prefix; a row of such a product does not depend on its neighbours. The resulting promise is
tested bit by bit: **the same tokens give the same KV bytes and the same logits**, computed at once, in pieces, in any
batch, or after a load.

The cost: decoding one token computes a whole tile.

**Tensor parallel.** Each rank has a share of the heads: its rows of the projections, and a KV pool of its own. The
partial results are added in the order of the ranks. The feed-forward has no KV, so it is not split. All ranks run here,
one after the other. Another number of ranks adds in another order and gives other bits: compare at equal numbers only.

Numbers: weights and cached keys and values are rounded to the model's dtype, and so is the residual stream after each
sublayer; arithmetic is float32. Equality across processes holds for the same torch build, CPU kind and thread count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional

from tierkv.reference.configs import ModelConfig, first_visible
from tierkv.reference.kv_pool import torch_dtype

WEIGHT_STD = 0.2
"""Standard deviation of the weights; so large that attention is sharp and one wrong KV byte changes the tokens."""

ROPE_BASE = 10_000.0
NORM_EPS = 1e-5
PADDING_TOKEN = 0


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Work on one request in one step."""

    start: int
    """Position of the first token."""
    tokens: Sequence[int]
    """Ids at positions ``start`` to ``start + len(tokens) - 1``; at least one."""
    block_tables: Sequence[Sequence[int]]
    """Per group, block ids from position 0 to the end of the range; any id where no token attends to."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Part of a range within one block."""

    index: int
    """Index of the block in the sequence."""
    tokens: Sequence[int]
    """One id per row; padding outside ``rows``."""
    rows: slice
    """The requested rows."""


@dataclass(frozen=True, slots=True)
class View:
    """Keys that the rows of a tile attend to in layers of one window, counted from the start of ``first_block``."""

    first_block: int
    """Index of the first block that a row attends to."""
    hidden: Tensor
    """[rows, keys], True where a row does not attend."""
    valid: slice
    """Keys that a requested row attends to; all others may hold any bytes."""


@dataclass(frozen=True, slots=True)
class AttentionShard:
    """Heads of one rank in one layer."""

    qkv: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer: two norms, the attention of each rank and the gated feed-forward."""

    attention_norm: Tensor
    attention: tuple[AttentionShard, ...]
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Decoder:
    """Weights, and the forward pass over a paged KV pool. Used on one thread."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        block_tokens: int,
        num_groups: int = 1,
        tensor_parallel: int = 1,
        device: str = "cpu",
    ) -> None:
        """Draw the weights from ``config.seed`` (on the CPU, so that they are the same for every device).

        Args:
            config: the shape of the model.
            block_tokens: positions of a tile.
            num_groups: KV groups; see :meth:`ModelConfig.layer_groups`.
            tensor_parallel: ranks among which the heads are split; divides ``kv_heads``.
            device: torch device of the weights; the KV pool must be there too.
        """
        self._config = config
        self._block_tokens = block_tokens
        groups = config.layer_groups(num_groups)
        self._windows = {group.window_tokens for group in groups}
        places = {
            layer: (number, place, group.window_tokens)
            for number, group in enumerate(groups)
            for place, layer in enumerate(group.layers)
        }
        self._places = [places[layer] for layer in range(config.layers)]
        """Per layer: its group, its tensor of the pool, its window."""
        self._device = device
        self._ranks = tensor_parallel
        self._dtype = torch_dtype(config)
        generator = torch.Generator().manual_seed(config.seed)

        def draw(*shape: int) -> Tensor:
            weights = torch.randn(shape, generator=generator) * WEIGHT_STD
            return self._rounded(weights).to(device)

        q_rows = config.heads * config.head_dim
        kv_rows = config.kv_heads * config.head_dim
        self._embedding = draw(config.vocab, config.hidden)
        self._layers = [
            LayerWeights(
                attention_norm=1 + draw(config.hidden),
                attention=self._shards(
                    draw(q_rows + 2 * kv_rows, config.hidden).split_with_sizes([q_rows, kv_rows, kv_rows]),
                    draw(config.hidden, q_rows),
                ),
                mlp_norm=1 + draw(config.hidden),
                gate_up=draw(2 * config.intermediate, config.hidden),
                down=draw(config.hidden, config.intermediate),
            )
            for _ in range(config.layers)
        ]
        self._final_norm = 1 + draw(config.hidden)
        self._head = draw(config.vocab, config.hidden)
        half = config.head_dim // 2
        exponents = torch.arange(half, dtype=torch.float32) / half
        self._frequencies = (ROPE_BASE**-exponents).to(device)

    def _shards(self, qkv: Sequence[Tensor], output: Tensor) -> tuple[AttentionShard, ...]:
        parts = zip(*(rows.chunk(self._ranks) for rows in qkv), output.chunk(self._ranks, dim=1), strict=True)
        return tuple(AttentionShard(torch.cat(parts[:3]), parts[3].contiguous()) for parts in parts)

    @torch.inference_mode()
    def forward(self, batch: Sequence[TokenRange], kv_cache: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Compute the ranges, writing their keys and values into ``kv_cache``: per rank, its pool.

        Returns:
            Per range, the float32 logits [vocab] after its last token.
        """
        return [self._forward_range(work, kv_cache) for work in batch]

    def _forward_range(self, work: TokenRange, kv_cache: Sequence[Sequence[Tensor]]) -> Tensor:
        tables = [torch.tensor(table, dtype=torch.int64, device=self._device) for table in work.block_tables]
        hidden = [self._forward_tile(tile, tables, kv_cache) for tile in self._tiles(work)]
        logits = functional.linear(self._normalised(hidden[-1], self._final_norm), self._head)
        return logits[(work.start + len(work.tokens) - 1) % self._block_tokens].clone()

    def _tiles(self, work: TokenRange) -> Iterator[Tile]:
        size = self._block_tokens
        end = work.start + len(work.tokens)
        for index in range(work.start // size, -(-end // size)):
            origin = index * size
            rows = slice(max(work.start - origin, 0), min(end - origin, size))
            tokens = [PADDING_TOKEN] * size
            tokens[rows] = work.tokens[origin + rows.start - work.start : origin + rows.stop - work.start]
            yield Tile(index, tokens, rows)

    def _forward_tile(self, tile: Tile, tables: Sequence[Tensor], kv_cache: Sequence[Sequence[Tensor]]) -> Tensor:
        """Compute a tile, writing the keys and values of its rows. Returns the hidden states [tokens, hidden]."""
        origin = tile.index * self._block_tokens
        own = torch.arange(origin, origin + self._block_tokens, device=self._device)[:, None]
        angles = own.to(torch.float32) * self._frequencies
        rotation = (angles.cos()[:, None, :], angles.sin()[:, None, :])
        views = {window: self._view(tile, own, window) for window in self._windows}
        hidden = self._embedding[torch.tensor(tile.tokens, device=self._device)]
        for layer, (group, place, window) in zip(self._layers, self._places, strict=True):
            view = views[window]
            blocks = tables[group][view.first_block : tile.index + 1]
            normalised = self._normalised(hidden, layer.attention_norm)
            parts = []
            for shard, pool in zip(layer.attention, kv_cache, strict=True):
                query, key, value = self._projections(shard, normalised, rotation)
                page = pool[place][int(blocks[-1])]
                page[0, tile.rows] = key[tile.rows]
                page[1, tile.rows] = value[tile.rows]
                parts.append(functional.linear(self._attention(query, pool[place][blocks], view), shard.output))
            hidden = self._rounded(hidden + reduce(torch.add, parts))
            gate, up = functional.linear(self._normalised(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = self._rounded(hidden + functional.linear(functional.silu(gate) * up, layer.down))
        return hidden

    def _view(self, tile: Tile, own: Tensor, window: int | None) -> View:
        """Keys that the tile's rows, at the positions ``own`` [rows, 1], attend to."""
        origin = tile.index * self._block_tokens
        first_block = first_visible(window, origin) // self._block_tokens
        start = first_block * self._block_tokens
        keys = torch.arange(start, origin + self._block_tokens, device=self._device)[None, :]
        hidden = keys > own
        if window is not None:
            hidden |= keys <= own - window
        asked = first_visible(window, origin + tile.rows.start)
        return View(first_block, hidden, slice(asked - start, origin + tile.rows.stop - start))

    def _projections(
        self, shard: AttentionShard, normalised: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A rank's query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim].

        Key and value are in the model's dtype.
        """
        own, shared = self._config.heads // self._ranks, self._config.kv_heads // self._ranks
        heads = functional.linear(normalised, shard.qkv).view(self._block_tokens, -1, self._config.head_dim)
        query, key, value = heads.split_with_sizes([own, shared, shared], dim=1)
        return _rotated(query, rotation), _rotated(key, rotation).to(self._dtype), value.to(self._dtype)

    def _attention(self, query: Tensor, pages: Tensor, view: View) -> Tensor:
        """A rank's causal grouped-query attention of a tile to the ``pages`` in view: [tokens, heads * head_dim]."""
        shared, size = self._config.kv_heads // self._ranks, self._config.head_dim
        keys, values = (pages[:, i].to(torch.float32).reshape(-1, shared, size) for i in (0, 1))
        # Foreign bytes may be NaN, and 0 * NaN is NaN: the mask alone is not enough.
        values[: view.valid.start] = 0
        values[view.valid.stop :] = 0
        per_kv_head = query.view(self._block_tokens, shared, -1, size)
        scores = torch.einsum("qgrd,kgd->grqk", per_kv_head, keys) * size**-0.5
        weights = scores.masked_fill(view.hidden, -torch.inf).softmax(dim=-1)
        return torch.einsum("grqk,kgd->qgrd", weights, values).reshape(self._block_tokens, -1)

    def _normalised(self, hidden: Tensor, scale: Tensor) -> Tensor:
        return hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + NORM_EPS) * scale

    def _rounded(self, values: Tensor) -> Tensor:
        return values.to(self._dtype).to(torch.float32)


def _rotated(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding: the two halves of each head are the coordinates that are turned."""
    cos, sin = rotation
    left, right = heads.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
