"""The cache objects that prompts are restored into: DynamicCaches that remember a little more than others.

A sliding layer of transformers forgets what its window has left behind, and with it what the next prompt with the same
beginning would need. Ours keep what was put in until it has been stored. And each row knows how far it is stored.
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
    """One row of a batch cache.

    pad: columns of padding at its left. stored: tokens behind them that are in the stack. at_stored: the chained hash
    there, which tells whose tokens they are.
    """

    pad: int = 0
    stored: int = 0
    at_stored: bytes = b""


class RecordingSlidingLayer(DynamicSlidingWindowLayer):  # type: ignore[misc] # a class that mypy does not see
    """A sliding layer that keeps what was put in until :meth:`forget`, beside its window.

    Beam search and changes of the batch end the record, since its rows would no longer be those of the window.
    """

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self.record: list[KeyValue] | None = []

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> KeyValue:
        """Put in new tokens."""
        if self.record is not None and key_states.shape[-2]:
            self.record.append((key_states, value_states))
        result: KeyValue = super().update(key_states, value_states, *args, **kwargs)
        return result

    def recorded(self) -> KeyValue | None:
        """What was put in lately, as one; None: nothing, or the record has ended."""
        if not self.record:
            return None
        if len(self.record) > 1:
            keys, values = zip(*self.record, strict=True)
            self.record = [(torch.cat(keys, dim=-2), torch.cat(values, dim=-2))]
        return self.record[0]

    def forget(self, tokens_kept: int) -> None:
        """Keep only the last so many tokens of the record."""
        known = self.recorded()
        if known is not None:
            # Copied, or the whole of it would stay in memory behind a view of its end.
            keys, values = (states[:, :, states.shape[2] - tokens_kept :].clone() for states in known)
            self.record = [(keys, values)] if tokens_kept else []

    def crop(self, *args: int, **kwargs: int) -> None:
        """Take back tokens, here and in the record."""
        before = self.cumulative_length
        super().crop(*args, **kwargs)
        known = self.recorded()
        taken = before - self.cumulative_length
        if known is not None and taken > 0:
            left = max(0, known[0].shape[2] - taken)
            self.record = [(known[0][:, :, :left], known[1][:, :, :left])] if left else []

    def reset(self) -> None:
        """Start again."""
        super().reset()
        self.record = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beam search goes on with other rows."""
        super().reorder_cache(beam_idx)
        self.record = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row several times."""
        super().batch_repeat_interleave(repeats)
        self.record = None

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Some rows only."""
        super().batch_select_indices(indices)
        self.record = None


class PrefixCache(DynamicCache):  # type: ignore[misc] # a class that mypy does not see
    """A ``DynamicCache`` for a model's forward passes that :class:`TieredPrefixCache` can store from.

    Attributes:
        rows: what is known of each row of the batch; none after beam search.
    """

    def __init__(self, config: ModelConfig, rows: Sequence[Row] = (Row(),)) -> None:
        super().__init__(config=config)
        self.rows = tuple(rows)
        self.layers: list[CacheLayer] = [
            RecordingSlidingLayer(layer.sliding_window) if type(layer) is DynamicSlidingWindowLayer else layer
            for layer in self.layers
        ]

    def fill(self, number: int, keys: torch.Tensor, values: torch.Tensor, num_tokens: int) -> None:
        """Give an empty layer its content, as if ``num_tokens`` tokens had passed through it.

        Args:
            number: of the layer.
            keys: [batch, heads, tokens, head size]: all of them, or of a sliding layer the last ones.
            values: (the same)
            num_tokens: columns, padding included.
        """
        layer = self.layers[number]
        layer.update(keys[:, :, :0], values[:, :, :0])  # initialises it in its own way, whichever version it is
        layer.keys, layer.values = keys, values
        if isinstance(layer, RecordingSlidingLayer):
            layer.cumulative_length = num_tokens

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beam search goes on with other rows; which of them belongs to what it returns is not known."""
        super().reorder_cache(beam_idx)
        self.rows = ()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row several times."""
        super().batch_repeat_interleave(repeats)
        self.rows = tuple(row for row in self.rows for _ in range(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Some rows only."""
        super().batch_select_indices(indices)
        self.rows = tuple(self.rows[int(index)] for index in indices) if self.rows else ()

    def crop(self, *args: int, **kwargs: int) -> None:
        """Take back tokens. What is stored stays stored, but is no longer vouched for beyond the new end."""
        super().crop(*args, **kwargs)
        length = self.get_seq_length()
        self.rows = tuple(row if row.pad + row.stored <= length else Row(row.pad) for row in self.rows)


def kept_tokens(layer: KvLayer, num_tokens: int) -> int:
    """How many of ``num_tokens`` a layer of transformers holds."""
    return num_tokens if layer.window is None else min(num_tokens, layer.window - 1)


def known_states(layer: CacheLayer) -> KeyValue | None:
    """K and V of the last tokens of a layer, as many as it still has; None: it is empty."""
    if layer.keys is None or layer.keys.ndim != 4 or not layer.keys.shape[2]:  # noqa: PLR2004 - lazily initialised
        return None
    recorded = layer.recorded() if isinstance(layer, RecordingSlidingLayer) else None
    if recorded is not None and recorded[0].shape[2] > layer.keys.shape[2]:
        return recorded
    return layer.keys, layer.values


def joined(
    config: ModelConfig, shape: KvShape, caches: Sequence[PrefixCache], pads: Sequence[int], num_columns: int
) -> PrefixCache:
    """Caches of one row each, of different lengths, as one: right-aligned, with zeros at their left.

    A left-padded batch is what ``generate`` takes; the zeros are behind its attention mask. Padding of a row may reach
    beyond the columns: then the row has nothing yet.
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
            one.keys = one.values = None  # else everything would be there twice until the last layer is done
    return batch


def _content(layer: CacheLayer) -> KeyValue | None:
    is_filled = layer.keys is not None and layer.keys.ndim == 4  # noqa: PLR2004 - else it is not initialised yet
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
