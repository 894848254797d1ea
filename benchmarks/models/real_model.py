"""Real decoder, run by transformers on the CPU: the KV of a text, and the next tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models.kv_pages import Array, PromptKv


class Tokenizer:
    """A model's tokenizer, from a folder that transformers wrote.

    Args:
        folder: of the model. Nothing is ever downloaded.
    """

    def __init__(self, folder: Path) -> None:
        transformers = _transformers()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._begin = int(transformers.AutoConfig.from_pretrained(folder).bos_token_id)

    def tokens(self, text: str, count: int) -> list[int]:
        """First tokens of a text, after the token that begins every text; without it models generate nonsense.

        Raises:
            ValueError: the text is shorter.
        """
        found = [token for token in self._tokenizer(text).input_ids if token != self._begin]
        if len(found) < count - 1:
            raise ValueError(f"a text has {len(found)} tokens: {count} are needed")
        return [self._begin, *found[: count - 1]]


class RealModel:
    """A model's weights, from a folder that transformers wrote.

    Args:
        folder: with weights in safetensors and configuration. Nothing is ever downloaded.
    """

    def __init__(self, folder: Path) -> None:
        self._torch: Any = import_module("torch")
        transformers = _transformers()
        self._new_cache = transformers.DynamicCache
        self._cache_option: Any = import_module("tierkv.integrations.transformers.layers").cache_option
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=self._torch.bfloat16)

    @property
    def layer_kinds(self) -> list[str]:
        """Kind of attention of each layer: ``full_attention``, ``sliding_attention``, ..."""
        config = self.model.config
        return list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)

    def prefill(self, tokens: Sequence[int]) -> PromptKv:
        """KV of a prompt, of every layer and all its tokens, also those outside of a window."""
        cache = self._new_cache()  # without the configuration: it keeps everything, and masks give the windows
        self._forward(tokens, cache, 1)
        layers = [(self._bits(layer.keys), self._bits(layer.values)) for layer in cache.layers]
        return PromptKv(np.stack([keys for keys, _ in layers]), np.stack([values for _, values in layers]))

    def logits(self, tokens: Sequence[int], last: int, kv: PromptKv | None = None) -> Any:  # noqa: ANN401 - torch
        """Logits at each of the last tokens: float32, ``[last, vocabulary]``.

        Args:
            tokens: the prompt, or what comes behind ``kv``.
            last: how many of its tokens are asked for.
            kv: of the tokens before; None: there are none.
        """
        return self._forward(tokens, self._cache(kv), last)

    def greedy(self, tokens: Sequence[int], count: int, kv: PromptKv | None = None) -> list[int]:
        """Generate ``count`` tokens greedily after the prompt."""
        cache, found = self._cache(kv), []
        given = list(tokens)
        for _ in range(count):
            given = [int(self._forward(given, cache, 1)[0].argmax())]
            found += given
        return found

    def _forward(self, tokens: Sequence[int], cache: Any, last: int) -> Any:  # noqa: ANN401 - transformers, torch
        with self._torch.inference_mode():
            ids = self._torch.tensor([list(tokens)])
            return (
                self.model(ids, **self._cache_option(self.model, cache), use_cache=True, logits_to_keep=last)
                .logits[0]
                .float()
            )

    def _cache(self, kv: PromptKv | None) -> Any:  # noqa: ANN401 - transformers
        cache = self._new_cache()
        if kv is not None:
            for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
                cache.update(self._heads(keys), self._heads(values), layer)
        return cache

    def _bits(self, tensor: Any) -> Array:  # noqa: ANN401 - torch
        """``[1, heads, tokens, size]`` as ``[tokens, heads * size]``, which is the order in pages."""
        heads = tensor[0].transpose(0, 1).contiguous().view(self._torch.uint16).numpy()
        found: Array = heads.reshape(len(heads), -1).copy()
        return found

    def _heads(self, bits: Array) -> Any:  # noqa: ANN401 - torch
        size = self._head_size
        rows = self._torch.from_numpy(np.ascontiguousarray(bits)).view(self._torch.bfloat16)
        return rows.view(1, len(bits), -1, size).transpose(1, 2).contiguous()

    @property
    def _head_size(self) -> int:
        config = self.model.config
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _transformers() -> Any:  # noqa: ANN401 - a module without types
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the import, which reads it
    return import_module("transformers")
