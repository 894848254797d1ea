"""Cache objects that prompts are restored into: DynamicCaches that keep more data until it is stored.

A sliding layer of transformers drops tokens outside its window, which the next prompt with the same prefix would need.
The layers here keep new tokens until they are stored. Each row records the number of stored tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from tierkv.integrations.transformers.layers import CacheLayer, KvLayer, KvShape, ModelConfig

KeyValue = tuple[torch.Tensor, torch.Tensor]
"""K and V of some tokens, each [batch, heads, tokens, head size]."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a batch cache."""

    pad: int = 0
    """Columns of padding at the left."""
    stored: int = 0
    """Number of tokens behind the padding that are in the stack."""
    at_stored: bytes = b""
    """Chained hash of the stored tokens, which identifies them."""


class RecordingSlidingLayer(DynamicSlidingWindowLayer):  # type: ignore[misc] # a class that mypy does not see
    """Sliding layer that also keeps new tokens until :meth:`forget`.

    Beam search and changes of the batch end the record, because its rows would differ from those of the window.
    """

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self.record: list[KeyValue] | None = []

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> KeyValue:
        """Append new tokens."""
        if self.record is not None and key_states.shape[-2]:
            self.record.append((key_states, value_states))
        result: KeyValue = super().update(key_states, value_states, *args, **kwargs)
        return result

    def recorded(self) -> KeyValue | None:
        """K and V of the recorded tokens; None if there are none, or the record has ended."""
        if not self.record:
            return None
        if len(self.record) > 1:
            keys, values = zip(*self.record, strict=True)
            self.record = [(torch.cat(keys, dim=-2), torch.cat(values, dim=-2))]
        return self.record[0]

    def forget(self, tokens_kept: int) -> None:
        """Keep only the last ``tokens_kept`` tokens of the record."""
        known = self.recorded()
        if known is not None:
            # Copied, because a view of the end would keep the whole tensor in memory.
            keys, values = (states[:, :, states.shape[2] - tokens_kept :].clone() for states in known)
            self.record = [(keys, values)] if tokens_kept else []

    def crop(self, *args: int, **kwargs: int) -> None:
        """Remove tokens at the end, also from the record."""
        before = self.cumulative_length
        super().crop(*args, **kwargs)
        known = self.recorded()
        taken = before - self.cumulative_length
        if known is not None and taken > 0:
            left = max(0, known[0].shape[2] - taken)
            self.record = [(known[0][:, :, :left], known[1][:, :, :left])] if left else []

    def reset(self) -> None:
        """Empty the layer and end the record."""
        super().reset()
        self.record = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder rows for beam search, and end the record."""
        super().reorder_cache(beam_idx)
        self.record = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row, and end the record."""
        super().batch_repeat_interleave(repeats)
        self.record = None

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Select rows, and end the record."""
        super().batch_select_indices(indices)
        self.record = None


class PrefixCache(DynamicCache):  # type: ignore[misc] # a class that mypy does not see
    """``DynamicCache`` for a model's forward passes that :class:`TieredPrefixCache` can store from."""

    def __init__(self, config: ModelConfig, rows: Sequence[Row] = (Row(),)) -> None:
        super().__init__(config=config)
        self.rows = tuple(rows)
        """Rows of the batch; empty after beam search."""
        self.layers: list[CacheLayer] = [
            RecordingSlidingLayer(layer.sliding_window) if type(layer) is DynamicSlidingWindowLayer else layer
            for layer in self.layers
        ]

    def fill(self, number: int, keys: torch.Tensor, values: torch.Tensor, num_tokens: int) -> None:
        """Fill an empty layer as if it had processed ``num_tokens`` tokens.

        Args:
            number: index of the layer.
            keys: K, [batch, heads, tokens, head size], of all tokens, or of the last ones in a sliding layer.
            values: V of the same tokens.
            num_tokens: number of columns, padding included.
        """
        layer = self.layers[number]
        layer.update(keys[:, :, :0], values[:, :, :0])  # initialises the layer in the way of the installed version
        layer.keys, layer.values = keys, values
        if isinstance(layer, RecordingSlidingLayer):
            layer.cumulative_length = num_tokens

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder rows for beam search. Their relation to the returned rows is unknown, so :attr:`rows` is emptied."""
        super().reorder_cache(beam_idx)
        self.rows = ()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        super().batch_repeat_interleave(repeats)
        self.rows = tuple(row for row in self.rows for _ in range(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Select rows."""
        super().batch_select_indices(indices)
        self.rows = tuple(self.rows[int(index)] for index in indices) if self.rows else ()

    def crop(self, *args: int, **kwargs: int) -> None:
        """Remove tokens at the end. Rows stored beyond the new end count as not stored."""
        super().crop(*args, **kwargs)
        length = self.get_seq_length()
        self.rows = tuple(row if row.pad + row.stored <= length else Row(row.pad) for row in self.rows)


def kept_tokens(layer: KvLayer, num_tokens: int) -> int:
    """Number of tokens that a layer of transformers keeps of ``num_tokens``."""
    return num_tokens if layer.window is None else min(num_tokens, layer.window - 1)


def known_states(layer: CacheLayer) -> KeyValue | None:
    """K and V of all tokens that a layer still has; None if it is empty."""
    if layer.keys is None or layer.keys.ndim != 4 or not layer.keys.shape[2]:  # noqa: PLR2004 - lazily initialised
        return None
    recorded = layer.recorded() if isinstance(layer, RecordingSlidingLayer) else None
    if recorded is not None and recorded[0].shape[2] > layer.keys.shape[2]:
        return recorded
    return layer.keys, layer.values


def joined(
    config: ModelConfig, shape: KvShape, caches: Sequence[PrefixCache], pads: Sequence[int], num_columns: int
) -> PrefixCache:
    """Join caches of one row each, of different lengths, to one: right-aligned, with zeros at the left.

    ``generate`` takes left-padded batches, and its attention mask hides the zeros. The padding of a row may be longer
    than the columns: then the row has no tokens yet.
    """
    batch = PrefixCache(config, [replace(cache.rows[0], pad=pad) for cache, pad in zip(caches, pads, strict=True)])
    if not num_columns:
        return batch
    for number, layer in enumerate(shape.layers):
        alone = [cache.layers[number] for cache in caches]
        kept = kept_tokens(layer, num_columns)
        keys, values = _stacked([_content(one) for one in alone], layer, kept, shape.dtype)
        batch.fill(number, keys, values, num_columns)
        if layer.window is not None:
            records = [one.recorded() for one in alone]
            longest = max((known[0].shape[2] for known in records if known is not None), default=0)
            batch.layers[number].record = [_stacked(records, layer, longest, shape.dtype)] if longest else []
        for one in alone:
            one.keys = one.values = None  # otherwise all data would exist twice until the last layer is done
    return batch


def _content(layer: CacheLayer) -> KeyValue | None:
    is_filled = layer.keys is not None and layer.keys.ndim == 4  # noqa: PLR2004 - otherwise not initialised yet
    return (layer.keys, layer.values) if is_filled else None


def _stacked(states: Sequence[KeyValue | None], layer: KvLayer, num_tokens: int, dtype: torch.dtype) -> KeyValue:
    both = []
    for which, (heads, size) in enumerate((layer.key, layer.value)):
        whole = torch.zeros((len(states), heads, num_tokens, size), dtype=dtype, device=layer.device)
        for row, known in enumerate(states):
            if known is not None:
                tokens = min(num_tokens, known[which].shape[2])
                whole[row, :, num_tokens - tokens :] = known[which][0, :, known[which].shape[2] - tokens :]
        both.append(whole)
    return both[0], both[1]
